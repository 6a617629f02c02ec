"""Talking to a replica's agent (`warmroute_common.agent_protocol` has the formats).

aiohttp's exceptions are mapped here, once, to `AgentError`.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
import orjson

from warmroute_common.agent_protocol import (
    UNREADABLE,
    ClearReply,
    ClearRequest,
    EventBatch,
    InstanceInfo,
    LookupReply,
    LookupRequest,
    Lora,
    MoveReply,
    MoveRequest,
    MoveStatus,
    PinReply,
    PinRequest,
    PrefetchReply,
    PrefetchRequest,
    Snapshot,
    TokenizerFile,
    TokenizerManifest,
)
from warmroute_common.connection_errors import connection_problem
from warmroute_common.decoding import decode_json, decode_msgpack
from warmroute_common.fleet_secret import FleetSecret
from warmroute_common.keys import ALGORITHMS

_CONNECT_S: Final = 2.0
_ANSWER_S: Final = 10.0
_SNAPSHOT_S: Final = 60.0
"""A snapshot of millions of keys takes seconds to make and to send."""
_TOKENIZER_FILE_S: Final = 60.0
"""Up to 64 MiB."""
_CLEAR_S: Final = 60.0
"""A disk tier's files are removed one by one."""
_MOVE_S: Final = 30.0
"""The destination asks the source what it has before it answers."""

_MOST_BYTES: Final = 8 << 20
"""Limit of an answer; `_MOST_NEWS_BYTES` for answers with keys (32 million of them)."""
_MOST_NEWS_BYTES: Final = 256 << 20
_WANTS_SECRET: Final = 401
_LONGEST_SAID: Final = 500

_T = TypeVar("_T")


class AgentError(Exception):
    """An agent could not be reached, or did not answer as an agent does."""


class AgentTimeoutError(AgentError):
    """An agent did not answer in time."""


class AgentRefusedError(AgentError):
    """An agent answered that it will not."""

    def __init__(self, where: str, status: int, said: str) -> None:
        super().__init__(f"{where}: {status}: {said}")
        self.status = status
        self.said = said
        """Its own words."""


class HistoryGoneError(AgentError):
    """The events asked for are no longer there, or of another incarnation: take a snapshot."""


class StagingAgent(Protocol):
    """What is asked of an agent to stage KV for a request; every call raises `AgentError`."""

    async def prefetch(
        self, keys: Sequence[bytes], *, wait_s: float, pin_s: float, lora: Lora | None = None
    ) -> PrefetchReply:
        """Have chunks promoted to the cpu tier; return what became of them within ``wait_s``."""

    async def move(self, request: MoveRequest) -> MoveReply:
        """Have the replica fetch chunks from another."""

    async def move_status(self, event_id: str, *, wait_s: float = 0.0) -> MoveStatus:
        """Return how a move goes, at its end or after ``wait_s``."""


class _Decode(Protocol):
    def __call__(self, body: bytes, kind: type[_T], /) -> _T: ...


Agents = Callable[[str], StagingAgent]
"""From an agent's base URL to its calls."""


