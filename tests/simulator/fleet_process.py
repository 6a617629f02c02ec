"""What tests here share."""

import http.client
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.replica.tiers import call, knows_replicas, wait_until
from simulator.openai_prompts import NUM_WORDS, text_of


@contextmanager
def simulating(*options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run ``python -m simulator``; give the process and what it says of itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", "simulator", "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def routing(where: dict[str, Any], directory: Path, **settings: Any) -> Iterator[str]:
    """Run ``warmroute serve`` in front of a fleet, with more settings; give its URL.

    It knows all replicas and the model's tokens then: by itself it waits for them only 1 s.
    """
    config = {
        "port": 0,
        "replicas": [
            {name: each[name] for name in ("url", "agent_url", "instance_id")}
            for each in where["replicas"]
        ],
        "rates": where["router_rates"],
        **settings,
    }
    path = directory / "router.yaml"
    path.write_text(json.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "router", "serve", "--config", str(path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "OPENAI_BASE_URL=" in line:
                    break
            url = line.split("OPENAI_BASE_URL=")[1].strip().removesuffix("/v1")
            wait_until(
                "the router knows its fleet",
                partial(knows_replicas, url, "sim", len(where["replicas"])),
            )
            yield url
        finally:
            process.kill()


@dataclass
class Fleet:
    """Where everything is, and short ways to it."""

    where: dict[str, Any]
    router: str

    def url(self, instance_id: str, kind: str = "url") -> str:
        return next(
            str(each[kind]) for each in self.where["replicas"] if each["instance_id"] == instance_id
        )

    def truth(self, instance_id: str) -> dict[str, Any]:
        replicas = call(f"{self.where['control_url']}/truth")
        found: dict[str, Any] = next(
            each for each in replicas if each["instance_id"] == instance_id
        )
        return found

    def ask(self, ids: list[int], *, base: str | None = None, **more: Any) -> "Answer":
        body = {"model": "sim", "prompt": text_of(ids), "max_tokens": 8, **more}
        split = urlsplit(base or self.router)
        connection = http.client.HTTPConnection(split.netloc, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        assert response.status == 200, text
        return Answer(dict(response.headers), text)

    def explained_chat(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        body = {"model": "sim", "messages": messages, "max_tokens": 8}
        answer: dict[str, Any] = call(f"{self.router}/explain", body)
        return answer

    def explained(self, ids: list[int]) -> dict[str, Any]:
        body = {"model": "sim", "prompt": text_of(ids), "max_tokens": 8}
        answer: dict[str, Any] = call(f"{self.router}/explain", body)
        return answer

    def matched(self, ids: list[int], tier: str) -> int:
        """What the router believes, of the replica that it would pick."""
        return int(self.explained(ids)["matched_tokens"].get(tier, 0))

    def last_request(self, instance_id: str) -> dict[str, Any]:
        log = call(f"{self.where['control_url']}/requests")
        found: dict[str, Any] = [each for each in log if each["instance_id"] == instance_id][-1]
        return found


@dataclass
class Answer:
    """Headers and body."""

    headers: dict[str, str]
    text: str

    @property
    def replica(self) -> str:
        return self.headers["x-warmroute-replica"]

    @property
    def cached_tokens(self) -> int:
        cached: int = json.loads(self.text)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    def matched(self, tier: str) -> int:
        return int(self.headers[f"x-warmroute-matched-{tier}"])


def prompt(seed: int, tokens: int = 4096) -> list[int]:
    return random.Random(seed).choices(range(NUM_WORDS), k=tokens)
