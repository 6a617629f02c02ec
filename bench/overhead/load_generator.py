"""The load generator's process: ``python -m bench.overhead.load_generator``.

It sends one case to one contender: as fast as some connections can, or each request when it is
due. Each connection sends one request at a time. aiohttp's client would be busier than the routers
that are measured.

A line on standard input is the `Plan`; the line `GO` starts it. Standard output has a `Line` for
each event.
"""

import asyncio
import gc
import resource
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from bench.overhead import cases as prompts
from bench.overhead.cases import PATH, AnswerForm, Sequences
from bench.overhead.fake_replicas import expected

GO: Final = "go\n"
"""Told when it is ready and should begin."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to send; told first."""

    urls: tuple[str, ...]
    """Where to, in turns."""
    bodies: str
    """The file of them."""
    answer: AnswerForm
    tokens: int
    """Events of an answer."""
    rate_per_s: float | None
    connections: int
    """Requests under way at once, where there is no rate."""
    status: int = 200
    """Of every answer; one that is not 200 may have any body."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it went. Times in seconds."""

    first_s: tuple[float, ...]
    """From sending a request to the first byte of its answer's body, without failed ones."""
    whole_s: tuple[float, ...]
    """To its last byte."""
    errors: int
    first_error: str | None
    elapsed_s: float
    cpu_s: float
    """CPU seconds of the load generator itself."""
    late_s: tuple[float, ...]
    """How much later than due each request with a time was taken up."""


class Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What it says, one of these a line."""

    ready: bool = False
    """It could begin."""
    open: int | None = None
    """The last timed request has been sent; this many are in flight."""
    done: Outcome | None = None


_ERROR_CHARS: Final = 200
_TIMEOUT_S: Final = 60.0
_OK: Final = 200


class BadAnswerError(Exception):
    """An answer that is not the one expected; the text says how."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer. Times of one clock, the connection's."""

    sent_s: float
    first_s: float
    """When the first byte of its body came."""
    end_s: float


