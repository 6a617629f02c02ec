"""Answers that are decoded all the time, and when each of their tokens comes."""

import asyncio
import time
from typing import Any, Final

import aiohttp

from bench.ttft import BenchError

_MAX_TOKENS: Final = 512
_ALONE: Final = {"connection": "close"}
"""A connection that is kept for the next answer may be closed by vLLM just then."""
_PROMPT: Final = "Count the stars of stream {number}, one after the other, and name each of them: "


class Decodes:
    """So many streams of one vLLM, each answer followed by the next, from `run` on."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, streams: int) -> None:
        self._session = session
        self._url = url
        self._model = model
        self._streams = streams
        self.gaps: list[tuple[float, float]] = []
        """When a token came, by the monotonic clock, and how long after the one before it."""

    async def run(self) -> None:
        """Read answers; without end. Raises `BenchError` when one does not come."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._streams):
                    tasks.create_task(self._stream(number))
        except* aiohttp.ClientError as errors:
            raise BenchError(f"{self._url}: {errors.exceptions[0]!r}") from None

    async def _stream(self, number: int) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": _PROMPT.format(number=number),
            "max_tokens": _MAX_TOKENS,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
        url = f"{self._url}/v1/completions"
        while True:
            async with self._session.post(url, json=body, headers=_ALONE) as response:
                response.raise_for_status()
                await self._read(response)

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        before_s: float | None = None
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now_s = time.monotonic()
            if before_s is not None:
                self.gaps.append((now_s, now_s - before_s))
            before_s = now_s
