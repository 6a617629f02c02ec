"""Chunks on their way from the GPU into the pool, as vLLM's scheduler asks for them."""

from collections.abc import Collection, Mapping

from vllm.v1.kv_offload.base import (
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from cacheengine.connector.offers import RefusedOffers
from cacheengine.connector.served.request_keys import RequestKeys
from cacheengine.engine import CacheEngine


class Stores:
    """Reservations of the engine's for the scheduler, and what is remembered of refused ones."""

    def __init__(self, engine: CacheEngine, keys: RequestKeys, group_idx: int) -> None:
        self._engine = engine
        self._keys = keys
        self._group_idx = group_idx
        self._under_way: set[bytes] = set()
        self.offers = RefusedOffers()

    def prepare(
        self, offered: Mapping[bytes, OffloadKey], context: ReqContext, prefix: Collection[bytes]
    ) -> PrepareStoreOutput:
        """Reserve rows as `WarmrouteManager.prepare_store` says.

        ``offered`` are the chunks in order, with vLLM's keys of them; ``prefix`` are chunks of the
        same request that were offered or loaded before.
        """
        first = next(iter(offered.values()))
        if self.offers.pass_over(context.req_id, first):
            return self.none()
        reservation = self._engine.prepare_store(list(offered), prefix=prefix)
        if reservation is None:
            self.offers.refuse(context.req_id, first, took_some=False)
            return self.none()
        if reservation.refused:
            self.offers.refuse(context.req_id, offered[reservation.refused[0]], took_some=True)
        else:
            self.offers.end(context.req_id)
        self._under_way.update(reservation.keys)
        return PrepareStoreOutput(
            keys_to_store=[offered[chunk] for chunk in reservation.keys],
            store_spec=CPULoadStoreSpec(list(reservation.slots)),
            evicted_keys=[make_offload_key(key, self._group_idx) for key in reservation.evicted],
        )

    def none(self) -> PrepareStoreOutput:
        """Return that nothing is taken."""
        return PrepareStoreOutput([], CPULoadStoreSpec([]), [])

    def complete(self, keys: Collection[OffloadKey], context: ReqContext, *, success: bool) -> None:
        """Make stored chunks visible, or give their rows back."""
        # vLLM keeps a job's keys in a set; the engine wants prefix order, to
        # write the beginning first and to evict from the end.
        in_order = sorted(keys, key=lambda key: context.get_offload_key_position(key) or 0)
        chunks = self._keys.stored(in_order, context)
        self._under_way.difference_update(chunks)
        self._engine.complete_store(chunks, success=success)

    def take_under_way(self) -> list[bytes]:
        """Return what is under way and forget it; forget what was refused, too."""
        under_way = list(self._under_way)
        self._under_way.clear()
        self.offers.clear()
        return under_way
