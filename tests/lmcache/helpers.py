"""Requests for a router before real replicas, and what it answers."""

import json
import random
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL = "m"
TOKENS = 3000


@dataclass(frozen=True)
class Reply:
    """An answer of the router's."""

    seconds: float
    headers: Mapping[str, str]
    text: str

    @property
    def replica(self) -> str:
        return self.headers["x-warmroute-replica"]

    def matched(self, tier: str) -> int:
        return int(self.headers[f"x-warmroute-matched-{tier}"])

    @property
    def asked_and_missing(self) -> tuple[int, int]:
        """How many chunks had to be prefetched, and how many of them were missing.

        How many of the others came before the request was forwarded is a matter of time.
        """
        counts = dict(each.split("=") for each in self.headers["x-warmroute-prefetch"].split(";"))
        return int(counts["asked"]), int(counts["missing"])


def ask(url: str, body: Mapping[str, Any]) -> Reply:
    """Ask a router, or a replica itself."""
    path = "chat/completions" if "messages" in body else "completions"
    data = json.dumps({"model": MODEL, "max_tokens": 8, "temperature": 0, **body}).encode()
    request = urllib.request.Request(f"{url}/v1/{path}", data, {"content-type": "application/json"})
    began_s = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.loads(response.read())
    choice = answer["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Reply(time.monotonic() - began_s, dict(response.headers), text)


def prompt(seed: int, tokens: int = TOKENS) -> dict[str, Any]:
    """Return a request for a prompt of its own."""
    chance = random.Random(seed)
    return {"prompt": [chance.randrange(10, 4000) for _ in range(tokens)]}


def chat(seed: int) -> dict[str, Any]:
    """Return a first turn of about 3,000 tokens."""
    chance = random.Random(seed)
    text = " ".join(str(chance.randrange(1000)) for _ in range(1200))
    return {"messages": [{"role": "user", "content": text}]}


def next_turn(body: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """Return the turn after a chat that was answered."""
    turns = [*body["messages"], {"role": "assistant", "content": answer}]
    return {"messages": [*turns, {"role": "user", "content": "And then?"}]}
