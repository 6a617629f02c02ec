"""Asking LMCache's servers what they hold of a prompt, where their events were not all seen.

After a restart of the router, or a gap in a stream, servers hold more than is known, and have
no call that lists it. But one that is told to prefetch a prompt answers how much of it is in
its L1 in the end: that costs it nothing where it has all in L1, or nothing at all. It is asked
before a prompt is placed, for some minutes after events were missed, if much of the prompt is
known nowhere.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import aiohttp

from router.agent_client import AgentError
from router.fleet import Fleet, Replica
from router.index import PromptKeyCache, PromptKeys
from router.lmcache.coordinator import Coordinator
from router.lmcache.server import LmcacheServer
from router.lmcache.ties import Server
from router.lmcache.wire import leading_keys
from warmroute_common.tasks import end_all

log = logging.getLogger("warmroute.lmcache")

ASK_FOR_S: Final = 600.0
"""So long after events were missed a server is asked: its events tell of chunks used meanwhile."""
_WORTH_TOKENS: Final = 1024
_WAIT_S: Final = 0.5
_MAX_SERVERS: Final = 8
_MAX_UNDER_WAY: Final = 64
_MAX_ASKED: Final = 10_000


class Asker:
    """Asks servers; a prompt waits for their answers for `_WAIT_S` at most."""

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
        self._asked: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._under_way: set[asyncio.Task[None]] = set()

    async def ask(self, keyring: PromptKeyCache) -> None:
        """Learn which servers hold a prompt, where that is not known; raises nothing."""
        since_s = self._clock() - ASK_FOR_S
        # Nearly always so; the rest looks at every replica.
        if self._coordinator.last_missed_s < since_s or keyring.prompt_tokens < _WORTH_TOKENS:
            return
        uncertain = self._uncertain(since_s)
        if keyring.prompt_tokens - self._best(keyring) < _WORTH_TOKENS:
            return
        tasks = [
            task
            for replica, server in uncertain
            if (task := self._begin(replica, server, keyring)) is not None
        ]
        if tasks:
            await asyncio.wait(tasks, timeout=_WAIT_S)

    async def stop(self) -> None:
        """Ask nothing any more."""
        await end_all(list(self._under_way))

    def _uncertain(self, since_s: float) -> list[tuple[Replica, Server]]:
        """Return a replica of each server whose events were missed since a time."""
        found: dict[str, tuple[Replica, Server]] = {}
        for replica in self._fleet.replicas.values():
            server = self._coordinator.ties.server_of(replica.id)
            if server is not None and self._coordinator.missed_s(server.instance_id) >= since_s:
                found.setdefault(server.instance_id, (replica, server))
        return list(found.values())[:_MAX_SERVERS]

    def _best(self, keyring: PromptKeyCache) -> int:
        """Return how many tokens of a prompt some replica is known to hold."""
        best = 0
        for replica in self._fleet.replicas.values():
            keys, index = self._keys(replica, keyring), self._fleet.index
            per_chunk = keys.blocks_per_chunk
            match = index.match(replica.slot, keys.keys, per_chunk, keys.chunk_keys)
            best = max(best, match.blocks(per_chunk) * keys.block_tokens)
        return best

    @staticmethod
    def _keys(replica: Replica, keyring: PromptKeyCache) -> PromptKeys:
        return keyring.of(replica.key_shape, replica.adapters)

    def _begin(
        self, replica: Replica, server: Server, keyring: PromptKeyCache
    ) -> asyncio.Task[None] | None:
        """Begin to ask a server; None where it was asked before, or cannot be."""
        keys, found = self._keys(replica, keyring), self._coordinator.ties.model_of(replica.id)
        if found is None or not keys.chunk_chain:
            return None
        name = (server.instance_id, keys.chunk_chain[-1])
        if name in self._asked or len(self._under_way) >= _MAX_UNDER_WAY:
            return None
        self._asked[name] = None
        if len(self._asked) > _MAX_ASKED:
            self._asked.popitem(last=False)
        task = asyncio.create_task(self._learn(server, keys, *found))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _learn(self, server: Server, keys: PromptKeys, model: str, world_size: int) -> None:
        asked, count = LmcacheServer(self._session, server.url), len(keys.chunk_chain)
        try:
            told = await asked.prefetch(keys, count, model, world_size)
        except AgentError as error:
            log.debug("asking what it holds failed: %s", error)
            return
        self._coordinator.counts["asked"] += 1
        held = keys.chunk_chain[: told.chunks_found(count)]
        found = leading_keys(held, model, world_size, keys.cache_salt)
        self._coordinator.found(server.instance_id, found)
