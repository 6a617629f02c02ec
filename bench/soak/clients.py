"""The clients: what they ask, how they behave, and the ledger of how requests ended."""

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import aiohttp

from bench.soak.answers import (
    Answers,
    End,
    Expected,
    StreamCheck,
    WrongAnswerError,
    check_whole,
)
from bench.soak.faulty_proxy import POISON
from bench.soak.fleet import ReplicaFault, instance_id
from simulator.openai_prompts import NUM_WORDS, text_of

_SHARED_PROMPTS: Final = 6
_SHARED_WORDS: Final = 300
_TURN_WORDS: Final = (20, 300)
_MOST_TURNS: Final = 8
_STREAMED_TOKENS: Final = (20, 220)
_WHOLE_TOKENS: Final = (4, 60)
"""Few: a whole answer's first byte comes after all of them, and `FIRST_BYTE_S` bounds that."""
_UNREAD_TOKENS: Final = 1500
_CHAT_SHARE: Final = 0.8
_WHOLE_SHARE: Final = 1 / 3
_NAMED_SHARE: Final = 0.5
_SLACK_S: Final = 1.0
_EXAMPLES: Final = 20
_KEEPALIVE_S: Final = 10.0
_LONGEST_S: Final = 180.0
"""A request that takes longer hangs."""
_LEAVES_AFTER_S: Final = 3.0
_UNREAD_S: Final = 12.0
_SLOW_PAUSE_S: Final = 0.2
_HELD_S: Final = 90.0
_POISON_S: Final = 60.0
_ENVOY_RETRIED: Final = "retried and the latest reset reason"
_ENVOY_BROKEN_OFF: Final = "disconnect/reset before headers. reset reason: protocol error"
_BODY_PIECES: Final = 8
_BODY_PAUSE_S: Final = 0.4
_READ_BYTES: Final = 1024
_RECEIVE_BYTES: Final = 4096
"""Receive buffer of a client: the router soon cannot send what a slow client does not read."""


class Manner(StrEnum):
    """How a client behaves."""

    PLAIN = "plain"
    LEAVES = "leaves"
    """Closes its connection, before or during the answer."""
    READS_SLOWLY = "reads slowly"
    NEVER_READS = "never reads"
    """Leaves after a while."""
    SENDS_SLOWLY = "sends slowly"
    HALF_SENT = "half sent"
    """Sends half of its body and then nothing."""


_MANNERS: Final = {
    Manner.PLAIN: 70,
    Manner.LEAVES: 12,
    Manner.READS_SLOWLY: 7,
    Manner.NEVER_READS: 3,
    Manner.SENDS_SLOWLY: 5,
    Manner.HALF_SENT: 3,
}


def some_text(rng: random.Random, words: int) -> str:
    """Return a text of the simulated model's words."""
    return text_of([rng.randrange(NUM_WORDS) for _ in range(words)])


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as its client sends it."""

    request_id: str
    manner: Manner
    path: str
    body: dict[str, Any]
    session: str | None

    @property
    def streamed(self) -> bool:
        """Whether the answer comes as events."""
        return bool(self.body["stream"])


@dataclass(kw_only=True)
class Conversations:
    """One client's conversations, one after the other. Pure."""

    client: int
    seed: int
    _rng: random.Random = field(init=False)
    _number: int = 0
    _sessions: int = 0
    _messages: list[dict[str, str]] = field(default_factory=list)
    _asked: str = ""

    def __post_init__(self) -> None:
        self._rng = random.Random(f"conversations {self.seed} {self.client}")
        self._begin()

    def next(self) -> Request:
        """Return the next request; it repeats the last question if that was not `answered`."""
        self._number += 1
        rng = self._rng
        (manner,) = rng.choices(list(_MANNERS), list(_MANNERS.values()))
        streamed = manner is Manner.NEVER_READS or rng.random() >= _WHOLE_SHARE
        tokens = rng.randint(*(_STREAMED_TOKENS if streamed else _WHOLE_TOKENS))
        body: dict[str, Any] = {
            "model": "sim",
            "max_tokens": _UNREAD_TOKENS if manner is Manner.NEVER_READS else tokens,
            "stream": streamed,
        }
        if streamed:
            body["stream_options"] = {"include_usage": True}
        if rng.random() < _CHAT_SHARE:
            path = "/v1/chat/completions"
            body["messages"] = [*self._messages, {"role": "user", "content": self._asked}]
        else:
            path = "/v1/completions"
            body["prompt"] = " ".join([*(each["content"] for each in self._messages), self._asked])
        return Request(
            request_id=f"soak-{self.client}-{self._number}",
            manner=manner,
            path=path,
            body=body,
            session=self._session,
        )

    def answered(self, text: str) -> None:
        """Continue the conversation, or begin another."""
        self._messages += [
            {"role": "user", "content": self._asked},
            {"role": "assistant", "content": text},
        ]
        if len(self._messages) > 2 * _MOST_TURNS:
            self._begin()
        else:
            self._ask()

    def pause_s(self) -> float:
        """Return how long the client thinks before its next request."""
        return self._rng.expovariate(1 / 1.5)

    def chance(self, most: float) -> float:
        """Return a random number below ``most``."""
        return self._rng.uniform(0.0, most)

    def _begin(self) -> None:
        self._sessions += 1
        shared = self._rng.randrange(_SHARED_PROMPTS)
        system = some_text(random.Random(f"shared {self.seed} {shared}"), _SHARED_WORDS)
        self._messages = [{"role": "system", "content": system}]
        is_named = self._rng.random() < _NAMED_SHARE
        self._session = f"client {self.client} session {self._sessions}" if is_named else None
        self._ask()

    def _ask(self) -> None:
        self._asked = some_text(self._rng, self._rng.randint(*_TURN_WORDS))


