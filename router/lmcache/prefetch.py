"""Prefetch at a replica whose KV is LMCache's: `router.staging` calls it as it calls agents."""

from typing import Final

import aiohttp

from router.agent_client import AgentError, AgentRefusedError
from router.fleet import Decision, Fleet
from router.lmcache.coordinator import Coordinator
from router.lmcache.server import LmcacheServer
from router.lmcache.wire import leading_keys
from warmroute_common.agent_protocol import PrefetchReply

_NOT_READY: Final = 503
"""What a server answers until a vLLM has registered the model's KV cache with it."""


class LmcachePrefetch:
    """Has LMCache's servers bring a prompt's chunks from L2 to L1.

    A server takes a prompt from its first token on; chunks that are in L1 already cost it
    nothing. It pins nothing, and says only when all is over.
    """

    def __init__(
        self, fleet: Fleet, coordinator: Coordinator, session: aiohttp.ClientSession
    ) -> None:
        self._fleet = fleet
        self._coordinator = coordinator
        self._session = session

    async def run(self, decision: Decision) -> PrefetchReply:
        """Have a decision's chunks promoted; raise `AgentError` where no server does that."""
        ties, keys, asked = self._coordinator.ties, decision.picked.keys, decision.prefetch_keys
        server, found = ties.server_of(decision.replica_id), ties.model_of(decision.replica_id)
        if server is None or found is None:
            raise AgentError(f"{decision.replica_id} has no LMCache server that knows its model")
        count = keys.chunk_chain.index(asked[-1]) + 1
        try:
            told = await LmcacheServer(self._session, server.url).prefetch(keys, count, *found)
        except AgentRefusedError as refusal:
            if refusal.status != _NOT_READY:
                raise
            self._coordinator.counts["not_ready"] += 1
            return _reply(missing=len(asked))
        if told.status in ("submitted", "pending"):
            return _reply(pending=len(asked))
        there = set(keys.chunk_chain[: told.chunks_found(count)])
        missing = [digest for digest in asked if digest not in there]
        if missing:
            gone = leading_keys(missing, *found, keys.cache_salt)
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
