"""A replica's cache engine in model time: the engine's own decisions, modelled I/O.

`cacheengine.residency` decides, as in a replica; the disk here is a device that
reads and writes one batch after another, each way at its own rate. Bytes are none:
a chunk counts as many as it has tokens.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from cacheengine.engine.long_calls import LongCalls
from cacheengine.record import CPU, BandwidthMeter, EngineStats, KeyEventRecord
from cacheengine.residency.decider import Decider
from cacheengine.residency.decisions import Presence, Promotion, StoreReservation, Todo
from cacheengine.residency.entry import Holder
from cacheengine.residency.lower.local_index import TierIndex
from cacheengine.tiers.base import GetOutcome, PutOutcome
from simulator.model.machine_and_request import Machine

_READ_BATCH: Final = 4
"""Chunks in a read, as a disk tier's are."""
_WRITE_BATCH: Final = 16
"""Chunks in a write: more than a disk tier's, since nobody waits for one."""
_PUT_QUEUE_SHARE: Final = 0.5
"""The default of ``put_queue_share``."""
_DISK: Final = "disk"


class ModelEngine:
    """What of `cacheengine.engine.CacheEngine` a replica's scheduler and agent call.

    ``on_events`` hears what the tiers gained and lost, as it happens.
    """

    def __init__(
        self,
        machine: Machine,
        on_events: Callable[[Sequence[KeyEventRecord]], None],
    ) -> None:
        self.chunk_tokens = machine.shape.chunk_tokens
        self._read_s = self.chunk_tokens / machine.rates.disk_tokens_per_s
        self._write_s = self.chunk_tokens / machine.rates.disk_write_tokens_per_s
        self._loop = asyncio.get_running_loop()
        self._on_events = on_events
        self._disk = TierIndex(machine.disk_chunks * self.chunk_tokens, self.chunk_tokens)
        self._decider = Decider(
            machine.cpu_chunks,
            "LRU",
            [self._disk],
            chunk_bytes=self.chunk_tokens,
            local_cpu=True,
            put_queue_share=_PUT_QUEUE_SHARE,
        )
        self._calls = LongCalls(self._deciding, self._loop.time)
        self._reads = BandwidthMeter()
        self._reading = self._writing = False

    # --- what a scheduler asks

    def lookup(self, key: bytes) -> Presence:
        """Say where a chunk is. There is no remote tier to be asked: nothing follows."""
        return self._decider.presence(key, self._loop.time())

    def try_hold(self, key: bytes) -> int | None:
        """Hold a chunk if it is ready."""
        return self._decider.try_hold(key)

    def hold(
        self, keys: Sequence[bytes], *, held_before: bool = False, holder: Holder = None
    ) -> list[int]:
        """Keep chunks until `release`; end the holder's pins."""
        return self._calls.hold(keys, held_before=held_before, holder=holder)

    def release(self, keys: Collection[bytes]) -> None:
        """End one hold of each chunk."""
        self._calls.release([*keys])

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use of chunks."""
        self._calls.touch(keys)

    def prepare_store(self, keys: Sequence[bytes]) -> StoreReservation | None:
        """Reserve room for those of the chunks that are not there."""
        return self._calls.prepare_store(keys, ())

    def complete_store(
        self, keys: Collection[bytes], *, success: bool = True, prefetched: bool = False
    ) -> None:
        """Make reserved chunks visible, or give their room back."""
        self._calls.complete_store(keys, success=success, prefetched=prefetched)

    def promote(self, keys: Sequence[bytes], *, pin_s: float, holder: Holder = None) -> Promotion:
        """Bring a prefix into CPU RAM and pin it."""
        return self._calls.promote(keys, pin_s, holder)

    def may_promote(self) -> bool:
        """Whether a chunk from below would find room now, and could be pinned."""
        return self._calls.may_promote()

    def reads_ended(self, tier: str) -> int:
        """How many reads from a lower tier were answered so far."""
        return self._decider.stats.below(tier).reads_ended

    def end_pins(self, keys: Iterable[bytes], holder: Holder) -> None:
        """End one holder's pins of chunks."""
        self._calls.end_pins([*keys], holder)

    def match(self, keys: Sequence[bytes]) -> list[str]:
        """Return the tier of each chunk, up to the first that is nowhere."""
        return self._calls.match(keys)

    # --- what a bench asks

    @property
    def read_tokens_per_s(self) -> float:
        """How fast the disk was read; 0.0 while it was not."""
        return self._reads.bytes_per_s()

    def stats(self) -> EngineStats:
        """Return the counters so far; a chunk's bytes are its tokens."""
        return self._decider.counts()

    def clear_cpu(self) -> None:
        """Forget what lies in CPU RAM, as a replica does that dies; the disk keeps its own."""
        with self._deciding() as decider:
            decider.clear(("cpu",))

    def check(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        self._decider.check()

    # --- what follows from decisions

    @contextmanager
    def _deciding(self) -> Iterator[Decider]:
        yield self._decider
        todo = self._decider.take_todo()
        if todo is not None:
            self._start(todo)

    def _start(self, todo: Todo) -> None:
        for name, keys in todo.deletes.items():
            self._decider.cascades[name].deleted(keys)
        while CPU in todo.clears and self._decider.free_cleared():
            pass
        while _DISK in todo.clears:
            keys, is_more = self._decider.take_cleared(_DISK)
            self._decider.cascades[_DISK].deleted(keys)
            if not is_more:
                break
        if todo.gets[_DISK]:
            self._read_next()
        if todo.puts[_DISK]:
            self._write_next()
        for promotion, outcome, chunks in todo.settled:
            promotion.settle(outcome, chunks)
        if todo.has_news:
            self._on_events(self._decider.events.take())

    def _read_next(self) -> None:
        if self._reading:
            return
        entries = self._decider.promoter.take(_DISK, _READ_BATCH)
        if not entries:
            return
        self._reading = True
        self._reads.start(self._loop.time())

        def read() -> None:
            self._reading = False
            self._reads.stop(self._loop.time(), len(entries) * self.chunk_tokens)
            with self._deciding() as decider:
                outcomes = [GetOutcome.OK] * len(entries)
                decider.promoter.end(self._disk, entries, outcomes, self._loop.time())
            self._read_next()

        self._loop.call_later(len(entries) * self._read_s, read)

    def _write_next(self) -> None:
        if self._writing:
            return
        with self._deciding() as decider:
            entries, victims = decider.cascades[_DISK].begin(_WRITE_BATCH, self._loop.time())
            decider.cascades[_DISK].deleted(victims)
        if not entries:
            if decider.cascades[_DISK].waiting:
                self._write_next()
            return
        self._writing = True

        def written() -> None:
            self._writing = False
            with self._deciding() as decider:
                outcomes = [PutOutcome.STORED] * len(entries)
                decider.cascades[_DISK].end(entries, outcomes, self._loop.time())
            self._write_next()

        self._loop.call_later(len(entries) * self._write_s, written)