class Outcome(StrEnum):
    """How a request ended, for its client."""

    WHOLE = "whole"
    """Every byte came, and every one was right."""
    LEFT = "left"
    """The client closed the connection; what had come was right."""
    TIMED_OUT = "timed out"
    """408: the client had not sent its body."""
    CUT = "cut"
    """It broke off with an error, and its replica had a fault at that time."""
    REFUSED = "refused"
    """An error instead of an answer: the router could open no files, or two replicas died."""
    LOST = "lost"
    """No content of an answer came, although another replica was up."""
    WRONG = "wrong"
    """A byte was wrong, or an answer that broke off looked like a whole one."""
    HELD = "held"
    """The client sent half a body, and the router waited for the rest too long."""
    UNEXPLAINED = "cut without reason"
    """It broke off, and its replica had no fault."""


BAD: Final = (Outcome.LOST, Outcome.WRONG, Outcome.UNEXPLAINED, Outcome.HELD)


@dataclass(kw_only=True)
class FaultPeriod:
    """When replicas had a fault, by the clock."""

    replicas: set[int]
    """Replicas that a poison request kills are added one by one."""
    kind: ReplicaFault
    from_s: float
    to_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Poisoned:
    """A poison request's end."""

    request_id: str
    killed: Collection[int]
    """Numbers of the replicas."""
    status: int | None
    """None if no answer came."""
    text: str


@dataclass(kw_only=True)
class Ended:
    """A request's end."""

    request: Request
    outcome: Outcome
    detail: str = ""
    replica_id: str | None = None


@dataclass(kw_only=True)
class Ledger:
    """Counts of ends, the bad ones in words, all faults, and what they must not lead to."""

    counts: Counter[tuple[Manner, bool, Outcome]] = field(default_factory=Counter)
    """By manner, whether streamed, and outcome."""
    bad: list[str] = field(default_factory=list)
    faults: list[FaultPeriod] = field(default_factory=list)
    poisoned: list[Poisoned] = field(default_factory=list)
    put_out: list[str] = field(default_factory=list)
    """Replicas that got no requests long after their connections flapped."""
    called_down: list[str] = field(default_factory=list)
    """Lines of the router's log that call a replica down while the router could open no files."""

    def note(self, ended: Ended) -> None:
        """Count a request that has ended."""
        request = ended.request
        self.counts[request.manner, request.streamed, ended.outcome] += 1
        if ended.outcome in BAD and len(self.bad) < _EXAMPLES:
            self.bad.append(
                f"{request.request_id} ({request.manner}, "
                f"{'streamed' if request.streamed else 'whole'}, {ended.replica_id}): "
                f"{ended.outcome}: {ended.detail}"
            )

    def total(self, *outcomes: Outcome) -> int:
        """Return how many requests ended in one of these ways."""
        return sum(count for (_, _, each), count in self.counts.items() if each in outcomes)

    @contextmanager
    def fault(self, replica: int | None, kind: ReplicaFault) -> Iterator[FaultPeriod]:
        """Note that a replica has a fault while the block runs; None: no replica yet."""
        replicas = set() if replica is None else {replica}
        period = FaultPeriod(replicas=replicas, kind=kind, from_s=time.monotonic())
        self.faults.append(period)
        try:
            yield period
        finally:
            period.to_s = time.monotonic()

    def had_fault(self, replica_id: str | None, from_s: float, to_s: float) -> bool:
        """Whether a replica had a fault then; None: whether any had."""
        return any(
            replica_id is None or replica_id in map(instance_id, each.replicas)
            for each in self._during(from_s, to_s)
        )

    def explains(self, status: int | None, detail: str, from_s: float, to_s: float) -> bool:
        """Whether a fault explains an error (None: a broken connection) instead of an answer.

        After a poison request an error must name the replicas that died, or be Envoy's own. Envoy
        has an answer's headers from when comments came, asks no other replica then, and answers 502
        if it breaks off before the picker has seen them.
        """
        for each in self._during(from_s, to_s):
            if each.kind is ReplicaFault.NO_FILES and status in (None, 503):
                return True
            if each.kind is ReplicaFault.COMMENTS and _ENVOY_BROKEN_OFF in detail:
                return True
            if each.kind is ReplicaFault.POISON and status in (502, 503) and len(each.replicas) > 1:
                named = [f"{instance_id(replica)}: " in detail for replica in each.replicas]
                if all(named) or _ENVOY_RETRIED in detail:
                    return True
        return False

    def _during(self, from_s: float, to_s: float) -> Iterator[FaultPeriod]:
        for each in self.faults:
            has_ended = each.to_s is not None and each.to_s + _SLACK_S < from_s
            if each.from_s - _SLACK_S <= to_s and not has_ended:
                yield each


