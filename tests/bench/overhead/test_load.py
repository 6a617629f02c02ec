"""The load generator: what it sends, when, and what it takes for a good answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.overhead.load_generator import (
    BadAnswerError,
    Connections,
    Sent,
    Timing,
    flood,
    in_turns,
    paced,
)
from tests.bench.overhead.listening import listening

EXPECTED = b"one" + b"two"


class Scripted(asyncio.Protocol):
    """Answers each request with the next of some scripts: parts to write, None to hang up."""

    def __init__(self, scripts: list[list[bytes | None]], requests: list[bytes]) -> None:
        self._scripts = scripts
        self._requests = requests
        self._written: list[asyncio.TimerHandle] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._requests.append(data)
        for part in self._scripts.pop(0):
            if part is None:
                self._transport.close()
            else:
                self._transport.write(part)


@asynccontextmanager
async def answering(
    *scripts: list[bytes | None], requests: list[bytes] | None = None, status: int = 200
) -> AsyncIterator[Connections]:
    left = list(scripts)
    seen: list[bytes] = [] if requests is None else requests
    async with listening(lambda: Scripted(left, seen)) as url:
        connections = Connections([url], EXPECTED, status)
        yield connections
        connections.close()


OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"Content-Length: 6\r\n\r\nonetwo"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "script",
    [
        [WHOLE],
        [CHUNKED, b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"],
        [CHUNKED, b"3\r\non", b"e\r\n", b"3\r", b"\ntwo\r\n0\r\n", b"\r\n"],
        [OK + b"Connection: close\r\nContent-Length: 6\r\n\r\none", b"two", None],
    ],
)
async def test_an_answer_is_good_in_whatever_pieces_it_comes(script: list[bytes | None]) -> None:
    async with answering(script) as connections:
        timing = await connections.ask(b"{}")
    assert timing.sent_s <= timing.first_s <= timing.end_s


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ([OK + b"Content-Length: 6\r\n\r\nonetwX"], "they differ from byte 5 on: X"),
        ([CHUNKED, b"3\r\none\r\n0\r\n\r\n"], "3 bytes, not 6"),
        ([CHUNKED, b"3\r\none\r\n", None], "broke off"),
        ([None], "broke off"),
        ([b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy"], "503: busy"),
        ([b"what?\r\n\r\n"], "no HTTP"),
    ],
)
async def test_any_other_answer_is_an_error_that_says_what_came(
    script: list[bytes | None], why: str
) -> None:
    async with answering(script) as connections:
        with pytest.raises(BadAnswerError, match=why):
            await connections.ask(b"{}")


async def test_where_refusals_are_measured_any_other_answer_is_an_error() -> None:
    refusal = b"HTTP/1.1 429 No\r\nContent-Length: 4\r\n\r\nfull"
    async with answering([refusal], [WHOLE], status=429) as connections:
        timing = await connections.ask(b"{}")
        assert timing.first_s <= timing.end_s
        with pytest.raises(BadAnswerError, match="200: onetwo"):
            await connections.ask(b"{}")


async def test_a_connection_is_used_again_and_one_that_was_closed_is_not() -> None:
    requests: list[bytes] = []
    closing: list[bytes | None] = [OK + b"Connection: close\r\nContent-Length: 6\r\n\r\nonetwo"]
    async with answering([WHOLE], closing, [WHOLE], requests=requests) as connections:
        for number in range(3):
            await connections.ask(b"%d" % number)
    assert [each[-1:] for each in requests] == [b"0", b"1", b"2"]
    assert requests[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:")


class Log:
    """Stands for a contender: notes what is asked, and answers when it is let."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.most_at_once = 0
        self._now = 0
        self._turn = asyncio.Condition()

    async def __call__(self, body: bytes) -> Timing:
        self.asked.append(body)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        # Others may come to ask meanwhile.
        for _ in range(5):
            await asyncio.sleep(0)
        self._now -= 1
        return Timing(0.0, 0.0, 0.0)


SEQUENCES = [[b"a0", b"a1", b"a2"], [b"b0"], [b"c0", b"c1"], [b"d0"]]


async def test_a_flood_sends_everything_once_over_so_many_connections() -> None:
    log, sent = Log(), Sent()
    await flood(log, SEQUENCES, 2, sent)
    assert sorted(log.asked) == sorted(body for each in SEQUENCES for body in each)
    assert (log.most_at_once, len(sent.timings), sent.in_flight) == (2, 7, 0)


@pytest.mark.parametrize("rate_per_s", [None, 100_000.0])
async def test_a_conversations_next_request_follows_its_answer(rate_per_s: float | None) -> None:
    under_way: set[bytes] = set()

    async def ask(body: bytes) -> Timing:
        assert body[:1] not in under_way
        under_way.add(body[:1])
        # For longer than it takes until the next one is due.
        for _ in range(50):
            await asyncio.sleep(0)
        under_way.discard(body[:1])
        return Timing(0.0, 0.0, 0.0)

    sent = Sent()
    if rate_per_s is None:
        await flood(ask, SEQUENCES, 4, sent)
    else:
        await paced(ask, SEQUENCES, rate_per_s, sent, lambda: None)
    assert len(sent.timings) == 7


async def test_all_paced_requests_are_under_way_when_the_last_one_has_been_sent() -> None:
    release = asyncio.Event()
    opened: list[int] = []
    sent = Sent()

    async def ask(body: bytes) -> Timing:
        await release.wait()
        return Timing(0.0, 0.0, 0.0)

    def all_sent() -> None:
        opened.append(sent.in_flight)
        release.set()

    await paced(ask, [[b"a"], [b"b"], [b"c"]], 1000.0, sent, all_sent)
    assert opened == [3]
    assert len(sent.late_s) == 3
    assert min(sent.late_s) >= -0.002


async def test_a_failed_request_is_counted_and_the_others_are_sent() -> None:
    async def ask(body: bytes) -> Timing:
        if body == b"b0":
            raise BadAnswerError("no good")
        return Timing(0.0, 0.0, 0.0)

    sent = Sent()
    await flood(ask, SEQUENCES, 2, sent)
    assert (len(sent.timings), sent.errors, sent.first_error) == (6, 1, "BadAnswerError: no good")


def test_sequences_take_turns() -> None:
    assert [body for _, body in in_turns(SEQUENCES)] == [
        *(b"a0", b"b0", b"c0", b"d0"),
        *(b"a1", b"c1"),
        b"a2",
    ]
