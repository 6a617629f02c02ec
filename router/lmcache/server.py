"""Calls to one stock LMCache server (``lmcache server --http-port``).

aiohttp's exceptions are mapped here, once, to those of `router.staging` for agents.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from router.agent_client import AgentError, AgentRefusedError, AgentTimeoutError
from router.index import PromptKeys
from router.lmcache.wire import (
    DeletedTold,
    ObjectKey,
    PrefetchStatus,
    ServerConfig,
    ServerStatus,
)
from warmroute_common.agent_protocol import UNREADABLE

_CONNECT_S: Final = 2.0
_ANSWER_S: Final = 5.0
_DELETED_S: Final = 30.0
"""Thousands of keys are thousands of files, or calls to a remote store."""
_FIRST_POLL_S: Final = 0.005
_LONGEST_POLL_S: Final = 0.1
FOLLOW_S: Final = 30.0
"""So long is a prefetch followed to its end, whoever still waits for it: the server keeps a
job until its end has been asked for."""

_T = TypeVar("_T")


class LmcacheServer:
    """Calls one server; every call raises `AgentError` when it fails."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        self.base_url = base_url.rstrip("/")

    async def instance_id(self) -> str:
        """Return the name under which it registers and reports events."""
        return (await self.ask("GET", "/config", ServerConfig)).mp.instance_id

    async def status(self) -> ServerStatus:
        """Return its chunk size and hash, and the models whose KV caches it knows."""
        return await self.ask("GET", "/status", ServerStatus)

    async def health(self) -> None:
        """Return when the server says that it is well."""
        await self.call("GET", "/healthcheck")

    async def prefetch(
        self, keys: PromptKeys, chunks: int, model: str, world_size: int
    ) -> PrefetchStatus:
        """Have a prompt's first chunks brought from L2 to L1; return how that ended.

        ``status`` is "pending" where it goes on after `FOLLOW_S`, "noop" under one chunk.
        """
        body = prompt_fields(keys, chunks, model, world_size)
        told = await self.ask("POST", "/cache/prefetches", PrefetchStatus, body)
        clock = asyncio.get_running_loop().time
        pause_s, until_s = _FIRST_POLL_S, clock() + FOLLOW_S
        while told.status in ("submitted", "pending") and clock() < until_s:
            await asyncio.sleep(pause_s)
            path = f"/cache/prefetches/{quote(told.request_id, safe='')}"
            found = await self.ask("GET", path, PrefetchStatus)
            told = msgspec.structs.replace(found, request_id=told.request_id)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return told

    async def delete(self, keys: Sequence[ObjectKey], **fields: object) -> DeletedTold:
        """Have keys deleted; ``fields`` are the others of the call (tier, force, adapter)."""
        body = {"keys": [each.encoded() for each in keys], **fields}
        return await self.ask("DELETE", "/cache/objects", DeletedTold, body, answer_s=_DELETED_S)

    async def ask(
        self,
        method: str,
        path: str,
        kind: type[_T],
        body: object = None,
        *,
        answer_s: float = _ANSWER_S,
    ) -> _T:
        """Return an answer, which is to be a ``kind``; raise `AgentRefusedError` for a refusal."""
        status, answer = await self.call(method, path, body, answer_s=answer_s)
        if status not in (200, 202):
            raise AgentRefusedError(f"{self.base_url}{path}", status, _said(answer))
        try:
            return msgspec.json.decode(answer, type=kind)
        except UNREADABLE as error:
            text = f"{self.base_url}{path}: the answer is not a {kind.__name__}: {error}"
            raise AgentError(text) from None

    async def call(
        self, method: str, path: str, body: object = None, *, answer_s: float = _ANSWER_S
    ) -> tuple[int, bytes]:
        """Return status and body of an answer, whatever they are."""
        try:
            async with self._session.request(
                method,
                self.base_url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers={} if body is None else {"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=answer_s, sock_connect=_CONNECT_S),
            ) as response:
                return response.status, await response.read()
        except TimeoutError:
            text = f"{self.base_url}{path}: no answer within {answer_s:g} s"
            raise AgentTimeoutError(text) from None
        except (aiohttp.ClientError, OSError) as error:
            raise AgentError(f"{self.base_url}{path}: {error or type(error).__name__}") from error


def prompt_fields(keys: PromptKeys, chunks: int, model: str, world_size: int) -> dict[str, Any]:
    """Return how LMCache is told the first chunks of a prompt."""
    return {
        "model_name": model,
        "world_size": world_size,
        "token_ids": list(keys.token_ids[: chunks * keys.chunk_tokens]),
        "cache_salt": keys.cache_salt,
    }


def _said(answer: bytes) -> str:
    """Return a server's own words for a refusal."""
    try:
        return str(msgspec.json.decode(answer)["detail"])
    except (*UNREADABLE, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