class Connection(asyncio.Protocol):
    """A connection to a contender."""

    def __init__(self, now: Callable[[], float]) -> None:
        """``now``: a clock in seconds; uvloop's own counts milliseconds."""
        self._now = now
        self._transport: asyncio.WriteTransport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._sent_s = self._first_s = self._read_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, expected: bytes, status: int = _OK) -> Timing:
        """Send a request; return when its answer has come whole.

        Raises `BadAnswerError` when it has another ``status``, or is 200 with another body than
        ``expected``, and TimeoutError.
        """
        assert self._transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self._parts = []
        self._parser = httptools.HttpResponseParser(self)
        self._sent_s = self._now()
        self._transport.write(request)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._answered
        finally:
            self._answered = None
        timing = Timing(self._sent_s, self._first_s, self._read_s)
        body = b"".join(self._parts)
        if self._parser.get_status_code() != status:
            shown = body[:_ERROR_CHARS].decode(errors="replace")
            raise BadAnswerError(f"{self._parser.get_status_code()}: {shown}")
        if status == _OK:
            _check(body, expected)
        return timing

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.close()

    # --- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave it; an answer that is not whole by now will never be."""
        self._transport = None
        self._fail(f"the answer broke off: {exc or 'the connection was closed'}")

    def data_received(self, data: bytes) -> None:
        """Note the bytes of an answer."""
        self._read_s = self._now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")
            self.close()

    # --- the parser's calls

    def on_body(self, body: bytes) -> None:
        """Some of the body has come."""
        if not self._parts:
            self._first_s = self._read_s
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if not self._parser.should_keep_alive():
            self.close()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _fail(self, what: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(BadAnswerError(what))


def _check(body: bytes, expected: bytes) -> None:
    if body != expected:
        at = next(
            (i for i, pair in enumerate(zip(body, expected, strict=False)) if pair[0] != pair[1]),
            min(len(body), len(expected)),
        )
        shown = body[at : at + _ERROR_CHARS].decode(errors="replace")
        raise BadAnswerError(
            f"{len(body)} bytes, not {len(expected)}; they differ from byte {at} on: {shown}"
        )


class Connections:
    """Connections to one or several addresses in turn, opened when none is idle."""

    def __init__(self, urls: Sequence[str], expected: bytes, status: int = _OK) -> None:
        self._urls = deque(urls)
        self._expected = expected
        self._status = status
        self._idle: dict[str, deque[Connection]] = {url: deque() for url in urls}

    async def ask(self, body: bytes) -> Timing:
        """Send a request; raises what `Connection.ask` raises, and OSError."""
        url = self._urls[0]
        self._urls.rotate(-1)
        connection = self._idle_one(url) or await _open(url)
        try:
            timing = await connection.ask(_request(url, body), self._expected, self._status)
        except (BadAnswerError, TimeoutError):
            connection.close()
            raise
        self._idle[url].append(connection)
        return timing

    def close(self) -> None:
        """Close all that are idle."""
        for connections in self._idle.values():
            for each in connections:
                each.close()

    def _idle_one(self, url: str) -> Connection | None:
        idle = self._idle[url]
        while idle:
            # The one used last: it is the least likely to be closed just now.
            connection = idle.pop()
            if connection.is_open:
                return connection
        return None


async def _open(url: str) -> Connection:
    loop = asyncio.get_running_loop()
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    _, connection = await loop.create_connection(
        lambda: Connection(time.perf_counter), parts.hostname, parts.port
    )
    return connection


def _request(url: str, body: bytes) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


Ask = Callable[[bytes], Awaitable[Timing]]


@dataclass(kw_only=True)
class Sent:
    """What became of the requests so far."""

    timings: list[Timing] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    """Of requests with a time: how much later each was taken up."""
    errors: int = 0
    first_error: str | None = None
    in_flight: int = 0

    async def ask(self, ask: Ask, body: bytes) -> None:
        """Send one, and note how it went."""
        self.in_flight += 1
        try:
            self.timings.append(await ask(body))
        except (BadAnswerError, OSError, TimeoutError) as error:
            self.errors += 1
            self.first_error = self.first_error or f"{type(error).__name__}: {error}"
        finally:
            self.in_flight -= 1


async def flood(ask: Ask, sequences: Sequences, connections: int, sent: Sent) -> None:
    """Send everything, with this many requests in flight at once.

    The sequences are shared among the connections; inside one the next request
    follows the answer.
    """
    left = iter(sequences)

    async def work() -> None:
        for sequence in left:
            for body in sequence:
                await sent.ask(ask, body)

    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(work())


async def paced(
    ask: Ask,
    sequences: Sequences,
    rate_per_s: float,
    sent: Sent,
    all_sent: Callable[[], None],
) -> None:
    """Send each request when it is due, or when the answer before it has come, if later.

    Sequences take turns, so that a conversation's requests are far apart.
    ``all_sent`` is called when none is left to be sent.
    """
    began_s = time.perf_counter()
    before: dict[int, asyncio.Task[None]] = {}

    async def after(previous: asyncio.Task[None] | None, body: bytes) -> None:
        if previous is not None:
            await previous
        await sent.ask(ask, body)

    async with asyncio.TaskGroup() as group:
        for number, (name, body) in enumerate(in_turns(sequences)):
            due_s = began_s + number / rate_per_s
            await asyncio.sleep(due_s - time.perf_counter())
            sent.late_s.append(time.perf_counter() - due_s)
            before[name] = group.create_task(after(before.get(name), body))
        # The last one is sent in the next turn of the loop.
        await asyncio.sleep(0)
        all_sent()


def in_turns(sequences: Sequences) -> Iterator[tuple[int, bytes]]:
    """Yield the first of every sequence, with the sequence's number, then the second, and so on."""
    for turn in range(max(map(len, sequences), default=0)):
        for name, sequence in enumerate(sequences):
            if turn < len(sequence):
                yield name, sequence[turn]


async def generate(plan: Plan) -> None:
    """Carry out a plan."""
    sequences = prompts.read(Path(plan.bodies))
    connections = Connections(plan.urls, expected(plan.answer, plan.tokens), plan.status)
    sent = Sent()
    gc.freeze()
    gc.disable()
    _say(Line(ready=True))
    if sys.stdin.readline() != GO:
        return
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    if plan.rate_per_s is None:
        await flood(connections.ask, sequences, plan.connections, sent)
    else:
        await paced(
            connections.ask,
            sequences,
            plan.rate_per_s,
            sent,
            lambda: _say(Line(open=sent.in_flight)),
        )
    elapsed_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
    _say(Line(done=_outcome(sent, elapsed_s, cpu_s)))
    connections.close()


def _outcome(sent: Sent, elapsed_s: float, cpu_s: float) -> Outcome:
    return Outcome(
        first_s=tuple(each.first_s - each.sent_s for each in sent.timings),
        whole_s=tuple(each.end_s - each.sent_s for each in sent.timings),
        errors=sent.errors,
        first_error=sent.first_error,
        elapsed_s=elapsed_s,
        cpu_s=cpu_s,
        late_s=tuple(sent.late_s),
    )


def _say(line: Line) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Carry out the plan on standard input; return the exit code."""
    uvloop.run(generate(msgspec.json.decode(sys.stdin.readline(), type=Plan)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
