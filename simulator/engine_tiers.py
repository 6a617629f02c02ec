"""The tiers below a simulated GPU: a real cache engine, driven as vLLM drives it.

`EngineTiers` makes the calls of `cacheengine.connector.manager`, in the order in which vLLM's
offloading connector makes them in a scheduler step. A chunk's bytes are its key, repeated, so that
a load can detect a wrong chunk. `ObservedTiers` also reports the chunks that it stores and finds,
as vLLM's connector notes them for its KV events.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cacheengine.engine.engine import CacheEngine
from cacheengine.engine.promotion_waits import PIN_S, PromotionWaits
from cacheengine.residency.decisions import Presence
from simulator.model.lower_tier_view import LoadableTokens
from simulator.model.sim_request import SimRequest


@dataclass(slots=True)
class _Asked:
    """What is remembered of a request from its first lookup to its end."""

    loads: Sequence[bytes] = ()
    used: set[bytes] = field(default_factory=set)


class EngineTiers:
    """`LowerTiers` over an engine. ``on_promoted`` is called, on any thread, when one ended.

    ``view`` gives a slot's bytes, to be written and compared; None: there are none.
    ``is_shared``: other threads change the engine, too, so that what a step has looked up
    must be held until it is used. A prompt computes at ``prefill_tokens_per_s``, and ``clock``
    tells the seconds of that; the engine's own run ``speed`` times slower.
    """

    def __init__(
        self,
        engine: CacheEngine,
        *,
        chunk_tokens: int,
        view: Callable[[int], memoryview] | None = None,
        is_shared: bool = True,
        clock: Callable[[], float],
        prefill_tokens_per_s: float,
        speed: float = 1.0,
        on_promoted: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._chunk_tokens = chunk_tokens
        self._view = view
        self._is_shared = is_shared
        self._tokens_per_engine_s = prefill_tokens_per_s * speed
        self._waits = PromotionWaits(
            engine, lambda: clock() / speed, pin_s=PIN_S / speed, on_promoted=on_promoted
        )
        self._asked: dict[str, _Asked] = {}
        self._step_holds: set[bytes] = set()
        self._being_loaded: Counter[bytes] = Counter()
        self.wrong_chunks = 0
        """Chunks loaded whose bytes were another's; there must be none."""

    def find(
        self, request: SimRequest, gpu_tokens: int, *, others: int = 0
    ) -> LoadableTokens | None:
        """Look up what follows the GPU's part; None while some of it is on its way up."""
        asked = self._asked.setdefault(request.id, _Asked())
        compute_s = (request.prefill_end - gpu_tokens) / self._tokens_per_engine_s
        chunk_s = self._chunk_tokens / self._tokens_per_engine_s
        if self._waits.must_wait(request.id, gpu_tokens, compute_s, chunk_s, others=others):
            return None
        first = gpu_tokens // self._chunk_tokens
        keys = request.chunk_keys[first : request.prefill_end // self._chunk_tokens]
        hits = self._look_up(request.id, keys)
        if hits is None:
            return None
        asked.loads = keys[:hits]
        tokens = (first + hits) * self._chunk_tokens - gpu_tokens
        if tokens < self._chunk_tokens:
            asked.loads = ()
            return LoadableTokens()
        if any(map(self._being_loaded.__contains__, asked.loads)):
            return None  # they will be on the GPU in a moment
        from_below = sum(self._waits.tier_of(request.id, key) is not None for key in asked.loads)
        from_disk = min(from_below * self._chunk_tokens, tokens)
        return LoadableTokens(cpu=tokens - from_disk, disk=from_disk)

    def _look_up(self, request_id: str, keys: Sequence[bytes]) -> int | None:
        """Return how many leading chunks can be loaded now, None if some must be waited for."""
        hits, waits = 0, False
        for position, key in enumerate(keys):
            if key in self._step_holds or self._is_ready(key):
                if self._is_shared:
                    self._step_holds.add(key)
                self._waits.found(request_id, key)
                hits += 1
            else:
                match self._engine.lookup(key):
                    case Presence.MISS:
                        break
                    case Presence.PENDING | Presence.CPU:
                        if not self._waits.want(request_id, key, None, position):
                            break
                    case Presence.DISK:
                        if not self._waits.want(request_id, key, "disk", position):
                            break
                    case Presence.REMOTE | Presence.UNKNOWN:
                        if not self._waits.want(request_id, key, "remote", position):
                            break
                waits = True
        return None if waits else hits

    def _is_ready(self, key: bytes) -> bool:
        """Whether a chunk can be loaded; it is held if another thread could evict it."""
        if self._is_shared:
            return self._engine.try_hold(key) is not None
        return self._engine.lookup(key) is Presence.CPU

    def begin_load(self, request: SimRequest) -> None:
        """Hold the chunks that were found, and see that they are the right ones."""
        asked = self._asked[request.id]
        slots = self._engine.hold(asked.loads, held_before=True, holder=request.id)
        self._note_use(asked, asked.loads)
        self._being_loaded.update(asked.loads)
        if self._view is None:
            return
        for key, slot in zip(asked.loads, slots, strict=True):
            view = self._view(slot)
            self.wrong_chunks += bytes(view[: len(key)]) != key[: len(view)]

    def end_load(self, request: SimRequest) -> None:
        """Let the chunks go that were held for the load."""
        asked = self._asked[request.id]
        self._engine.release(asked.loads)
        for key in asked.loads:
            if self._being_loaded[key] == 1:
                del self._being_loaded[key]
            else:
                self._being_loaded[key] -= 1
        asked.loads = ()

    def begin_store(self, request: SimRequest) -> Sequence[bytes]:
        """Offer full chunks to the engine; chunks that it already has count as used."""
        end = request.computed // self._chunk_tokens
        keys = request.chunk_keys[request.stored_chunks : end]
        if not keys:
            return ()
        self._note_use(self._asked[request.id], keys)
        reservation = self._engine.prepare_store(keys)
        if reservation is None:
            return ()  # no room for any: they are offered again at the next step
        request.stored_chunks = end
        if self._view is None:
            return reservation.keys
        for key, slot in zip(reservation.keys, reservation.slots, strict=True):
            view = self._view(slot)
            view[:] = (key * (len(view) // len(key) + 1))[: len(view)]
        return reservation.keys

    def end_store(self, chunks: Sequence[bytes]) -> None:
        """Make chunks visible that were offered before."""
        self._engine.complete_store(chunks)

    def _note_use(self, asked: _Asked, keys: Sequence[bytes]) -> None:
        """Tell the eviction of a use, once for each request and chunk."""
        self._engine.touch([key for key in keys if key not in asked.used])
        asked.used.update(keys)

    def end_schedule(self) -> None:
        """Have what this step's lookups found below the pool promoted; let go of its holds."""
        self._waits.end_step()
        if self._step_holds:
            self._engine.release(self._step_holds)
            self._step_holds.clear()

    def forget(self, request: SimRequest) -> None:
        """Drop what is remembered of a request."""
        self._asked.pop(request.id, None)
        self._waits.end(request.id)

    def tiers_of(self, chunk_keys: Sequence[bytes]) -> Sequence[str]:
        """Return the tier of each leading chunk, without a trace in the engine's counts."""
        return self._engine.match(chunk_keys)


class ObservedTiers(EngineTiers):
    """Calls ``noted`` with the numbers of a request's chunks that were reserved or found ready."""

    def __init__(
        self, *given: Any, noted: Callable[[SimRequest, Iterable[int]], None], **options: Any
    ) -> None:
        super().__init__(*given, **options)
        self._noted = noted

    def find(
        self, request: SimRequest, gpu_tokens: int, *, others: int = 0
    ) -> LoadableTokens | None:
        """Look up what follows the GPU's part."""
        found = super().find(request, gpu_tokens, others=others)
        if found is not None and (tokens := found.cpu + found.disk):
            end = (gpu_tokens + tokens) // self._chunk_tokens
            self._noted(request, range(gpu_tokens // self._chunk_tokens, end))
        return found

    def begin_store(self, request: SimRequest) -> Sequence[bytes]:
        """Reserve room for what has become full."""
        first = request.stored_chunks
        keys = super().begin_store(request)
        if keys:
            reserved, stored = frozenset(keys), range(first, request.stored_chunks)
            self._noted(request, [each for each in stored if request.chunk_keys[each] in reserved])
        return keys
