"""The engine against a model, by Hypothesis: any order of calls and of I/O.

I/O jobs run when the machine says so, in any order, with other calls in the
middle of them; in the remote tier others put chunks, and its server drops
some, at any time. After every step the engine checks itself, and the model
checks that what can be found has exactly the bytes that were stored.

Calls about several chunks take the lock for one chunk at a time, and others come between.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cacheengine.bulk import checksum
from cacheengine.engine.engine import CacheEngine
from cacheengine.kept_pool import PoolSeals, Seal
from cacheengine.memory import Pool
from cacheengine.residency.decisions import Presence, Promotion
from cacheengine.residency.eviction_policies import POLICY_NAMES
from cacheengine.residency.pool_index import PoolEntry
from cacheengine.residency.shared_index import SharedIndex
from cacheengine.tiers.tier import Chunk, GetOutcome, PutOutcome
from tests.cacheengine.helpers import (
    CHUNK_BYTES,
    FakeClock,
    InterruptedLock,
    ManualThreads,
    config,
    key,
    layout,
    payload,
    tier_stack,
)
from tests.cacheengine.scripted_tier import Scripted, ScriptedRemote, ScriptedTier

SLOTS = 4
UNIVERSE = [key(number) for number in range(8)]
HOLDERS = st.sampled_from([None, "one", "two"])
SMALL_PORTIONS = [
    "engine.engine",
    "engine.tier_io",
    "residency.cascade",
    "residency.promotions",
    "residency.state",
]
PREFIXES = st.lists(st.sampled_from(UNIVERSE), min_size=1, max_size=3)


class _Interrupted(Scripted):
    """Calls ``meanwhile`` once in the middle of its next operation."""

    meanwhile: Callable[[], None] | None = None

    def _interrupt(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile:
            meanwhile()

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        before = [bytes(payload) for _, payload in chunks]
        self._interrupt()
        assert [bytes(payload) for _, payload in chunks] == before, "bytes changed under a put"
        return super().put_many(chunks)

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        for _, into in chunks:
            into[:] = b"\0" * len(into)
        self._interrupt()
        return super().get_many(chunks)


class InterruptedTier(_Interrupted, ScriptedTier):
    """The disk."""


class InterruptedRemote(_Interrupted, ScriptedRemote):
    """The remote."""

    def find(self, keys: Sequence[bytes]) -> list[bool] | None:
        self._interrupt()
        return super().find(keys)


class EngineMachine(RuleBasedStateMachine):
    """Rules are what vLLM's scheduler, the agent, other engines and the I/O threads may do."""

    local_cpu = True
    kept_before: Sequence[bytes] = ()

    def _make_seals(self) -> PoolSeals | None:
        return None

    @initialize(
        disk_items=st.sampled_from([0, 3, 8]),
        has_remote=st.booleans(),
        policy=st.sampled_from(POLICY_NAMES),
        batch_chunks=st.sampled_from([1, 3]),
    )
    def start(self, disk_items: int, has_remote: bool, policy: str, batch_chunks: int) -> None:
        self.patches = contextlib.ExitStack()
        for module in SMALL_PORTIONS:
            self.patches.enter_context(mock.patch(f"cacheengine.{module}.PORTION", 1))
        self.clock = FakeClock()
        self.pool = Pool.allocate(SLOTS, CHUNK_BYTES)
        self.tier = InterruptedTier(items=disk_items)
        self.remote = InterruptedRemote()
        self.tier.batch_chunks = self.remote.batch_chunks = batch_chunks
        self.threads: list[ManualThreads] = []
        self.engine = CacheEngine(
            dataclasses.replace(
                config(Path("unused"), local_cpu=self.local_cpu), cache_policy=policy
            ),
            layout(),
            self.pool,
            seals=self._make_seals(),
            clock=self.clock,
            tier=self.tier,
            remote=self.remote if has_remote else None,
            make_threads=self._make_threads,
        )
        self.lock = InterruptedLock(self.engine)
        remote = self.engine._decider.promotions._remote
        self.index = SharedIndex() if remote is None else remote
        self.reserved: dict[bytes, int] = {}
        self.cancelled: set[bytes] = set()
        self.held: Counter[bytes] = Counter()
        self.held_slots: dict[bytes, int] = {}
        self.hidden_holds: set[bytes] = set()
        self.stored = {*self.kept_before}  # by us or others, and not cleared since
        self.kept: dict[str, set[bytes]] = {"cpu": set(), "disk": set()}
        self.promotions: list[Promotion] = []
        self.events: dict[str, set[bytes]] = {"cpu": set(), "disk": set(), "remote": set()}

    def _make_threads(self, name: str, count: int) -> ManualThreads:
        self.threads.append(ManualThreads(name, count))
        return self.threads[-1]

    def _tier_of(self, chunk: bytes) -> str | None:
        return next(iter(self.engine.match([chunk])), None)

    @property
    def jobs(self) -> list[Callable[[], None]]:
        return [job for threads in self.threads for job in threads.jobs]

    @rule(chunk=st.sampled_from(UNIVERSE))
    def another_engine_puts(self, chunk: bytes) -> None:
        self.remote.chunks[chunk] = payload(chunk)
        self.stored.add(chunk)

    @rule(chunk=st.sampled_from(UNIVERSE))
    def the_server_evicts(self, chunk: bytes) -> None:
        self.remote.chunks.pop(chunk, None)

    @rule(chunk=st.sampled_from(UNIVERSE))
    def lookup(self, chunk: bytes) -> None:
        tier = self._tier_of(chunk)
        presence = self.engine.lookup(chunk)
        assert (presence is Presence.CPU) == (tier == "cpu")
        if presence in (Presence.DISK, Presence.REMOTE):
            assert presence.name.lower() == tier
        if presence is Presence.UNKNOWN:
            assert tier is None

    @rule(chunks=PREFIXES, tier=st.sampled_from(["cpu", "disk", "remote"]))
    def pin(self, chunks: list[bytes], tier: str) -> None:
        held = self.engine.held_in(chunks, tier)
        pinned = self.engine.pin(chunks, tier)
        assert pinned <= held
        if tier == "remote":
            assert pinned == 0
            return
        self.kept[tier].update(chunks[:pinned])
        most = SLOTS if tier == "cpu" else self.tier.capacity_bytes // CHUNK_BYTES
        assert len(self.kept[tier]) <= most // 2
        assert pinned == held or len(self.kept[tier]) == most // 2

    @rule(chunks=PREFIXES, tier=st.sampled_from(["cpu", "disk"]))
    def unpin(self, chunks: list[bytes], tier: str) -> None:
        asked = set(chunks[: self.engine.held_in(chunks, tier)])
        assert self.engine.unpin(chunks, tier) == len(asked & self.kept[tier])
        self.kept[tier] -= asked

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
            if self._is_hidden(chunk):
                self.cancelled.add(chunk)
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
        for chunk in chosen:
            del self.reserved[chunk]
        self.engine.complete_store(sorted(chosen), success=success)
        for chunk in chosen:
            if success and chunk not in self.cancelled:
                self.stored.add(chunk)
            self.cancelled.discard(chunk)

    @rule(chunk=st.sampled_from(UNIVERSE))
    def try_hold(self, chunk: bytes) -> None:
        slot = self.engine.try_hold(chunk)
        if slot is not None:
            self._note_hold(chunk, slot)

    @rule(chunks=PREFIXES, holder=HOLDERS)
    def hold(self, chunks: list[bytes], holder: str | None) -> None:
        is_interrupted = self.lock.meanwhile is not None
        ready = all(self._tier_of(chunk) == "cpu" for chunk in chunks)
        try:
            slots = self.engine.hold(chunks, holder=holder)
        except KeyError:
            assert not ready or is_interrupted
            return
        assert ready or is_interrupted
        for chunk, slot in zip(chunks, slots, strict=True):
            self._note_hold(chunk, slot)

    def _note_hold(self, chunk: bytes, slot: int) -> None:
        if self._is_hidden(chunk):
            self.hidden_holds.add(chunk)  # cleared in the middle of the call
        else:
            assert chunk in self.stored, "found what was never stored, or was cleared"
            assert chunk not in self.hidden_holds
        assert self.held_slots.get(chunk, slot) == slot
        self.held[chunk] += 1
        self.held_slots[chunk] = slot

    def _is_hidden(self, chunk: bytes) -> bool:
        pool = self.engine._decider.pool
        entry = pool.get(chunk)
        return entry is not None and pool.is_hidden(entry)

    @rule(
        chunks=PREFIXES,
        call=st.sampled_from(["store", "prepare", "hold", "touch", "promote", "clear", "expire"]),
        after=st.integers(1, 6),
        meanwhile=st.sampled_from(
            ["clear", "clear some", "store", "jobs", "promote", "expire", "leave"]
        ),
        others=PREFIXES,
    )
    def interrupt(
        self, chunks: list[bytes], call: str, after: int, meanwhile: str, others: list[bytes]
    ) -> None:
        calls: dict[str, Callable[[list[bytes]], None]] = {
            "store": self.store,
            "prepare": self.prepare_store,
            "hold": lambda keys: self.hold(keys, "one"),
            "touch": self.touch,
            "promote": lambda keys: self.promote(keys, 5.0, "one"),
            "clear": lambda keys: self.clear(None, keys),
            "clear some": lambda keys: self.clear(["cpu"], keys),
            "expire": lambda _: self.let_time_pass(6.0),
            "leave": lambda _: self.engine.leave(UNIVERSE, "one"),
            "jobs": lambda _: self.run_all_io(),
        }
        if call == "clear" and meanwhile == "store":
            return  # what is stored meanwhile may stay
        calls_between = {**calls, "clear": lambda _: self.clear(None)}
        self.lock.meanwhile = partial(calls_between[meanwhile], others)
        self.lock.left = after
        calls[call](chunks)
        self.lock.meanwhile = None

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

    @rule(
        chunks=PREFIXES,
        pin_s=st.sampled_from([0.0, 5.0]),
        holder=HOLDERS,
        is_demand=st.booleans(),
    )
    def promote(
        self, chunks: list[bytes], pin_s: float, holder: str | None, is_demand: bool = False
    ) -> None:
        promotion = self.engine.promote(chunks, pin_s=pin_s, holder=holder, is_demand=is_demand)
        counts = promotion.counts
        total = counts.resident + counts.promoted + counts.pending + counts.missing
        assert total == len(chunks)
        self.promotions.append(promotion)

    @rule(holder=st.sampled_from(["one", "two"]), keep_ready=st.booleans())
    def leave(self, holder: str, keep_ready: bool) -> None:
        self.engine.leave(UNIVERSE, holder, keep_ready=keep_ready)
        assert all(each.done for each in self.promotions if each.holder == holder)

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0, 100.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.engine.expire_pins()

    @rule(
        tiers=st.sampled_from([None, ["cpu"], ["disk"], ["remote"]]),
        chunks=st.one_of(st.none(), PREFIXES),
    )
    def clear(self, tiers: list[str] | None, chunks: list[bytes] | None = None) -> None:
        chosen = set(UNIVERSE if chunks is None else chunks)
        known = {chunk for chunk in UNIVERSE if self.index.is_known(chunk)}
        self.engine.clear(tiers, chunks)
        if tiers is None:
            # What the others put, and this engine knows nothing of, stays.
            self.stored -= chosen - (self.remote.chunks.keys() - known)
        for tier in tiers or ["cpu", "disk", "remote"]:
            self._cleared(tier, chosen)

    def _cleared(self, tier: str, chosen: set[bytes]) -> None:
        assert not any(self.engine.held_in([chunk], tier) for chunk in chosen)
        if tier in self.kept:
            self.kept[tier] -= chosen
        if tier == "cpu":
            self.hidden_holds.update(chosen & self.held.keys())
            self.cancelled.update(chosen & self.reserved.keys())

    @precondition(lambda self: self.jobs)
    @rule(
        data=st.data(),
        meanwhile=st.sampled_from(
            [
                *("nothing", "clear", "clear cpu", "clear disk", "clear remote"),
                *("store", "job", "evict", "leave"),
            ]
        ),
        answers=st.sampled_from([True, True, True, False]),
        put=st.sampled_from([PutOutcome.STORED] * 4 + [PutOutcome.NO_SPACE, PutOutcome.FAILED]),
        get=st.sampled_from([GetOutcome.OK] * 4 + [GetOutcome.DAMAGED, GetOutcome.FAILED]),
    )
    def run_io(
        self,
        data: st.DataObject,
        meanwhile: str,
        answers: bool,
        put: PutOutcome,
        get: GetOutcome,
    ) -> None:
        job = data.draw(st.sampled_from(self.jobs))
        self.tier.put_outcome = self.remote.put_outcome = put
        self.tier.get_outcome = self.remote.get_outcome = get
        self.remote.answers = answers
        actions: dict[str, Callable[[], None]] = {
            "nothing": lambda: None,
            "clear": lambda: self.clear(None),
            "clear cpu": lambda: self.clear(["cpu"]),
            "clear disk": lambda: self.clear(["disk"]),
            "clear remote": lambda: self.clear(["remote"]),
            "evict": self.remote.chunks.clear,
            "store": lambda: self.store(UNIVERSE[:3]),
            "job": self._run_first_job,
            "leave": lambda: self.leave("one", keep_ready=False),
        }
        self.tier.meanwhile = self.remote.meanwhile = actions[meanwhile]
        self._run(job)
        self.tier.meanwhile = self.remote.meanwhile = None
        if get is GetOutcome.DAMAGED:
            # No pin keeps what is damaged.
            self.kept["disk"] = {
                chunk for chunk in self.kept["disk"] if self.engine.held_in([chunk], "disk")
            }

    @precondition(lambda self: self.jobs)
    @rule()
    def run_all_io(self) -> None:
        self.tier.put_outcome = self.remote.put_outcome = PutOutcome.STORED
        self.tier.get_outcome = self.remote.get_outcome = GetOutcome.OK
        self.remote.answers = True
        while self.jobs:
            self._run(self.jobs[0])

    def _run_first_job(self) -> None:
        if self.jobs:
            self._run(self.jobs[0])

    def _run(self, job: Callable[[], None]) -> None:
        for threads in self.threads:
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
            tier = self._tier_of(chunk)
            if tier == "cpu":
                assert chunk in self.stored
                slot = self.engine.try_hold(chunk)
                assert slot is not None
                assert bytes(self.pool.view(slot)) == payload(chunk)
                if self.local_cpu:
                    self.engine.release([chunk])
                else:
                    self._note_hold(chunk, slot)
            elif tier == "disk":
                assert chunk in self.stored
                assert self.tier.chunks[chunk] == payload(chunk)
            elif tier == "remote":
                assert chunk in self.stored

    @invariant()
    def held_bytes_never_change(self) -> None:
        for chunk, slot in self.held_slots.items():
            assert bytes(self.pool.view(slot)) == payload(chunk)
            if chunk not in self.hidden_holds:
                assert self._tier_of(chunk) == "cpu"

    @invariant()
    def what_is_pinned_stays(self) -> None:
        for tier, chunks in self.kept.items():
            assert all(self.engine.held_in([chunk], tier) for chunk in chunks)

    @invariant()
    def events_tell_what_is_found(self) -> None:
        for event in self.engine.take_events():
            chunks = self.events[event.tier]
            for chunk in event.keys:
                assert (chunk in chunks) != event.stored
                (chunks.add if event.stored else chunks.remove)(chunk)
        assert self.events["cpu"] == set(self.engine._decider.pool.ready_keys())
        assert self.events["disk"] == set(tier_stack(self.engine).indexes[0].keys())
        assert self.events["remote"] == set(self.index.keys())

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.tier.meanwhile = self.remote.meanwhile = None
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
        assert tier_stack(self.engine).indexes[0].used_bytes == 0
        assert not any(self.index.is_known(chunk) for chunk in UNIVERSE)
        assert self.tier.chunks == {}
        self.engine.close()
        self.patches.close()

    def _settled_promotions(self) -> list[Promotion]:
        """Promotions that do not wait for a store still under way."""
        return [] if self.reserved else self.promotions


