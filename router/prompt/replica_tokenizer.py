"""Asks replicas for the tokens of prompts that the router cannot tokenize exactly.

vLLM renders the chats of some models in its own code, and some tokenizers are in no
``tokenizer.json``. For these a replica is asked for the tokens of one prompt (``POST /tokenize``).
The answer is remembered, so that an equal prompt and a retry need no second question. A prompt has
no tokens, and is matched by its text, if no answer comes within a time that is short compared with
its prefill.

A question costs a replica about as much as its own tokenizing of the prompt. So a request causes
one question at most, few are asked at a time, short prompts and huge ones are not asked about, and
a replica that fails or is slow is left alone for a while.
"""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from io import BytesIO
from math import inf
from typing import Any, Final
from weakref import WeakValueDictionary

import aiohttp
import msgspec

from router.prompt.long_strings import LongStrings
from router.prompt.request_body import off_loop
from router.prompt.token_cache import Memo
from warmroute_common.api_errors import BadRequestError
from warmroute_common.backoff import Backoff
from warmroute_common.decoding import convert, decode_json

_LEAST_CHARS: Final = 8192
"""A shorter text has about 2,000 tokens or less, which a GPU computes in a tenth of a second."""
_MOST_BYTES: Final = 4 << 20
"""The most bytes of one question: a million tokens."""
_MOST_HELD_BYTES: Final = 64 << 20
"""The most bytes of all questions that wait for their answers."""
_AT_ONCE: Final = 16
_LEAST_S: Final = 0.1
_PER_CHAR_S: Final = 2.5e-6
"""Ten microseconds for a token, a tenth of its prefill at 10,000 tokens/s."""
_MOST_S: Final = 1.0
_FAILURES: Final = 3
"""After this many failures in a row, a replica counts as one that does not answer."""
_FAILED_S: Final = 600.0
"""For how long that counts, if no question follows."""
_FIRST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 300.0
_PARTED_BYTES: Final = 256 << 10
"""A longer question is written in parts: each write copies what the socket does not take."""
_REFUSALS: Final = (400, 422)
"""The replica cannot render this prompt: that says nothing about the next one."""
_ANSWER_BYTES_PER_BYTE: Final = 12
_ANSWER_BYTES: Final = 1 << 20
"""An answer of more bytes, and of this many more for each byte of its question, is none."""


class Told(StrEnum):
    """How questions end."""

    ANSWERED = "answered"
    REMEMBERED = "remembered"
    """The answer was known from an equal prompt."""
    REFUSED = "refused"
    """The replica refused the prompt."""
    LATE = "late"
    """No answer came in time."""
    FAILED = "failed"
    """The connection or the answer was unusable."""
    NOT_ASKED = "not-asked"
    """No replica could be asked, or too much was being asked."""


@dataclass(slots=True, kw_only=True)
class Question:
    """A request to a replica for a prompt's tokens."""

    path: str
    sent: bytes
    """The request's body; empty once it is answered, because the answer takes memory too."""
    digest: bytes
    chars: int
    """About how long the prompt's text is."""
    is_chat: bool

    @classmethod
    def of(cls, path: str, body: Mapping[str, Any], chars: int) -> "Question | None":
        """Return the question with this body; None if the prompt is too short or too long."""
        if not _LEAST_CHARS <= chars <= _MOST_BYTES:
            return None
        try:
            sent = msgspec.json.encode(body)  # orjson would reserve 16 times the memory
        except (RecursionError, UnicodeEncodeError):
            return None
        digest = blake2b(sent, digest_size=16).digest()
        return cls(path=path, sent=sent, digest=digest, chars=chars, is_chat="messages" in body)

    @property
    def limit_s(self) -> float:
        """How long the answer may take, with all waiting."""
        return min(_MOST_S, _LEAST_S + _PER_CHAR_S * self.chars)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizingReplica:
    """A replica that is well, and could be asked."""

    url: str
    load: int
    """Requests in flight there."""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Asked:
    """What was found of one replica."""

    under_way: int = 0
    last: int = 0
    """The number of the last question that it got."""
    failures: int = 0
    """In a row, without success since."""
    failed_s: float = -inf
    """When the last one was."""
    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S))

    def failed(self, began_s: float, now_s: float) -> None:
        """Note that a question that was sent at ``began_s`` found no answer."""
        self.backoff.failed(now_s, began_s=began_s)
        if began_s > self.failed_s:  # several that fail at the same time count as one
            self.failures, self.failed_s = self.failures + 1, now_s

    def succeeded(self) -> None:
        """Note an answer."""
        self.backoff.reset()
        self.failures = 0


