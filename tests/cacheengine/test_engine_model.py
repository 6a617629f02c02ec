"""The engine against a model, by Hypothesis: any order of calls and of I/O.

I/O jobs run when the machine says so, in any order, with other calls in the
middle of them. After every step the engine checks itself, and the model
checks that what can be found has exactly the bytes that were stored.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cacheengine.engine import CacheEngine, Presence, Promotion
from cacheengine.pool import Pool
from cacheengine.tiers.base import GetOutcome, PutOutcome
from tests.cacheengine.building import CHUNK_BYTES, FakeClock, config, key, layout, payload
from tests.cacheengine.scripted_tier import ScriptedTier

SLOTS = 4
UNIVERSE = [key(number) for number in range(8)]
PREFIXES = st.lists(st.sampled_from(UNIVERSE), min_size=1, max_size=3)


class ManualThreads:
    """Stands where `IoThreads` does; jobs run when told."""

    def __init__(self, name: str, count: int) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.stopped = False

    def submit(self, job: Callable[[], None]) -> bool:
        if not self.stopped:
            self.jobs.append(job)
        return not self.stopped

    def stop(self) -> None:
        self.stopped = True

    def join(self, timeout_s: float) -> bool:
        while self.jobs:
            self.jobs.pop(0)()
        return True


class InterruptedTier(ScriptedTier):
    """Calls ``meanwhile`` once in the middle of its next operation."""

    meanwhile: Callable[[], None] | None = None

    def _interrupt(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile:
            meanwhile()

    def put(self, key: bytes, payload: memoryview) -> PutOutcome:
        before = bytes(payload)
        self._interrupt()
        assert bytes(payload) == before, "bytes changed under a put"
        return super().put(key, payload)

    def get(self, key: bytes, into: memoryview) -> GetOutcome:
        into[:] = b"\0" * len(into)
        self._interrupt()
        return super().get(key, into)


class EngineMachine(RuleBasedStateMachine):
    """Rules are what vLLM's scheduler, the agent and the I/O threads may do."""

    local_cpu = True

    @initialize(disk_items=st.sampled_from([0, 3, 8]))
    def start(self, disk_items: int) -> None:
        self.clock = FakeClock()
        self.pool = Pool.allocate(SLOTS, CHUNK_BYTES)
        self.tier = InterruptedTier(items=disk_items)
        self.readers, self.writers = ManualThreads("", 1), ManualThreads("", 1)
        threads = iter([self.readers, self.writers])
        self.engine = CacheEngine(
            config(Path("unused"), local_cpu=self.local_cpu),
            layout(),
            self.pool,
            clock=self.clock,
            tier=self.tier,
            make_threads=lambda name, count: next(threads),
        )
        self.reserved: dict[bytes, int] = {}
        self.cancelled: set[bytes] = set()
        self.held: Counter[bytes] = Counter()
        self.held_slots: dict[bytes, int] = {}
        self.hidden_holds: set[bytes] = set()
        self.stored: set[bytes] = set()
        self.promotions: list[Promotion] = []
        self.events: dict[str, set[bytes]] = {"cpu": set(), "disk": set()}

    @property
    def jobs(self) -> list[Callable[[], None]]:
        return self.readers.jobs + self.writers.jobs

    @rule(chunks=PREFIXES)
    def prepare_store(self, chunks: list[bytes]) -> None:
        reservation = self.engine.prepare_store(chunks)
        if reservation is None:
            return
        assert not set(reservation.evicted) & set(chunks)
        for chunk, slot in zip(reservation.keys, reservation.slots, strict=True):
            assert slot not in self.held_slots.values(), "a slot in use was given away"
            assert slot not in self.reserved.values()
            assert chunk not in self.held
            self.reserved[chunk] = slot
            self.pool.view(slot)[:] = payload(chunk)

    @rule(chunks=PREFIXES)
    def store(self, chunks: list[bytes]) -> None:
        before = set(self.reserved)
        self.prepare_store(chunks)
        self._complete(set(self.reserved) - before, success=True)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), success=st.booleans())
    def complete_store(self, data: st.DataObject, success: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.reserved)), min_size=1))
        self._complete(set(chosen), success=success)

    def _complete(self, chosen: set[bytes], *, success: bool) -> None:
        self.engine.complete_store(sorted(chosen), success=success)
        for chunk in chosen:
            del self.reserved[chunk]
            if success and chunk not in self.cancelled:
                self.stored.add(chunk)
            self.cancelled.discard(chunk)

    @rule(chunk=st.sampled_from(UNIVERSE))
    def try_hold(self, chunk: bytes) -> None:
        slot = self.engine.try_hold(chunk)
        if slot is not None:
            self._note_hold(chunk, slot)

    @rule(chunks=PREFIXES)
    def hold(self, chunks: list[bytes]) -> None:
        ready = all(self.engine.lookup(chunk) is Presence.CPU for chunk in chunks)
        try:
            slots = self.engine.hold(chunks)
        except KeyError:
            assert not ready
            return
        assert ready
        for chunk, slot in zip(chunks, slots, strict=True):
            self._note_hold(chunk, slot)

    def _note_hold(self, chunk: bytes, slot: int) -> None:
        assert chunk in self.stored, "found what was never stored, or was cleared"
        assert chunk not in self.hidden_holds
        assert self.held_slots.get(chunk, slot) == slot
        self.held[chunk] += 1
        self.held_slots[chunk] = slot

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.held)))
        self.engine.release([chunk])
        self.held[chunk] -= 1
        if not self.held[chunk]:
            del self.held[chunk], self.held_slots[chunk]
            self.hidden_holds.discard(chunk)

    @rule(chunks=PREFIXES)
    def touch(self, chunks: list[bytes]) -> None:
        self.engine.touch(chunks)

    @rule(chunks=PREFIXES, pin_s=st.sampled_from([0.0, 5.0]))
    def promote(self, chunks: list[bytes], pin_s: float) -> None:
        promotion = self.engine.promote(chunks, pin_s=pin_s)
        counts = promotion.counts
        total = counts.resident + counts.promoted + counts.pending + counts.missing
        assert total == len(chunks)
        self.promotions.append(promotion)

    @rule(seconds=st.sampled_from([0.5, 6.0, 100.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.engine.expire_pins()

    @rule(tiers=st.sampled_from([None, ["cpu"], ["disk"]]))
    def clear(self, tiers: list[str] | None) -> None:
        self.engine.clear(tiers)
        if tiers is None:
            self.stored.clear()
        if tiers != ["disk"]:
            self.hidden_holds.update(self.held)
            self.cancelled.update(self.reserved)
            assert not any(self.engine.match([chunk]) == ["cpu"] for chunk in UNIVERSE)
        if tiers != ["cpu"]:
            assert not any(self.engine.match([chunk]) == ["disk"] for chunk in UNIVERSE)

    @precondition(lambda self: self.jobs)
    @rule(
        data=st.data(),
        meanwhile=st.sampled_from(["nothing", "clear", "clear cpu", "clear disk", "store", "job"]),
        put=st.sampled_from([PutOutcome.STORED] * 4 + [PutOutcome.NO_SPACE, PutOutcome.FAILED]),
        get=st.sampled_from([GetOutcome.OK] * 4 + [GetOutcome.DAMAGED, GetOutcome.FAILED]),
    )
    def run_io(self, data: st.DataObject, meanwhile: str, put: PutOutcome, get: GetOutcome) -> None:
        job = data.draw(st.sampled_from(self.jobs))
        self.tier.put_outcome = put
        self.tier.get_outcome = get
        actions: dict[str, Callable[[], None]] = {
            "nothing": lambda: None,
            "clear": lambda: self.clear(None),
            "clear cpu": lambda: self.clear(["cpu"]),
            "clear disk": lambda: self.clear(["disk"]),
            "store": lambda: self.store(UNIVERSE[:3]),
            "job": self._run_first_job,
        }
        self.tier.meanwhile = actions[meanwhile]
        self._run(job)
        self.tier.meanwhile = None

    @precondition(lambda self: self.jobs)
    @rule()
    def run_all_io(self) -> None:
        self.tier.put_outcome = PutOutcome.STORED
        self.tier.get_outcome = GetOutcome.OK
        while self.jobs:
            self._run(self.jobs[0])

    def _run_first_job(self) -> None:
        if self.jobs:
            self._run(self.jobs[0])

    def _run(self, job: Callable[[], None]) -> None:
        for threads in (self.readers, self.writers):
            if job in threads.jobs:
                threads.jobs.remove(job)
                job()
                return

    @invariant()
    def engine_is_consistent(self) -> None:
        self.engine.check()
        assert len(self.tier.chunks) <= self.tier.capacity_bytes // CHUNK_BYTES

    @invariant()
    def what_is_found_is_what_was_stored(self) -> None:
        for chunk in UNIVERSE:
            presence = self.engine.lookup(chunk)
            if presence is Presence.CPU:
                assert chunk in self.stored
                slot = self.engine.try_hold(chunk)
                assert slot is not None
                assert bytes(self.pool.view(slot)) == payload(chunk)
                if self.local_cpu:
                    self.engine.release([chunk])
                else:
                    self._note_hold(chunk, slot)
            elif presence is Presence.DISK:
                assert chunk in self.stored
                assert self.tier.chunks[chunk] == payload(chunk)

    @invariant()
    def held_bytes_never_change(self) -> None:
        for chunk, slot in self.held_slots.items():
            assert bytes(self.pool.view(slot)) == payload(chunk)
            if chunk not in self.hidden_holds:
                assert self.engine.lookup(chunk) is Presence.CPU

    @invariant()
    def events_tell_what_is_found(self) -> None:
        for event in self.engine.take_events():
            chunks = self.events[event.tier]
            for chunk in event.keys:
                assert (chunk in chunks) != event.stored
                (chunks.add if event.stored else chunks.remove)(chunk)
        assert self.events["cpu"] == set(self.engine._state.cpu.ready_keys())
        assert self.events["disk"] == set(self.engine._state.tier.keys())

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.tier.meanwhile = None
        while self.jobs:
            self._run(self.jobs[0])
        assert all(promotion.done for promotion in self._settled_promotions())
        for chunk, count in self.held.items():
            self.engine.release([chunk] * count)
        if self.reserved:
            self.engine.complete_store(list(self.reserved), success=False)
        self.engine.clear()
        while self.jobs:
            self._run(self.jobs[0])
        self.engine.check()
        assert self.engine.stats().cpu_used_bytes == 0
        assert self.engine._state.tier.used_bytes == 0
        assert self.tier.chunks == {}
        self.engine.close()

    def _settled_promotions(self) -> list[Promotion]:
        """Those that do not wait for a store still under way."""
        return [] if self.reserved else self.promotions


class StagingMachine(EngineMachine):
    """The same with ``local_cpu: false``."""

    local_cpu = False


_SETTINGS = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

TestEngine = EngineMachine.TestCase
TestEngine.settings = _SETTINGS
TestStaging = StagingMachine.TestCase
TestStaging.settings = _SETTINGS
