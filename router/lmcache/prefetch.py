"""Prefetch at a replica whose KV is LMCache's: `router.staging` calls it as it calls agents."""

from collections.abc import Callable
from typing import Final

import aiohttp

from cacheengine.wire import PrefetchReply
from router.fleet import Decision, Fleet
from router.lmcache.coordinator.state import Coordinator
from router.lmcache.server import LmcacheServer
from router.lmcache.wire import ObjectKey, PrefetchStatus, rank_of_world
from router.staging import AgentRefused, PrefetchCall

_NOT_READY: Final = 503
"""What a server answers until a vLLM has registered the model's KV cache with it."""


class LmcachePrefetch:
    """Has LMCache's servers bring a prompt's chunks from L2 to L1.

    A server takes a prompt from its first token on; chunks that are in L1 already cost it
    nothing. It pins nothing, and says only when all is over.
    """

    def __init__(
        self,
        fleet: Fleet,
        coordinator: Coordinator,
        session: aiohttp.ClientSession,
        url_of: Callable[[str], str | None],
    ) -> None:
        """``url_of`` tells where a replica's server is, by the replica's id."""
        self._fleet = fleet
        self._coordinator = coordinator
        self._session = session
        self._url_of = url_of

    def call(self, decision: Decision) -> PrefetchCall | None:
        """Return the call that a decision's prefetch is; None where no server could do it."""
        found = self._coordinator.ties.model_of(decision.replica_id)
        url = self._url_of(decision.replica_id)
        if found is None or url is None or not decision.picked.keys.chunk_chain:
            return None
        server, (model, world_size) = LmcacheServer(self._session, url), found

        async def ask() -> PrefetchReply:
            keys = decision.picked.keys
            last = keys.chunk_chain.index(decision.prefetch_keys[-1])
            try:
                told = await server.prefetch(
                    keys.token_ids[: (last + 1) * keys.chunk_tokens],
                    model=model,
                    world_size=world_size,
                    cache_salt=keys.cache_salt,
                )
            except AgentRefused as refusal:
                if refusal.status != _NOT_READY:
                    raise
                self._coordinator.counts["not_ready"] += 1
                return _reply(missing=len(decision.prefetch_keys))
            return self._reply(decision, told, model, world_size)

        return ask

    def _reply(
        self, decision: Decision, told: PrefetchStatus, model: str, world_size: int
    ) -> PrefetchReply:
        """Return what became of the chunks asked for, and correct what was believed of them."""
        asked, keys = decision.prefetch_keys, decision.picked.keys
        if told.status == "pending":
            return _reply(pending=len(asked))
        per_chunk = max(1, told.total_keys // (keys.chunk_chain.index(asked[-1]) + 1))
        there = set(keys.chunk_chain[: told.found_keys // per_chunk])
        missing = [digest for digest in asked if digest not in there]
        if missing:
            rank = rank_of_world(world_size, 0)
            gone = [ObjectKey(each, model, rank, 0, keys.cache_salt) for each in missing]
            self._coordinator.refuted(decision.replica_id, gone)
        promoted = len(asked) - len(missing)
        per_token = self._fleet.replicas[decision.replica_id].kv_bytes_per_token
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
