"""Chunks on their way from the GPU into the pool, as vLLM's scheduler asks for them."""

from collections.abc import Collection, Sequence

from vllm.v1.kv_offload.base import (
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    get_offload_block_hash,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from cacheengine.connector.offers import RefusedOffers
from cacheengine.engine import CacheEngine
from cacheengine.residency import StoreReservation


class Stores:
    """Reservations of the engine's for the scheduler, and what is remembered of refused ones."""

    def __init__(self, engine: CacheEngine, group_idx: int) -> None:
        self._engine = engine
        self._group_idx = group_idx
        self._under_way: set[bytes] = set()
        self.offers = RefusedOffers()
        self.are_offered_again = False
        """What is refused is offered again (`WarmrouteConnector`), also of a part of an offer."""

    def prepare(
        self, keys: Sequence[OffloadKey], context: ReqContext, prefix: Collection[bytes]
    ) -> PrepareStoreOutput | None:
        """Reserve rows as `WarmrouteManager.prepare_store` says.

        ``prefix`` are chunks of the same request that were offered or loaded before.
        """
        if self.offers.pass_over(context.req_id, keys[0]):
            return self._output(StoreReservation((), (), ()))
        chunks = [get_offload_block_hash(key) for key in keys]
        reservation = self._engine.prepare_store(chunks, prefix=prefix)
        if self.are_offered_again:
            reservation = self._note_refused(keys, context.req_id, reservation)
        if reservation is None:
            return None
        self._under_way.update(reservation.keys)
        return self._output(reservation)

    def _note_refused(
        self, keys: Sequence[OffloadKey], req_id: str, reservation: StoreReservation | None
    ) -> StoreReservation:
        if reservation is None:
            self.offers.refuse(req_id, keys[0], took_some=False)
            return StoreReservation((), (), ())
        if reservation.refused:
            self.offers.refuse(req_id, self._key(reservation.refused[0]), took_some=True)
        else:
            self.offers.end(req_id)
        return reservation

    def _output(self, reservation: StoreReservation) -> PrepareStoreOutput:
        return PrepareStoreOutput(
            keys_to_store=list(map(self._key, reservation.keys)),
            store_spec=CPULoadStoreSpec(list(reservation.slots)),
            evicted_keys=list(map(self._key, reservation.evicted)),
        )

    def _key(self, chunk: bytes) -> OffloadKey:
        return make_offload_key(chunk, self._group_idx)

    def complete(self, keys: Collection[OffloadKey], context: ReqContext, *, success: bool) -> None:
        """Make stored chunks visible, or give their rows back."""
        # vLLM keeps a job's keys in a set; the engine wants prefix order, to
        # write the beginning first and to evict from the end.
        in_order = sorted(keys, key=lambda key: context.get_offload_key_position(key) or 0)
        chunks = [get_offload_block_hash(key) for key in in_order]
        self._under_way.difference_update(chunks)
        self._engine.complete_store(chunks, success=success)

    def take_under_way(self) -> list[bytes]:
        """Return what is under way and forget it; forget what was refused, too."""
        under_way = list(self._under_way)
        self._under_way.clear()
        self.offers.clear()
        return under_way