class ReplicaTokenizer:
    """Asks replicas for tokens. Use it from one event loop."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        replicas: Callable[[], Iterable[TokenizingReplica]],
        memo: Memo,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``replicas`` returns the ones to ask from now; ``memo`` keeps the answers."""
        self._session = session
        self._replicas = replicas
        self._memo = memo
        self._clock = clock
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._asking: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()
        """By question: the second of two equal ones waits for the answer to the first."""
        self._asked: dict[str, _Asked] = {}
        self._held_bytes = 0
        self.counts: Counter[str] = Counter()
        """Questions, by how they ended."""
        self.asked = 0
        """Questions that replicas got."""
        self.asked_s = 0.0
        """How long all questions took that replicas got."""

    async def tokens(
        self, question: Question, among: Collection[str], kind: Hashable
    ) -> Sequence[int] | None:
        """Return the tokens of a prompt, or None if no replica told them in time.

        ``among`` are the URLs of replicas that tokenize alike, and ``kind`` tells their way of
        tokenizing from others.
        """
        sent_bytes = len(question.sent)
        name = ("told", kind, question.path, question.digest)
        if (known := self._remembered(name)) is not None:
            return known
        if sent_bytes > _MOST_BYTES or self._held_bytes + sent_bytes > _MOST_HELD_BYTES:
            self.counts[Told.NOT_ASKED] += 1
            return None
        self._held_bytes += sent_bytes
        try:
            return await self._in_turn(question, among, name)
        finally:
            self._held_bytes -= sent_bytes

    def answers(self, url: str) -> bool:
        """Whether a replica is not known to leave questions unanswered."""
        asked = self._asked.get(url)
        if asked is None or asked.failures < _FAILURES:
            return True
        return self._clock() - asked.failed_s > _FAILED_S

    def forget(self, url: str) -> None:
        """Forget a replica."""
        self._asked.pop(url, None)

    async def _in_turn(
        self, question: Question, among: Collection[str], name: Hashable
    ) -> Sequence[int] | None:
        until_s = asyncio.get_running_loop().time() + question.limit_s
        equal = self._asking.setdefault(name, asyncio.Lock())
        async with AsyncExitStack() as turn:
            try:
                async with asyncio.timeout_at(until_s):
                    await turn.enter_async_context(equal)
                    await turn.enter_async_context(self._slots)
            except TimeoutError:
                self.counts[Told.NOT_ASKED] += 1
                return None
            if (known := self._remembered(name)) is not None:
                return known
            ids = await self._ask(question, among, until_s)
            if ids is not None:
                self._memo.add(name, ids, 0)
            return ids

    async def _ask(
        self, question: Question, among: Collection[str], until_s: float
    ) -> "array[int] | None":
        replica = self._chosen(among)
        if replica is None:
            self.counts[Told.NOT_ASKED] += 1
            return None
        asked = self._asked.setdefault(replica.url, _Asked())
        began_s = self._clock()
        asked.under_way += 1
        asked.last = self.asked
        self.asked += 1
        try:
            async with asyncio.timeout_at(until_s):
                try:
                    answer = await self._post(replica, question)
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    # The replica may just have closed an idle connection.
                    answer = await self._post(replica, question)
                if answer is None:
                    self.counts[Told.REFUSED] += 1
                    return None
                question.sent = b""
                ids = await off_loop(len(answer), _ids, answer)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            asked.failed(began_s, self._clock())
            self.counts[Told.LATE if isinstance(error, TimeoutError) else Told.FAILED] += 1
            return None
        finally:
            asked.under_way -= 1
            self.asked_s += self._clock() - began_s
        asked.succeeded()
        self.counts[Told.ANSWERED] += 1
        return ids

    def _chosen(self, among: Collection[str]) -> TokenizingReplica | None:
        """Return the replica that is asked the least at the moment, and has the least to do."""

        def key(replica: TokenizingReplica) -> tuple[int, int, int]:
            asked = self._asked.get(replica.url)
            return (asked.under_way, replica.load, asked.last) if asked else (0, replica.load, 0)

        now_s = self._clock()
        for each in sorted((one for one in self._replicas() if one.url in among), key=key):
            asked = self._asked.get(each.url)
            if asked is None or asked.backoff.may_try(now_s):
                return each
        return None

    async def _post(self, replica: TokenizingReplica, question: Question) -> bytearray | None:
        """Return a replica's answer, None if it refuses the prompt; raise what aiohttp raises."""
        async with self._session.post(
            f"{replica.url.rstrip('/')}{question.path}",
            data=BytesIO(question.sent) if len(question.sent) > _PARTED_BYTES else question.sent,
            headers={**replica.headers, "Content-Type": "application/json"},
            allow_redirects=False,
        ) as response:
            if response.status in _REFUSALS:
                return None
            if response.status != 200:
                raise ValueError(f"{question.path} answers {response.status}")
            answer = bytearray()
            async for part in response.content.iter_any():
                answer += part
                if len(answer) > _ANSWER_BYTES + _ANSWER_BYTES_PER_BYTE * len(question.sent):
                    raise ValueError(f"the answer of {question.path} is too long")
            return answer

    def _remembered(self, name: Hashable) -> Sequence[int] | None:
        piece = self._memo.find([name]).get(name)
        if piece is None:
            return None
        self.counts[Told.REMEMBERED] += 1
        return piece.ids

    def check(self) -> None:
        """Raise AssertionError if a question that has ended still counts."""
        assert self._held_bytes == 0
        assert all(each.under_way == 0 for each in self._asked.values())
        assert not self._slots.locked()


def _ids(answer: bytearray) -> "array[int]":
    """Return the tokens in an answer of ``/tokenize`` or of vLLM's ``/render``.

    Raises ValueError if it is not one. A long list is parsed in parts, because a list of Python's
    takes 6 times the answer's memory.
    """
    try:
        long_lists = LongStrings(answer)
        fields = decode_json(long_lists.rest, dict[str, Any])
        tokens = fields.get("tokens")
        tokens = long_lists.ids(fields.get("token_ids") if tokens is None else tokens)
        if not tokens:
            raise ValueError("the answer has no tokens")
        if isinstance(tokens, array):
            return tokens
        return array("I", convert(tokens, list[int]))
    except (OverflowError, BadRequestError) as error:
        raise ValueError("the answer has something that is not a token") from error
