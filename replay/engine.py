"""A replica's cache engine in model time: the real engine over modelled I/O.

`CacheEngine` decides, as in a replica; the disk here is a device that reads and writes one batch
after another, each way at its own rate. There are no bytes: a chunk counts its tokens.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from cacheengine.engine.engine import CacheEngine
from cacheengine.engine.engine_lock import EngineLock
from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.record import CPU, BandwidthMeter, KeyEventRecord
from cacheengine.residency.decisions import PORTION, PendingWork
from cacheengine.residency.local_index import LocalIndex
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from simulator.model.replica_machine import Machine
from warmroute_common import agent_protocol as wire

_READ_BATCH: Final = 4
"""Chunks in a read, as a disk tier's are."""
_WRITE_BATCH: Final = 16
"""Chunks in a write: more than a disk tier's, since nobody waits for one."""
_DISK: Final = "disk"


class NoBytesPool(Pool):
    """Slots without memory, as many as there are, or none."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes

    def close(self) -> None:
        """Do nothing: there is no buffer."""


class ModelDisk:
    """The I/O of a disk tier in model time."""

    def __init__(self, machine: Machine, lock: EngineLock) -> None:
        chunk_tokens = machine.shape.chunk_tokens
        self._loop = asyncio.get_running_loop()
        self._lock = lock
        self._chunk_tokens = chunk_tokens
        self._read_s = chunk_tokens / machine.rates.disk_tokens_per_s
        self._write_s = chunk_tokens / machine.rates.disk_write_tokens_per_s
        self._index = LocalIndex(machine.disk_chunks * chunk_tokens, chunk_tokens)
        self.indexes = [self._index]
        self.reads = BandwidthMeter()
        self._is_reading = self._is_writing = False

    def start(self, work: PendingWork) -> None:
        """Start the reads, writes and deletes that were decided."""
        if work.deletes:
            self._delete(work.deletes[_DISK])
        is_more = CPU in work.clears
        while is_more:
            with self._lock as decider:
                is_more = decider.state.remove_cleared(PORTION)
        is_more = _DISK in work.clears
        while is_more:
            with self._lock as decider:
                keys, is_more = decider.state.take_cleared(self._index, PORTION)
            self._delete(keys)
        if work.gets[_DISK]:
            self._read_next()
        if work.puts[_DISK]:
            self._write_next()

    def _delete(self, keys: Sequence[bytes]) -> None:
        with self._lock as decider:
            decider.cascades[_DISK].deleted(keys)

    def _read_next(self) -> None:
        if self._is_reading:
            return
        with self._lock as decider:
            entries = decider.promoter.take(_DISK, _READ_BATCH, self._loop.time())
        if not entries:
            return
        self._is_reading = True
        self.reads.start(self._loop.time())

        def read() -> None:
            self._is_reading = False
            self.reads.stop(self._loop.time(), len(entries) * self._chunk_tokens)
            with self._lock as decider:
                outcomes = [GetOutcome.OK] * len(entries)
                decider.promoter.end(self._index, entries, outcomes, self._loop.time())
            self._read_next()

        self._loop.call_later(len(entries) * self._read_s, read)

    def _write_next(self) -> None:
        if self._is_writing:
            return
        with self._lock as decider:
            entries, victims = decider.cascades[_DISK].begin(_WRITE_BATCH, self._loop.time())
            decider.cascades[_DISK].deleted(victims)
            is_more = decider.cascades[_DISK].waiting > 0
        if not entries:
            if is_more:
                self._write_next()
            return
        self._is_writing = True

        def written() -> None:
            self._is_writing = False
            with self._lock as decider:
                outcomes = [PutOutcome.STORED] * len(entries)
                decider.cascades[_DISK].end(entries, outcomes, self._loop.time())
            self._write_next()

        self._loop.call_later(len(entries) * self._write_s, written)

    def info(self) -> dict[str, wire.TierInfo]:
        """Return nothing: nobody asks a model."""
        return {}

    def close(self, drain_s: float) -> bool:
        """Do nothing: no thread runs."""
        return True


class ModelEngine(CacheEngine):
    """The engine of a replica in model time. A chunk's bytes are its tokens.

    ``on_events`` is called with what the tiers gained and lost, when it happens.
    """

    def __init__(
        self,
        machine: Machine,
        on_events: Callable[[Sequence[KeyEventRecord]], None],
    ) -> None:
        self.chunk_tokens = machine.shape.chunk_tokens
        disks: list[ModelDisk] = []

        def make_io(lock: EngineLock) -> ModelDisk:
            disks.append(ModelDisk(machine, lock))
            return disks[0]

        super().__init__(
            EngineConfig(),
            ChunkLayout(
                model="model",
                dtype="int8",
                block_tokens=machine.shape.block_tokens,
                chunk_tokens=self.chunk_tokens,
                chunk_bytes=self.chunk_tokens,
            ),
            NoBytesPool(machine.cpu_chunks, self.chunk_tokens),
            clock=asyncio.get_running_loop().time,
            make_io=make_io,
        )
        self.steps.step_tokens = machine.shape.max_batched_tokens
        self._disk = disks[0]
        self.add_event_listener(lambda: on_events(self.take_events()))

    @property
    def reads(self) -> BandwidthMeter:
        """How fast the disk was read, in tokens."""
        return self._disk.reads

    def clear_cpu(self) -> None:
        """Forget the chunks in CPU RAM, as a replica does that dies; the disk keeps its own."""
        self.clear([CPU])