class AgentClient:
    """Calls one agent; every call raises `AgentError` when it fails."""

    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, secret: FleetSecret | None = None
    ) -> None:
        """``secret`` is shown to the agent."""
        self._session = session
        self._secret = secret
        self.base_url = base_url.rstrip("/")

    async def info(self) -> InstanceInfo:
        """Return the replica's identity and how its keys are made."""
        info = await self._ask("/info", InstanceInfo, _ANSWER_S)
        if info.block_tokens < 1 or info.chunk_tokens % info.block_tokens or not info.chunk_tokens:
            raise AgentError(
                f"{self.base_url}/info: chunks of {info.chunk_tokens} tokens are not whole "
                f"blocks of {info.block_tokens}"
            )
        if info.hash_algorithm not in ALGORITHMS:
            raise AgentError(
                f"{self.base_url}/info: unknown hash algorithm '{info.hash_algorithm}'; "
                f"known are {', '.join(ALGORITHMS)}"
            )
        return info

    async def tokenizer(self) -> TokenizerManifest:
        """Return which files the replica's tokenizer is made of."""
        return await self._ask("/tokenizer", TokenizerManifest, _ANSWER_S)

    async def tokenizer_file(self, file: TokenizerFile) -> bytes:
        """Return one of these files, verified."""
        path = f"/tokenizer/{file.sha256}"
        data = await self._call(path, _TOKENIZER_FILE_S, most_bytes=file.size)
        # Some tens of MB: not on the event loop.
        digest = await asyncio.to_thread(hashlib.sha256, data)
        if digest.hexdigest() != file.sha256:
            raise AgentError(f"{self.base_url}{path}: the answer is another file")
        return data

    async def snapshot(self) -> Snapshot:
        """Return all keys that the replica's engine holds, by tier."""
        decode, most = decode_msgpack, _MOST_NEWS_BYTES
        return await self._ask("/snapshot", Snapshot, _SNAPSHOT_S, decode=decode, most_bytes=most)

    async def events(self, after: int, incarnation: str, wait_s: float) -> EventBatch:
        """Return what happened after event ``after``; wait up to ``wait_s`` for something to.

        Raises `HistoryGoneError` when that cannot be told any more.
        """
        query = {"after": str(after), "wait_s": str(wait_s), "incarnation": incarnation}
        return await self._ask(
            "/events",
            EventBatch,
            wait_s + _ANSWER_S,
            query=query,
            decode=decode_msgpack,
            most_bytes=_MOST_NEWS_BYTES,
        )

    async def prefetch(
        self, keys: Sequence[bytes], *, wait_s: float, pin_s: float, lora: Lora | None = None
    ) -> PrefetchReply:
        """Have chunks promoted to the cpu tier; return what became of them within ``wait_s``."""
        request = PrefetchRequest(
            keys=[key.hex() for key in keys], lora=lora, wait_s=wait_s, pin_s=pin_s
        )
        return await self._ask("/prefetch", PrefetchReply, wait_s + _CONNECT_S, request)

    async def health(self) -> None:
        """Return when the agent says that it is well."""
        await self._call("/health", _CONNECT_S)

    async def lookup(self, request: LookupRequest) -> LookupReply:
        """Return how much of a prompt the replica's tiers hold."""
        return await self._ask("/lookup", LookupReply, _ANSWER_S, request)

    async def pin(self, request: PinRequest) -> PinReply:
        """Keep a prompt's chunks in a tier."""
        return await self._ask("/pin", PinReply, _ANSWER_S, request)

    async def unpin(self, request: PinRequest) -> PinReply:
        """End `pin`."""
        return await self._ask("/unpin", PinReply, _ANSWER_S, request)

    async def clear(self, request: ClearRequest) -> ClearReply:
        """Drop chunks."""
        return await self._ask("/clear", ClearReply, _CLEAR_S, request)

    async def move(self, request: MoveRequest) -> MoveReply:
        """Have the replica fetch chunks from another; `move_status` tells how it goes."""
        return await self._ask("/move", MoveReply, _MOVE_S, request)

    async def move_status(self, event_id: str, *, wait_s: float = 0.0) -> MoveStatus:
        """Return how a move goes, at its end or after ``wait_s``.

        Raises `AgentRefusedError` with status 404 when the agent knows no such move.
        """
        path, query = f"/moves/{quote(event_id, safe='')}", {"wait_s": str(wait_s)}
        return await self._ask(path, MoveStatus, wait_s + _ANSWER_S, query=query)

    async def _ask(
        self,
        path: str,
        kind: type[_T],
        timeout_s: float,
        request: msgspec.Struct | None = None,
        *,
        query: Mapping[str, str] | None = None,
        decode: _Decode = decode_json,
        most_bytes: int = _MOST_BYTES,
    ) -> _T:
        """GET, or POST a request; return the answer, which is to be a ``kind``."""
        answer = await self._call(path, timeout_s, request, query, most_bytes=most_bytes)
        try:
            return decode(answer, kind)
        except UNREADABLE as error:
            raise AgentError(f"the answer is not a {kind.__name__}: {error}") from None

    async def _call(
        self,
        path: str,
        timeout_s: float,
        request: msgspec.Struct | None = None,
        query: Mapping[str, str] | None = None,
        *,
        most_bytes: int = _MOST_BYTES,
    ) -> bytes:
        where = self.base_url + path
        try:
            async with self._session.request(
                "GET" if request is None else "POST",
                where,
                params=query,
                data=None if request is None else msgspec.json.encode(request),
                headers=self._headers(has_body=request is not None),
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S),
                # An agent sends nobody elsewhere; and the secret is shown to none but it.
                allow_redirects=False,
            ) as response:
                answer = await _read(response, most_bytes)
        except TimeoutError:
            raise AgentTimeoutError(f"{where}: no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise AgentError(f"{where}: {connection_problem(error, where)}") from error
        if response.status == _WANTS_SECRET:
            raise AgentRefusedError(
                where, response.status, f"{_said(answer)} (here: {self._known()})"
            )
        if response.status == 410:
            raise HistoryGoneError(f"{where}: {_said(answer)}")
        if response.status != 200:
            raise AgentRefusedError(where, response.status, _said(answer))
        return answer

    def _headers(self, *, has_body: bool) -> dict[str, str]:
        shown = {} if self._secret is None else self._secret.headers(self.base_url)
        return {**shown, "Content-Type": "application/json"} if has_body else shown

    def _known(self) -> str:
        return "there is none" if self._secret is None else "another one is set"


async def _read(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return an answer's body; raise `AgentError` for one longer than any of an agent's."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most_bytes:
            raise AgentError(f"{response.url}: an answer of more than {most_bytes} bytes")
    return bytes(body)


def _said(answer: bytes) -> str:
    """Return an agent's own words for a refusal."""
    try:
        return str(orjson.loads(answer)["error"])[:_LONGEST_SAID]
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
