"""Prefetches at stock LMCache servers: before a request is forwarded, and after missed events."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import aiohttp

from router.fleet.decision import Decision
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.index.prompt_keys import KeyShape, PromptKeyCache, PromptKeys
from router.lmcache.coordinator import Coordinator, LiveServer
from router.lmcache.coordinator_protocol import leading_keys
from router.lmcache.server_client import (
    LmcacheServerClient,
    LmcacheServerError,
    LmcacheServerRefusedError,
)
from router.staging.stager import PrefetchError
from warmroute_common.agent_protocol import PrefetchReply
from warmroute_common.tasks import end_all

log = logging.getLogger("warmroute.lmcache")

_NOT_READY: Final = 503
"""A server's answer until a vLLM has registered the model's KV cache with it."""
REPAIR_S: Final = 600.0
"""How long after missed events a server is asked; by then its events report the chunks in use."""
_WORTH_TOKENS: Final = 1024
_WAIT_S: Final = 0.5
_MAX_SERVERS: Final = 8
_MAX_UNDER_WAY: Final = 64
_MAX_ASKED: Final = 10_000


class ServerPrefetch:
    """Has LMCache servers load a prompt's chunks from L2 into L1.

    A server takes a prompt from its first token; chunks that are already in L1 cost it nothing. It
    pins nothing, and answers only when the whole prefetch has ended.
    """

    def __init__(
        self, fleet: Fleet, coordinator: Coordinator, session: aiohttp.ClientSession
    ) -> None:
        self._fleet = fleet
        self._coordinator = coordinator
        self._session = session

    async def run(self, decision: Decision) -> PrefetchReply:
        """Promote a decision's chunks; raise `PrefetchError` if no server can do it."""
        replica_id, keys, wanted = decision.replica_id, decision.picked.keys, decision.prefetch_keys
        servers = self._coordinator.replica_servers
        server, model = servers.server_of(replica_id), servers.model_of(replica_id)
        if server is None or model is None:
            raise PrefetchError(f"{replica_id} has no LMCache server that knows its model")
        count = keys.chunk_chain.index(wanted[-1]) + 1
        client = LmcacheServerClient(self._session, server.url)
        try:
            status = await client.prefetch(keys, count, *model)
        except LmcacheServerRefusedError as refusal:
            if refusal.status != _NOT_READY:
                raise PrefetchError(str(refusal)) from refusal
            self._coordinator.counts["not_ready"] += 1
            return _reply(missing=len(wanted))
        except LmcacheServerError as error:
            raise PrefetchError(str(error)) from error
        if status.status in ("submitted", "pending"):
            return _reply(pending=len(wanted))
        in_l1 = set(keys.chunk_chain[: status.chunks_found(count)])
        missing = [digest for digest in wanted if digest not in in_l1]
        if missing:
            lacking = leading_keys(missing, *model, keys.cache_salt)
            self._coordinator.refuted(replica_id, lacking)
        promoted = len(wanted) - len(missing)
        per_token = self._fleet.replicas[replica_id].kv_bytes_per_token
        nbytes = round(promoted * keys.chunk_tokens * per_token)
        return _reply(promoted=promoted, missing=len(missing), promoted_bytes=nbytes)


def _reply(
    *, promoted: int = 0, pending: int = 0, missing: int = 0, promoted_bytes: int = 0
) -> PrefetchReply:
    return PrefetchReply(
        resident=0,
        promoted=promoted,
        pending=pending,
        missing=missing,
        promoted_bytes=promoted_bytes,
    )