class _HeldError(Exception):
    """The router still waits for the second half of a body."""


class _LeftError(Exception):
    """The client has closed its connection on purpose."""


@dataclass(kw_only=True)
class _Seen:
    """How much of a request was sent, and what its answer began with."""

    has_begun: bool = False
    """Whether the answer has begun, so that no other replica can give it."""
    is_sent: bool = True
    """Whether all of its body has been sent."""
    status: int | None = None
    replica_id: str | None = None


@dataclass(kw_only=True)
class Client:
    """One client: it sends requests until ``until_s``, and checks every byte."""

    url: str
    conversations: Conversations
    answers: Answers
    ledger: Ledger
    until_s: float
    session: aiohttp.ClientSession
    by_envoy: bool = False
    """Envoy passes comments and errors on, which begin an answer: it cannot ask another replica."""

    async def run(self) -> None:
        """Send one request after the other until the time is over."""
        while time.monotonic() < self.until_s:
            request = self.conversations.next()
            expected = self.answers.expected(request.request_id, request.body)
            ended = await self._ask(request, expected)
            self.ledger.note(ended)
            if ended.outcome is Outcome.WHOLE:
                self.conversations.answered(expected.text)
            await asyncio.sleep(self.conversations.pause_s())

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
            outcome = self._broken_off(request, seen, began_s)
            detail = f"{detail} after {time.monotonic() - began_s:.1f} s"
        if outcome is Outcome.LOST and not seen.has_begun:
            is_explained = self.ledger.explains(seen.status, detail, began_s, time.monotonic())
            outcome = Outcome.REFUSED if is_explained else Outcome.LOST
        return Ended(request=request, outcome=outcome, detail=detail, replica_id=seen.replica_id)

    def _broken_off(self, request: Request, seen: _Seen, began_s: float) -> Outcome:
        """Return the outcome of a request whose answer broke off."""
        if request.manner is Manner.HALF_SENT:
            return Outcome.TIMED_OUT
        if not seen.has_begun:
            return Outcome.LOST
        had_fault = self.ledger.had_fault(seen.replica_id, began_s, time.monotonic())
        return Outcome.CUT if had_fault else Outcome.UNEXPLAINED

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
        """Return the time after which the client leaves; None if it stays."""
        if request.manner is Manner.LEAVES:
            return self.conversations.chance(_LEAVES_AFTER_S)
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
            text = (await response.read())[:500].decode(errors="replace")
            return Outcome.LOST, f"{response.status} {text}"
        seen.has_begun = self.by_envoy or not request.streamed
        if request.manner is Manner.NEVER_READS:
            await asyncio.sleep(2 * _UNREAD_S)
        if not request.streamed:
            check_whole(expected, await response.read())
            return Outcome.WHOLE, ""
        check = StreamCheck(expected)
        try:
            async for chunk in response.content.iter_any():
                check.feed(chunk)
                seen.has_begun = seen.has_begun or check.has_content
                if request.manner is Manner.READS_SLOWLY:
                    await asyncio.sleep(_SLOW_PAUSE_S)
        finally:
            end = check.end()
        if end is End.SHORT:
            raise WrongAnswerError("the stream ended without an error event, and is not whole")
        return (Outcome.WHOLE, "") if end is End.WHOLE else (Outcome.CUT, "an error event")


async def _in_pieces(body: bytes, seen: _Seen, *, whole: bool) -> AsyncIterator[bytes]:
    size = len(body) // _BODY_PIECES + 1
    for at in range(0, len(body), size):
        if at > len(body) // 2 and not whole:
            await asyncio.sleep(_HELD_S)
            raise _HeldError
        seen.is_sent = at + size >= len(body)  # on a busy machine it may take too long as well
        yield body[at : at + size]
        await asyncio.sleep(_BODY_PAUSE_S)


async def send_poison(url: str, number: int, killed: Collection[int]) -> Poisoned:
    """Send a request that kills its replicas; ``killed`` has their numbers when it has ended."""
    body = {
        "model": "sim",
        "user": POISON,
        "max_tokens": 16,
        "stream": number % 2 == 0,
        "messages": [{"role": "user", "content": some_text(random.Random(number), 50)}],
    }
    request_id = f"soak-poison-{number}"
    status, text = None, ""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_POISON_S)) as session,
            session.post(
                f"{url}/v1/chat/completions", json=body, headers={"X-Request-Id": request_id}
            ) as response,
        ):
            status, text = response.status, (await response.text())[:500]
    except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is one
        text = f"{type(error).__name__} {error}"
    return Poisoned(request_id=request_id, killed=killed, status=status, text=text)


def _small_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    return made


def client_session() -> aiohttp.ClientSession:
    """Return the session of all clients: small buffers, connections kept for a while."""
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=_KEEPALIVE_S, socket_factory=_small_socket
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        read_bufsize=_READ_BYTES,
        auto_decompress=False,
    )
