"""Asking over HTTP, with failures in words that a person can act on."""

import errno
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import orjson

from router.config import join_host_port
from warmroute_common.config_reader import describe

_LONGEST_BYTES: Final = 4 << 20
"""Longest answer that is read."""


@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    """An answer."""

    status: int
    body: bytes
    clock_ahead_s: float | None = None
    """How far the server's clock is ahead of ours, within a second; None: it does not tell."""

    def json(self) -> Any:
        """Return its JSON; None where it is none."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None


class NoAnswerError(Exception):
    """A server could not be asked; the text says why."""


async def get(
    session: aiohttp.ClientSession,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    verify: bool = True,
) -> HttpAnswer:
    """Return what is answered at a URL, whatever its status; raise `NoAnswerError`."""
    return await ask(session, "GET", url, headers=headers, timeout_s=timeout_s, verify=verify)


async def ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    timeout_s: float,
    verify: bool = True,
) -> HttpAnswer:
    """Return what is answered at a URL, whatever its status; raise `NoAnswerError`.

    Without ``verify`` any certificate will do: for questions that carry no secret.
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
            told = await response.content.read(_LONGEST_BYTES)
            return HttpAnswer(status=response.status, body=told, clock_ahead_s=ahead_s)
    except TimeoutError:
        raise NoAnswerError(f"does not answer within {timeout_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise NoAnswerError(in_words(error, url)) from None


def in_words(error: BaseException, url: str) -> str:
    """Return why a server could not be asked."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    where = join_host_port(parts.hostname or "", port)
    match error:
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            found = f"its certificate is not accepted ({error})"
        case aiohttp.ClientConnectorDNSError() | socket.gaierror():
            found = f"the name '{parts.hostname}' is not known here (DNS)"
        case aiohttp.ClientConnectorError():
            found = in_words(error.os_error, url)
        case aiohttp.ServerDisconnectedError():
            found = f"{where} takes the connection and closes it without an answer"
        case OSError() if _is(error, errno.ECONNREFUSED):
            found = f"nothing listens at {where} (connection refused)"
        case OSError() if _is(error, errno.EHOSTUNREACH, errno.ENETUNREACH):
            found = f"there is no way to {where} (unreachable)"
        case _:
            found = f"{where}: {describe(error)}"
    return found


def _is(error: OSError, *numbers: int) -> bool:
    if error.errno is not None:
        return error.errno in numbers
    # With several addresses of a name asyncio raises one error with all their texts.
    return any(f"[Errno {each}]" in str(error) for each in numbers)


def _clock_ahead_s(date: str | None, now_s: float) -> float | None:
    if date is None:
        return None
    try:
        # Whole seconds, cut off: on average half a second is missing.
        return parsedate_to_datetime(date).timestamp() + 0.5 - now_s
    except ValueError:
        return None
