"""A client of one stock LMCache server (``lmcache server --http-port``, lmcache 0.5.6).

aiohttp's exceptions become `LmcacheServerError` here. Unknown fields of an answer are ignored, so
that additions of later LMCache versions break nothing.
"""

import asyncio
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from msgspec import Meta

from router.index.prompt_keys import PromptKeys
from warmroute_common.agent_protocol import UNREADABLE
from warmroute_common.decoding import decode_json

_CONNECT_S: Final = 2.0
_ANSWER_S: Final = 5.0
_FIRST_POLL_S: Final = 0.005
_LONGEST_POLL_S: Final = 0.1
FOLLOW_S: Final = 30.0
"""How long a prefetch is polled, even after its request was forwarded: the server keeps a job until
its end has been read."""

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_T = TypeVar("_T")


class LmcacheServerError(Exception):
    """A stock LMCache server could not be reached, or its answer cannot be used."""


class LmcacheServerTimeoutError(LmcacheServerError):
    """A stock LMCache server did not answer in time."""


class LmcacheServerRefusedError(LmcacheServerError):
    """A stock LMCache server answered with an error status."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"{url}: {status}: {message}")
        self.status = status


class CacheContext(msgspec.Struct, frozen=True, kw_only=True):
    """A vLLM process that has registered its KV cache with the server."""

    model_name: str
    world_size: int = 1


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``GET /status``."""

    chunk_size: Annotated[int, Meta(ge=1)]
    hash_algorithm: str
    cache_context_meta: dict[str, CacheContext | None] = {}

    def world_sizes(self) -> dict[str, int]:
        """Return the number of ranks of each model whose KV cache is registered."""
        registered = filter(None, self.cache_context_meta.values())
        return {each.model_name: each.world_size for each in registered}


class _MpConfig(msgspec.Struct, frozen=True, kw_only=True):
    instance_id: str


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``GET /config``."""

    mp: _MpConfig


class PrefetchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a prefetch order, and to each poll of it."""

    status: Literal["submitted", "noop", "pending", "completed"]
    request_id: str = ""
    chunks: _Count = 0
    found_keys: _Count = 0
    """Keys in L1 at the end, counted from the prompt's first chunk."""
    total_keys: _Count = 0

    def chunks_found(self, ordered: int) -> int:
        """Return how many of the ``ordered`` chunks are in L1; each chunk has a key per rank."""
        return self.found_keys // max(1, self.total_keys // ordered)


class LmcacheServerClient:
    """Every call raises `LmcacheServerError` when it fails."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        self.base_url = base_url.rstrip("/")

    async def instance_id(self) -> str:
        """Return the name under which the server registers and reports events."""
        return (await self.request("GET", "/config", ServerConfig)).mp.instance_id

    async def status(self) -> ServerStatus:
        return await self.request("GET", "/status", ServerStatus)

    async def health(self) -> None:
        """Return when the server answers its health check, whatever the answer is."""
        await self.exchange("GET", "/healthcheck")

    async def metrics(self) -> str:
        """Return the server's metrics in Prometheus' text format; empty if it has none."""
        status, answer = await self.exchange("GET", "/metrics")
        return answer.decode(errors="replace") if status == 200 else ""

    async def prefetch(
        self, keys: PromptKeys, chunks: int, model: str, world_size: int
    ) -> PrefetchStatus:
        """Load a prompt's first ``chunks`` from L2 into L1, and follow that to its end.

        Returns "pending" if it has not ended after `FOLLOW_S`, and "noop" for less than one chunk.
        """
        order = {
            "model_name": model,
            "world_size": world_size,
            "token_ids": list(keys.token_ids[: chunks * keys.chunk_tokens]),
            "cache_salt": keys.cache_salt,
        }
        status = await self.submit_prefetch(order)
        clock = asyncio.get_running_loop().time
        pause_s, until_s = _FIRST_POLL_S, clock() + FOLLOW_S
        path = prefetch_path(status.request_id)
        while status.status in ("submitted", "pending") and clock() < until_s:
            await asyncio.sleep(pause_s)
            status = await self.request("GET", path, PrefetchStatus)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return status

    async def submit_prefetch(self, order: dict[str, Any]) -> PrefetchStatus:
        return await self.request("POST", "/cache/prefetches", PrefetchStatus, order)

    async def request(self, method: str, path: str, kind: type[_T], body: object = None) -> _T:
        """Return an answer as a ``kind``; raise `LmcacheServerRefusedError` for an error."""
        status, answer = await self.exchange(method, path, body)
        if status not in (200, 202):
            raise LmcacheServerRefusedError(f"{self.base_url}{path}", status, _detail(answer))
        try:
            return decode_json(answer, kind)
        except UNREADABLE as error:
            text = f"{self.base_url}{path}: the answer is not a {kind.__name__}: {error}"
            raise LmcacheServerError(text) from None

    async def exchange(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Return an answer's status and body, whatever they are."""
        try:
            async with self._session.request(
                method,
                self.base_url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers={} if body is None else {"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=_ANSWER_S, sock_connect=_CONNECT_S),
            ) as response:
                return response.status, await response.read()
        except TimeoutError:
            text = f"{self.base_url}{path}: no answer within {_ANSWER_S:g} s"
            raise LmcacheServerTimeoutError(text) from None
        except (aiohttp.ClientError, OSError) as error:
            text = f"{self.base_url}{path}: {error or type(error).__name__}"
            raise LmcacheServerError(text) from error


def prefetch_path(request_id: str) -> str:
    """Return the path at which a server reports on a prefetch."""
    return f"/cache/prefetches/{quote(request_id, safe='')}"


def _detail(answer: bytes) -> str:
    """Return the message of a server's error."""
    try:
        return str(msgspec.json.decode(answer)["detail"])
    except (*UNREADABLE, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