class StagingMachine(EngineMachine):
    """The same with ``local_cpu: false``."""

    local_cpu = False


class KeptMachine(EngineMachine):
    """The same with a pool that is kept, and chunks of an earlier run.

    The process may be killed after any step: all seals must be right at all times.
    """

    kept_before = UNIVERSE[:2]

    def _make_seals(self) -> PoolSeals:
        index = memoryview(bytearray(PoolSeals.size_bytes(SLOTS)))
        earlier = PoolSeals(index, "identity", SLOTS)
        for slot, chunk in enumerate(self.kept_before):
            self.pool.view(slot)[:] = payload(chunk)
            earlier.write(Seal(slot, chunk, checksum(self.pool.view(slot))))
        self.unchecked = {*self.kept_before}
        self.read: list[tuple[PoolEntry, bytes]] = []
        self.seals = PoolSeals(index, "identity", SLOTS)
        return self.seals

    @precondition(lambda self: self.unchecked)
    @rule(number=st.integers(0, SLOTS), are_intact=st.booleans())
    def check_a_kept_chunk(self, number: int, are_intact: bool) -> None:
        chunk = sorted(self.unchecked)[number % len(self.unchecked)]
        self.unchecked.remove(chunk)
        with self.engine._lock as decider:
            decider.end_check([chunk], self.clock(), are_intact=are_intact)

    @rule()
    def read_an_unsealed_chunk(self) -> None:
        with self.engine._lock as decider:
            entries = decider.pool.take_unsealed(1)
        self.read += [(each, checksum(self.pool.view(each.slot))) for each in entries]

    @rule()
    def seal_what_was_read(self) -> None:
        with self.engine._lock as decider:
            for entry, digest in self.read:
                decider.pool.seal(entry, digest)
        self.read = []

    @invariant()
    def seals_are_right(self) -> None:
        for slot, chunk, digest in self.seals.read():
            assert bytes(self.pool.view(slot)) == payload(chunk)
            assert checksum(self.pool.view(slot)) == digest

    def teardown(self) -> None:
        if hasattr(self, "unchecked"):
            with self.engine._lock as decider:
                decider.end_check([*self.unchecked], self.clock(), are_intact=True)
            super().teardown()


_SETTINGS = settings(
    max_examples=100,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

TestEngine = EngineMachine.TestCase
TestEngine.settings = _SETTINGS
TestStaging = StagingMachine.TestCase
TestStaging.settings = _SETTINGS
TestKept = KeptMachine.TestCase
TestKept.settings = _SETTINGS
