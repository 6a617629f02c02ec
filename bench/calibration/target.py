"""A replica that is calibrated, real or simulated: both are asked the same way.

Requests are token ids with one answer each at a time, so that both see the
very same prompts, and are sent over connections of their own, in a known order.
"""

import http.client
import json
import statistics
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from bench.replica.tiers import ReplicaTiers
from bench.ttft import BenchError

Prompt = Sequence[int]
"""Token ids."""

_TIMEOUT_S: Final = 300.0
_ENDLESS_TOKENS: Final = 4000
"""Of an answer that the client leaves before it ends."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One answer, as its client saw it."""

    ttft_s: float
    cached_tokens: int
    """Prompt tokens that were not computed, as the server tells in ``usage``."""
    token_s: float | None = None
    """Median time between the tokens after the first; None where there are too few."""


class Target:
    """One replica, and its only client.

    Before each request it waits for ``settle_s``: a replica stores the KV of an answer when
    that is over, on the same cores.
    """

    def __init__(
        self,
        tiers: ReplicaTiers,
        *,
        settle_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tiers = tiers
        self._settle_s = settle_s
        self._clock = clock

    def ask(self, prompt: Prompt, *, answer_tokens: int = 1) -> Asked:
        """Ask; raise `BenchError` when it is refused or nothing is answered."""
        time.sleep(self._settle_s)
        return self._send(prompt, answer_tokens).read()

    def ask_at_once(self, prompts: Sequence[Prompt]) -> list[Asked]:
        """Ask all the prompts, one right after the other, before any is answered."""
        time.sleep(self._settle_s)
        sent = [self._send(prompt, 1) for prompt in prompts]
        with ThreadPoolExecutor(max_workers=len(sent)) as threads:
            return list(threads.map(_Answer.read, sent))

    @contextmanager
    def decoding(self, prompts: Sequence[Prompt]) -> Iterator[None]:
        """Keep the replica decoding answers to these prompts for the time of the block."""
        leave = threading.Event()
        sent = [self._send(prompt, _ENDLESS_TOKENS) for prompt in prompts]
        with ThreadPoolExecutor(max_workers=len(sent) or 1) as threads:
            reading = [threads.submit(each.read_until, leave) for each in sent]
            try:
                self.tiers.wait_running(len(prompts))
                yield
            finally:
                leave.set()
            for each in reading:
                each.result()
        self.tiers.wait_idle()

    def _send(self, prompt: Prompt, answer_tokens: int) -> "_Answer":
        body = {
            "model": self.tiers.model,
            "prompt": list(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return _Answer(self.tiers.url, json.dumps(body).encode(), self._clock)


class _Answer:
    """One request that was sent, and the answer to it that comes piece by piece."""

    def __init__(self, url: str, body: bytes, clock: Callable[[], float]) -> None:
        self._url = url
        self._clock = clock
        address = urllib.parse.urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        self._connection.connect()  # not a part of what is timed
        self._sent_s = clock()
        headers = {"content-type": "application/json"}
        self._connection.request("POST", "/v1/completions", body, headers)

    def read(self) -> Asked:
        """Return what was answered, once it all has come."""
        came_s: list[float] = []
        usage: dict[str, Any] = {}
        for event in self._events():
            now_s = self._clock()
            if event.get("choices"):
                came_s.append(now_s)
            usage = event.get("usage") or usage
        if not came_s or not usage:
            raise BenchError(f"{self._url}: no token, or no usage, in the answer")
        gaps_s = [after - before for before, after in pairwise(came_s)]
        details = usage.get("prompt_tokens_details") or {}
        return Asked(
            ttft_s=came_s[0] - self._sent_s,
            cached_tokens=int(details.get("cached_tokens") or 0),
            token_s=statistics.median(gaps_s) if len(gaps_s) > 1 else None,
        )

    def read_until(self, leave: threading.Event) -> None:
        """Read until told to leave; the connection is then closed, which ends the answer."""
        for _ in self._events():
            if leave.is_set():
                return
        raise BenchError(f"{self._url}: an answer that was to keep it decoding has ended")

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            with self._connection.getresponse() as response:
                if response.status != http.HTTPStatus.OK:
                    raise BenchError(f"{self._url}: {response.status}: {response.read()[:500]!r}")
                for line in response:
                    name, _, text = line.strip().partition(b": ")
                    if name == b"data" and text != b"[DONE]":
                        yield json.loads(text)
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"{self._url}: {error!r}") from error
        finally:
            self._connection.close()
