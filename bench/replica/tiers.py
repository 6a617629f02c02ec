"""Bringing a prefix into one tier of a real replica, and out of the faster ones.

The engine's own calls and vLLM's development call (`VLLM_SERVER_DEV_MODE=1`)
do the work; what is waited for is asked, never guessed by time.
"""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from warmroute_common.admin_token import admin_token_headers

_POLL_S: Final = 0.05


class NotThereError(Exception):
    """A replica or router did not reach the wanted state in time."""


def call(
    url: str,
    body: object = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60,
) -> Any:
    """Return the JSON answer of a GET, or of a POST where there is a body.

    Raises OSError (urllib's own) when there is none.
    """
    data = None if body is None else json.dumps(body).encode()
    told = {"content-type": "application/json", **admin_token_headers(url), **(headers or {})}
    request = urllib.request.Request(url, data=data, method=method, headers=told)
    try:
        with _opener().open(request, timeout=timeout_s) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        raise OSError(f"{url}: {error.code}: {error.read()[:500].decode()}") from None
    return json.loads(text) if text else None


def _get_text(url: str) -> str:
    request = urllib.request.Request(url, headers=admin_token_headers(url))
    with _opener().open(request, timeout=60) as response:
        text: str = response.read().decode()
    return text


def _opener() -> urllib.request.OpenerDirector:
    # Never through a proxy from the environment: these are processes of this machine.
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def metric(url: str, name: str, **labels: str) -> float:
    """Return a figure that a server tells on its ``/metrics``, as `total` finds it."""
    return total(_get_text(f"{url}/metrics"), name, **labels)


def total(metrics: str, name: str, **labels: str) -> float:
    """Return the sum of a figure, of a text in Prometheus' format, over all that has the labels.

    0 where there is none.
    """
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and all(each in line for each in wanted)
    )


def wait_until(what: str, check: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Wait until ``check`` is true; after ``timeout_s`` raise `NotThereError`, naming ``what``."""
    deadline_s = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline_s:
            raise NotThereError(f"{what}: not so after {timeout_s:.0f} s")
        time.sleep(_POLL_S)


def knows_replicas(router_url: str, model: str, replicas: int) -> bool:
    """Whether a router knows this many replicas and the model's tokens; its start waits 1 s."""
    chat = {"model": model, "messages": [{"role": "user", "content": "Who is there?"}]}
    answer = call(f"{router_url}/explain", chat)
    return bool(answer["exact_tokens"]) and len(answer["candidates"]) == replicas


class Vllm:
    """A running vLLM and its GPU tier, to be measured.

    ``url`` is its OpenAI server's. It must be idle while this is used.
    """

    def __init__(self, *, name: str, url: str, model: str) -> None:
        self.name = name
        self.url = url
        self.model = model

    def chat_tokens(self, content: str) -> list[int]:
        """Return the tokens of a chat prompt with one message of a user's."""
        body = {"model": self.model, "messages": [{"role": "user", "content": content}]}
        tokens: list[int] = call(f"{self.url}/tokenize", body)["tokens"]
        return tokens

    def complete(self, prompt: str | Sequence[int], **more: object) -> dict[str, Any]:
        """Return the answer to a prompt, one token long."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
        answer: dict[str, Any] = call(f"{self.url}/v1/completions", body, timeout_s=300)
        return answer

    def empty_gpu(self) -> None:
        """Empty the GPU tier, and have vLLM tell so to whom it tells its events.

        vLLM refuses while a transfer still holds blocks, and publishes events
        only when it steps: hence the tiny request.
        """
        url = f"{self.url}/reset_prefix_cache"

        def emptied() -> bool:
            return bool(call(url, {}, method="POST")["success"])

        wait_until(f"{self.name}: GPU tier emptied", emptied)
        body = {"model": self.model, "prompt": "Step.", "max_tokens": 1}
        call(f"{self.url}/v1/completions", body)


class ReplicaTiers(Vllm):
    """The tiers of one running replica with our engine, to be measured.

    ``agent_url`` is its agent's, ``disk`` the directory of its disk tier.
    """

    def __init__(self, *, name: str, url: str, agent_url: str, model: str, disk: Path) -> None:
        super().__init__(name=name, url=url, model=model)
        self.agent_url = agent_url
        self.disk = disk

    def chunk_tokens(self) -> int:
        """Return how many tokens a chunk has."""
        return int(call(f"{self.agent_url}/info")["chunk_tokens"])

    def tiers_of(self, tokens: Sequence[int]) -> list[str]:
        """Return the fastest tier below the GPU that holds each leading chunk of a prompt."""
        tiers: list[str] = call(f"{self.agent_url}/lookup", {"tokens": list(tokens)})["tiers"]
        return tiers

    def wait_stored(self, tokens: Sequence[int], tier: str, *, timeout_s: float = 60.0) -> None:
        """Wait until every full chunk of ``tokens`` is in ``tier`` (and in no faster one)."""
        chunks = len(tokens) // self.chunk_tokens()

        def all_there() -> bool:
            return self.tiers_of(tokens) == [tier] * chunks

        wait_until(f"{self.name}: {chunks} chunks in {tier}", all_there, timeout_s=timeout_s)

    def leave_on_disk(self, tokens: Sequence[int], *, drop_page_cache: bool = True) -> None:
        """Empty the CPU tier until the prompt's chunks are on disk alone.

        What is still being written stays in the CPU tier until it is, so one
        call may not be enough.
        """
        chunks = len(tokens) // self.chunk_tokens()

        def on_disk_alone() -> bool:
            call(f"{self.agent_url}/clear", {"tiers": ["cpu"]})
            return self.tiers_of(tokens) == ["disk"] * chunks

        wait_until(f"{self.name}: {chunks} chunks on disk alone", on_disk_alone)
        if drop_page_cache:
            forget_pages(self.disk)


def forget_pages(directory: Path) -> None:
    """Write a directory's files to the device and drop them from the page cache."""
    for path in directory.rglob("*"):
        if not path.is_file():
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # evicted meanwhile
        try:
            # Pages that are not yet written cannot be dropped.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens two prompts share."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
