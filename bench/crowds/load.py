"""Ordinary requests at an even rate, and how long each took."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Final

import aiohttp

from bench.crowds.kinds import PATH

_BODY: Final = json.dumps(
    {
        "model": "sim",
        "stream": True,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "word " * 200}],
    }
).encode()
_END: Final = b"data: [DONE]\n\n"
_QUANTILE: Final = 0.99


class BadAnswerError(Exception):
    """An ordinary request was not answered as it should be."""


async def timed(url: str, *, per_s: float, for_s: float) -> list[float]:
    """Send requests at a rate; return their seconds. Raises `BadAnswerError`."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        count = int(per_s * for_s)
        began_s = time.monotonic()
        return await asyncio.gather(
            *(_one(session, url, began_s + number / per_s) for number in range(count))
        )


async def _one(session: aiohttp.ClientSession, url: str, at_s: float) -> float:
    await asyncio.sleep(at_s - time.monotonic())
    # From when it is sent, not from when it was due: this process is not what is judged.
    began_s = time.monotonic()
    async with session.post(
        url + PATH, data=_BODY, headers={"Content-Type": "application/json"}
    ) as response:
        body = await response.read()
    if response.status != 200 or not body.endswith(_END):
        raise BadAnswerError(f"{response.status} {body[:200]!r}")
    return time.monotonic() - began_s


def p99(seconds: Sequence[float]) -> float:
    """Return the 99th percentile."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(_QUANTILE * len(ordered)))]
