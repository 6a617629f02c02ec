"""The clients of a soak: they send, read in their manner, and check every byte."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import aiohttp

from bench.soak.clients.answers import (
    Answers,
    End,
    Expected,
    StreamCheck,
    WrongAnswerError,
    check_whole,
)
from bench.soak.clients.talk import Manner, Request, Talk
from bench.soak.ledger import Ended, Ledger, Outcome

_KEEPALIVE_S: Final = 10.0
_LONGEST_S: Final = 180.0
"""After which a request hangs for ever."""
_LEAVES_AFTER_S: Final = 3.0
_UNREAD_S: Final = 12.0
_SLOW_PAUSE_S: Final = 0.2
_HELD_S: Final = 90.0
_BODY_PIECES: Final = 8
_BODY_PAUSE_S: Final = 0.4
_READ_BYTES: Final = 1024
_RECEIVE_BYTES: Final = 4096
"""Of a slow client's socket: what it does not read the router cannot send for long."""


def _small_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    return made


class _HeldError(Exception):
    """A request of which half never came is still waited for."""


class _LeftError(Exception):
    """The client has closed its connection, as it was to."""


@dataclass(kw_only=True)
class _Seen:
    """How far a request and its answer have come."""

    is_sent: bool = True
    """Whether all of its body has been sent."""
    status: int | None = None
    replica_id: str | None = None


@dataclass(kw_only=True)
class Client:
    """One client: it asks until it is told to end."""

    url: str
    talk: Talk
    answers: Answers
    ledger: Ledger
    until_s: float
    session: aiohttp.ClientSession

    async def run(self) -> None:
        """Send one request after the other until the time is over."""
        while time.monotonic() < self.until_s:
            request = self.talk.next()
            expected = self.answers.expected(request.request_id, request.body)
            ended = await self._ask(request, expected)
            self.ledger.note(ended)
            if ended.outcome is Outcome.WHOLE:
                self.talk.answered(expected.text)
            await asyncio.sleep(self.talk.pause_s())

    async def _ask(self, request: Request, expected: Expected) -> Ended:
        seen, began_s = _Seen(), time.monotonic()
        try:
            async with asyncio.timeout(_LONGEST_S):
                outcome, detail = await self._exchange(request, expected, seen)
        except _LeftError:
            outcome, detail = Outcome.LEFT, ""
        except _HeldError:
            outcome, detail = Outcome.HELD, f"waited for after {_HELD_S:.0f} s"
        except WrongAnswerError as error:
            outcome, detail = Outcome.WRONG, str(error)
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is one
            outcome, detail = Outcome.CUT, f"{type(error).__name__} {error}"
        if outcome is Outcome.CUT:
            outcome = self._judged(request, seen, began_s)
            detail = f"{detail} after {time.monotonic() - began_s:.1f} s"
        return Ended(request=request, outcome=outcome, detail=detail, replica_id=seen.replica_id)

    def _judged(self, request: Request, seen: _Seen, began_s: float) -> Outcome:
        """Return what it is called that an answer broke off."""
        if request.manner is Manner.HALF_SENT:
            return Outcome.TIMED_OUT
        if seen.status is None:
            return Outcome.LOST
        was = self.ledger.was_in_trouble(seen.replica_id, began_s, time.monotonic())
        return Outcome.CUT if was else Outcome.UNEXPLAINED

    async def _exchange(
        self, request: Request, expected: Expected, seen: _Seen
    ) -> tuple[Outcome, str]:
        headers = {"X-Request-Id": request.request_id, "Content-Type": "application/json"}
        if request.session is not None:
            headers["X-Session-Id"] = request.session
        body = json.dumps(request.body).encode()
        data: bytes | AsyncIterator[bytes] = body
        if request.manner in (Manner.SENDS_SLOWLY, Manner.HALF_SENT):
            headers["Content-Length"] = str(len(body))
            seen.is_sent = False
            data = _in_pieces(body, seen, whole=request.manner is Manner.SENDS_SLOWLY)
        leaves_s = self._leaves_s(request)
        try:
            async with (
                asyncio.timeout(leaves_s),
                self.session.post(self.url + request.path, data=data, headers=headers) as response,
            ):
                seen.status = response.status
                seen.replica_id = response.headers.get("x-warmroute-replica")
                return await self._read(request, expected, response, seen)
        except TimeoutError:
            if leaves_s is None:
                raise
            raise _LeftError from None

    def _leaves_s(self, request: Request) -> float | None:
        """Return after what time the client leaves, if it does."""
        if request.manner is Manner.LEAVES:
            return self.talk.chance(_LEAVES_AFTER_S)
        if request.manner is Manner.NEVER_READS:
            return _UNREAD_S
        return None

    async def _read(
        self,
        request: Request,
        expected: Expected,
        response: aiohttp.ClientResponse,
        seen: _Seen,
    ) -> tuple[Outcome, str]:
        if response.status == 408 and not seen.is_sent:
            return Outcome.TIMED_OUT, ""
        if response.status != 200:
            said = (await response.read())[:500].decode(errors="replace")
            return Outcome.LOST, f"{response.status} {said}"
        if request.manner is Manner.NEVER_READS:
            await asyncio.sleep(2 * _UNREAD_S)
        if not request.streamed:
            check_whole(expected, await response.read())
            return Outcome.WHOLE, ""
        check = StreamCheck(expected)
        try:
            async for chunk in response.content.iter_any():
                check.feed(chunk)
                if request.manner is Manner.READS_SLOWLY:
                    await asyncio.sleep(_SLOW_PAUSE_S)
        finally:
            end = check.end()
        if end is End.SHORT:
            raise WrongAnswerError("the stream ended as if it were whole, and is not")
        return (Outcome.WHOLE, "") if end is End.WHOLE else (Outcome.CUT, "told by an event")


async def _in_pieces(body: bytes, seen: _Seen, *, whole: bool) -> AsyncIterator[bytes]:
    size = len(body) // _BODY_PIECES + 1
    for at in range(0, len(body), size):
        if at > len(body) // 2 and not whole:
            await asyncio.sleep(_HELD_S)
            raise _HeldError
        seen.is_sent = at + size >= len(body)  # on a busy machine it may take too long as well
        yield body[at : at + size]
        await asyncio.sleep(_BODY_PAUSE_S)


def client_session() -> aiohttp.ClientSession:
    """Return what all clients send with: small buffers, connections kept for a while."""
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=_KEEPALIVE_S, socket_factory=_small_socket
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        read_bufsize=_READ_BYTES,
        auto_decompress=False,
    )
