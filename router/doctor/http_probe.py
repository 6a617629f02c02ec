"""HTTP requests of the checks; a failure says what a person can do about it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp
import orjson

from warmroute_common.connection_errors import connection_problem

_MAX_BYTES: Final = 4 << 20
"""Most bytes of an answer that are read."""


@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    status: int
    body: bytes
    clock_ahead_s: float | None = None
    """How far the server's clock is ahead of ours, to about a second; None if the answer has no
    valid ``Date``."""

    def json(self) -> Any:
        """Return the body as JSON; None if it is not JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None


class ProbeError(Exception):
    """A server did not answer; the text says why."""


async def get(
    session: aiohttp.ClientSession,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    verify: bool = True,
) -> HttpAnswer:
    """Return the answer to a GET, whatever its status; raise `ProbeError`."""
    return await send(session, "GET", url, headers=headers, timeout_s=timeout_s, verify=verify)


async def send(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    timeout_s: float,
    verify: bool = True,
) -> HttpAnswer:
    """Return the answer to a request, whatever its status; raise `ProbeError`.

    Without ``verify`` any certificate is accepted: for requests that carry no secret.
    """
    began_s = time.time()
    try:
        async with session.request(
            method,
            url,
            headers=headers,
            data=body,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            ssl=verify,
        ) as response:
            ahead_s = _clock_ahead_s(response.headers.get("Date"), (began_s + time.time()) / 2)
            answer = await response.content.read(_MAX_BYTES)
            return HttpAnswer(status=response.status, body=answer, clock_ahead_s=ahead_s)
    except TimeoutError:
        raise ProbeError(f"does not answer within {timeout_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ProbeError(connection_problem(error, url)) from None


def _clock_ahead_s(date: str | None, now_s: float) -> float | None:
    if date is None:
        return None
    try:
        # The header has whole seconds, rounded down: on average half a second is missing.
        return parsedate_to_datetime(date).timestamp() + 0.5 - now_s
    except ValueError:
        return None
