"""An engine full of chunks, what is done with it, and a lock that takes the time."""

import gc
import threading
import time
from collections.abc import Sequence
from typing import Final

from bench.engine.index import FullTier, key_of, layout
from cacheengine.engine.engine import CacheEngine
from cacheengine.memory import Pool
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.tier import Chunk, GetOutcome, PutOutcome

PROMPT_CHUNKS: Final = 400
_PIN_S: Final = 600.0


class TimedLock:
    """A lock that notes how long it was held each time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_s = 0.0
        self.held_us: list[float] = []
        self.collecting_us: list[float] = []
        """Those in which Python's collector looked at all objects, which stops every thread."""
        self._collected = False
        gc.callbacks.append(self._note_collection)

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        self._collected |= info["generation"] == 2

    def acquire(self) -> bool:
        """Take it."""
        self._lock.acquire()
        self._collected = False
        self._since_s = time.perf_counter()
        return True

    def release(self) -> None:
        """Give it back, and note how long it was held."""
        held_us = self.collecting_us if self._collected else self.held_us
        held_us.append((time.perf_counter() - self._since_s) * 1e6)
        self._lock.release()


class InstantDisk(FullTier):
    """A disk that holds ``chunks`` chunks from number ``first`` on, and takes others at once."""

    def __init__(self, first: int, chunks: int) -> None:
        super().__init__(first + chunks)
        self._held = range(first, first + chunks)

    def scan(self) -> list[bytes]:
        """Return what it holds in the beginning."""
        return [key_of(number) for number in self._held]

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Take them."""
        return [PutOutcome.STORED] * len(chunks)

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Say that they are there."""
        return [GetOutcome.OK] * len(chunks)


class Rig:
    """An engine with a full pool, three quarters of it pinned, and what is done with it."""

    def __init__(self, chunks: int) -> None:
        self.now_s = 0.0
        self.engine = CacheEngine(
            EngineConfig(),
            layout(1),
            Pool.allocate(chunks, 1),
            tier=InstantDisk(chunks, chunks // 2),
            clock=lambda: self.now_s,
        )
        self.prompts = [
            [key_of(number) for number in range(start, start + PROMPT_CHUNKS)]
            for start in range(0, chunks * 3 // 2 - PROMPT_CHUNKS + 1, PROMPT_CHUNKS)
        ]
        self.in_pool = chunks // PROMPT_CHUNKS
        for prompt in self.prompts[: self.in_pool]:
            self._store(prompt)
        self._settle()
        # A little less than may be, so that there is room for promotions.
        for prompt in self.prompts[: int(self.in_pool * 0.74)]:
            self.engine.promote(prompt, pin_s=_PIN_S)
        self.lock = TimedLock()
        self.engine._lock.lock = self.lock  # type: ignore[assignment]

    def _store(self, prompt: Sequence[bytes]) -> None:
        reservation = self.engine.prepare_store(prompt)
        if reservation is not None:
            self.engine.complete_store(reservation.keys)

    def _settle(self) -> None:
        while self.engine.stats().put_queue_bytes:
            time.sleep(0.01)

    def lookups(self) -> None:
        """Look prompts up, chunk by chunk."""
        for prompt in self.prompts[:: max(1, len(self.prompts) // 50)]:
            for key in prompt:
                self.engine.lookup(key)

    def holds(self) -> None:
        """Hold and release prompts."""
        for prompt in self.prompts[: self.in_pool : max(1, self.in_pool // 50)]:
            self.engine.hold(prompt)
            self.engine.release(prompt)

    def promotions(self) -> None:
        """Promote prompts from the disk."""
        for prompt in self.prompts[self.in_pool : self.in_pool + max(1, self.in_pool // 200)]:
            self.engine.promote(prompt, pin_s=_PIN_S).wait(60)

    def stores(self) -> None:
        """Store new prompts, for which others leave the pool and the disk."""
        first = 10 * self.in_pool * PROMPT_CHUNKS
        for start in range(first, first + 20 * PROMPT_CHUNKS, PROMPT_CHUNKS):
            self._store([key_of(number) for number in range(start, start + PROMPT_CHUNKS)])
        self._settle()

    def expiry(self) -> None:
        """Have all pins end."""
        self.now_s += 2 * _PIN_S
        self.engine.expire_pins()

    def clear(self) -> None:
        """Clear all tiers, and wait until every slot is free."""
        self.engine.clear()
        while self.engine.tier_info()["cpu"].used_bytes:
            time.sleep(0.01)