class GapRepair:
    """Finds out what servers hold of a prompt after their events were missed.

    After a restart of the router, or a gap in a stream, servers hold more than is known, and they
    have no call that lists it. But the answer to a prefetch says how much of a prompt is in L1 at
    its end; the order costs a server nothing if it has all of it in L1, or none of it. For
    `REPAIR_S` after events were missed, a prompt that is mostly unknown is asked for before it is
    placed; it waits for the answers at most `_WAIT_S`.
    """

    def __init__(
        self,
        fleet: Fleet,
        coordinator: Coordinator,
        session: aiohttp.ClientSession,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._coordinator = coordinator
        self._session = session
        self._clock = clock
        self._version = -1
        self._kinds: list[tuple[KeyShape | None, Mapping[str, str], int]] = []
        """Shapes, adapters and the bits of the replicas that have them."""
        self._asked: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._under_way: set[asyncio.Task[None]] = set()

    async def look_up(self, prompt_keys: PromptKeyCache) -> None:
        """Ask servers about a prompt if their events were missed; raises nothing."""
        since_s = self._clock() - REPAIR_S
        # The usual case first: the rest looks at every replica.
        if self._coordinator.last_missed_s < since_s or prompt_keys.prompt_tokens < _WORTH_TOKENS:
            return
        if prompt_keys.prompt_tokens - self._most_matched(prompt_keys) < _WORTH_TOKENS:
            return
        tasks = [
            task
            for replica, server in self._uncertain(since_s)
            if (task := self._begin(replica, server, prompt_keys)) is not None
        ]
        if tasks:
            await asyncio.wait(tasks, timeout=_WAIT_S)

    async def stop(self) -> None:
        await end_all(list(self._under_way))

    def _uncertain(self, since_s: float) -> list[tuple[Replica, LiveServer]]:
        """Return one replica of each server whose events were missed after ``since_s``."""
        found: dict[str, tuple[Replica, LiveServer]] = {}
        for replica in self._fleet.replicas.values():
            server = self._coordinator.replica_servers.server_of(replica.id)
            if server is not None and self._coordinator.missed_s(server.instance_id) >= since_s:
                found.setdefault(server.instance_id, (replica, server))
        return list(found.values())[:_MAX_SERVERS]

    def _most_matched(self, prompt_keys: PromptKeyCache) -> int:
        """Return the longest match of a prompt at any replica, in tokens."""
        replicas, most = self._fleet.replicas, 0
        if self._version != replicas.version:
            self._version, self._kinds = replicas.version, _kinds(replicas.values())
        for shape, adapters, slots in self._kinds:
            keys = prompt_keys.of(shape, adapters)
            depths = self._fleet.index.depths(
                keys.keys, keys.blocks_per_chunk, slots, keys.chunk_keys
            )
            most = max([most, *(each.blocks * keys.block_tokens for each in depths[:1])])
        return most

    @staticmethod
    def _keys(replica: Replica, prompt_keys: PromptKeyCache) -> PromptKeys:
        return prompt_keys.of(replica.key_shape, replica.adapters)

    def _begin(
        self, replica: Replica, server: LiveServer, prompt_keys: PromptKeyCache
    ) -> asyncio.Task[None] | None:
        """Start to ask a server; None if it was asked before, or cannot be asked."""
        keys = self._keys(replica, prompt_keys)
        model = self._coordinator.replica_servers.model_of(replica.id)
        if model is None or not keys.chunk_chain:
            return None
        name = (server.instance_id, keys.chunk_chain[-1])
        if name in self._asked or len(self._under_way) >= _MAX_UNDER_WAY:
            return None
        self._asked[name] = None
        if len(self._asked) > _MAX_ASKED:
            self._asked.popitem(last=False)
        task = asyncio.create_task(self._learn(server, keys, *model))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _learn(
        self, server: LiveServer, keys: PromptKeys, model: str, world_size: int
    ) -> None:
        client, count = LmcacheServerClient(self._session, server.url), len(keys.chunk_chain)
        try:
            status = await client.prefetch(keys, count, model, world_size)
        except LmcacheServerError as error:
            log.debug("asking what it holds failed: %s", error)
            return
        self._coordinator.counts["asked"] += 1
        held = keys.chunk_chain[: status.chunks_found(count)]
        found = leading_keys(held, model, world_size, keys.cache_salt)
        self._coordinator.confirmed(server.instance_id, found)


def _kinds(
    replicas: Iterable[Replica],
) -> list[tuple[KeyShape | None, Mapping[str, str], int]]:
    found: dict[tuple[KeyShape | None, tuple[tuple[str, str], ...]], int] = {}
    for each in replicas:
        kind = (each.key_shape, tuple(sorted(each.adapters.items())))
        found[kind] = found.get(kind, 0) | 1 << each.slot
    return [(shape, dict(adapters), slots) for (shape, adapters), slots in found.items()]
