"""The thread that seals the chunks of a kept pool, and checks what an earlier process has left."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from cacheengine.bulk import checksum
from cacheengine.engine.engine_lock import EngineLock
from cacheengine.kept_pool import Seal
from cacheengine.memory import Pool
from cacheengine.residency.decisions import PORTION

logger = logging.getLogger("vllm.warmroute")

_BATCH_BYTES: Final = 32 << 20


class PoolKeeper:
    """Reads each chunk once after it came into the pool, and once after a restart.

    Both without the engine's lock and without keeping the chunk in its slot: what was computed for
    a chunk that has left meanwhile is dropped. Kept chunks become visible one after the other, the
    least recently used first, as they also leave; before all others those that a request waits for.
    """

    def __init__(
        self, engine: EngineLock, pool: Pool, kept: Iterable[Seal], clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._pool = pool
        self._batch = max(1, min(PORTION, _BATCH_BYTES // pool.slot_bytes))
        # Guards the chunks to check: calls change their order while the thread takes them.
        self._lock = threading.Lock()
        self._unchecked = OrderedDict((seal.key, seal) for seal in kept)
        self._intact = self._damaged = 0
        self._began_s = time.monotonic()
        self._ends_s: float | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-keep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look for chunks that came into the pool. Fast."""
        self._wake.set()

    def want(self, keys: Sequence[bytes]) -> None:
        """Check these chunks before all others."""
        if not self._unchecked:
            return
        with self._lock:
            for key in reversed(keys):
                if key in self._unchecked:
                    self._unchecked.move_to_end(key, last=False)

    def stop(self, drain_s: float) -> None:
        """Check no more chunks, and seal for at most ``drain_s``."""
        self._ends_s = time.monotonic() + drain_s
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end after `stop`; False if it still runs."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                if self._check_some() or self._seal_some():
                    continue
            except Exception:  # the others must still be checked and sealed
                logger.exception("cpu tier: a chunk could not be kept")
                continue
            if self._ends_s is not None:
                return
            self._wake.wait()

    def _check_some(self) -> bool:
        """Check the next kept chunks; return whether there were any."""
        with self._lock:
            count = min(self._batch, len(self._unchecked)) if self._ends_s is None else 0
            seals = [self._unchecked.popitem(last=False)[1] for _ in range(count)]
        if not seals:
            return False
        intact = [each.key for each in seals if self._digest(each.slot) == each.digest]
        damaged = [each.key for each in seals if each.key not in intact]
        with self._engine as decider:
            decider.end_check(intact, self._clock(), are_intact=True)
            decider.end_check(damaged, self._clock(), are_intact=False)
        self._intact += len(intact)
        self._damaged += len(damaged)
        if not self._unchecked:
            took_s = time.monotonic() - self._began_s
            logger.info(
                "cpu tier: %d chunks of an earlier run are served again, %d were damaged (%.1f s)",
                *(self._intact, self._damaged, took_s),
            )
        return True

    def _seal_some(self) -> bool:
        """Seal the next chunks that came; return whether there were any."""
        if self._ends_s is not None and time.monotonic() >= self._ends_s:
            return False
        with self._engine as decider:
            entries = decider.pool.take_unsealed(self._batch)
        if not entries:
            return False
        digests = [self._digest(each.slot) for each in entries]
        with self._engine as decider:
            for entry, digest in zip(entries, digests, strict=True):
                decider.pool.seal(entry, digest)
        return True

    def _digest(self, slot: int) -> bytes:
        return checksum(self._pool.view(slot))
