"""Requests wait for the tiers of a real engine only while that is faster than computing."""

from collections.abc import Callable, Sequence

import pytest

from cacheengine.engine.engine import CacheEngine
from cacheengine.engine.promotion_waits import PromotionWaits
from cacheengine.memory import Pool
from cacheengine.residency.decisions import Presence
from cacheengine.tiers.tier import Chunk, GetOutcome
from tests.cacheengine.helpers import (
    CHUNK_BYTES,
    FakeClock,
    ManualThreads,
    config,
    key,
    keys,
    layout,
    payload,
    tier_stack,
)
from tests.cacheengine.scripted_tier import ScriptedTier

A_STEP_S = 0.05
"""A request that does not wait is looked up again one step later."""


class TimedTier(ScriptedTier):
    """A disk that needs ``chunk_s`` for each chunk."""

    def __init__(self, clock: FakeClock, chunk_s: float, held: Sequence[bytes]) -> None:
        super().__init__(held=held, items=1000)
        self.chunks = {chunk: payload(chunk) for chunk in held}
        self.clock = clock
        self.chunk_s = chunk_s
        self.order: list[bytes] = []

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        self.clock.advance(self.chunk_s * len(chunks))
        self.order += [chunk for chunk, _ in chunks]
        return super().get_many(chunks)


class Replica:
    """An engine whose reads run when told, and what a scheduler does with a request."""

    def __init__(self, *, slots: int, chunk_s: float, held: Sequence[bytes]) -> None:
        self.clock = FakeClock()
        self.tier = TimedTier(self.clock, chunk_s, held)
        self.readers = ManualThreads("", 1)

        def make_threads(name: str, count: int) -> ManualThreads:
            threads = ManualThreads(name, count)
            if name.startswith("kv-get"):
                self.readers = threads
            return threads

        self.engine = CacheEngine(
            config(),
            layout(),
            Pool.allocate(slots, CHUNK_BYTES),
            clock=self.clock,
            tier=self.tier,
            make_threads=make_threads,
        )
        self.waits = PromotionWaits(self.engine, self.clock)

    def step(
        self, req_id: str, chunks: Sequence[bytes], chunk_s: float, others: int = 0
    ) -> int | None:
        """Return how many leading chunks are loaded; None while the request waits."""
        compute_s = len(chunks) * chunk_s
        try:
            if self.waits.must_wait(req_id, 0, compute_s, chunk_s, others=others):
                return None
            hits, is_deferred = 0, False
            for position, chunk in enumerate(chunks):
                match self.engine.lookup(chunk):
                    case Presence.CPU:
                        self.waits.found(req_id, chunk)
                        hits += 1
                        continue
                    case Presence.DISK:
                        waits = self.waits.want(req_id, chunk, "disk", position)
                    case Presence.PENDING:
                        waits = self.waits.want(req_id, chunk, None, position)
                    case _:
                        waits = False
                if not waits:
                    break
                is_deferred = True
            return None if is_deferred else hits
        finally:
            self.waits.end_step()

    def read(self) -> bool:
        """Run one job of the readers."""
        if not self.readers.jobs:
            return False
        self.readers.jobs.pop(0)()
        self.engine.check()
        return True

    def serve(
        self,
        req_id: str,
        chunks: Sequence[bytes],
        chunk_s: float,
        *,
        hangs: bool = False,
        others: int = 0,
    ) -> tuple[float, int]:
        """Return how long a request waits, and how many of its chunks are loaded then."""
        began_s = self.clock()
        while True:
            loaded = self.step(req_id, chunks, chunk_s, others)
            if loaded is not None:
                return self.clock() - began_s, loaded
            if hangs or not self.read():
                self.clock.advance(0.01)

    def measure(self, *numbers: int) -> None:
        """Read chunks, so that the tier's speed is known."""
        promotion = self.engine.promote(keys(*numbers), pin_s=0.0)
        while not promotion.done:
            assert self.read()


MakeReplica = Callable[..., Replica]


@pytest.fixture
def make_replica() -> MakeReplica:
    return Replica


def test_a_prompt_that_computes_faster_than_it_loads_is_computed(make_replica: MakeReplica) -> None:
    """300 chunks of 0.3 s; computing them takes 4 s. It waited for a minute."""
    prompt = keys(*range(100, 400))
    replica = make_replica(slots=400, chunk_s=0.3, held=[*keys(*range(8)), *prompt])
    replica.measure(*range(8))
    waited_s, loaded = replica.serve("a", prompt, 4.0 / 300)
    assert waited_s <= A_STEP_S and loaded == 0
    assert replica.engine.stats().disk.gets == 8, "read for nobody"


def test_a_prompt_that_loads_faster_is_loaded(make_replica: MakeReplica) -> None:
    prompt = keys(*range(100, 200))
    replica = make_replica(slots=400, chunk_s=0.01, held=[*keys(*range(8)), *prompt])
    replica.measure(*range(8))
    waited_s, loaded = replica.serve("a", prompt, 0.02)
    assert loaded == 100 and waited_s == pytest.approx(1.0, abs=0.05)


def test_what_is_queued_before_it_counts(make_replica: MakeReplica) -> None:
    """Alone its chunks would pay; behind another prompt's they do not."""
    long, short = keys(*range(100, 200)), keys(*range(200, 210))
    replica = make_replica(slots=400, chunk_s=0.01, held=[*keys(*range(8)), *long, *short])
    replica.measure(*range(8))
    assert replica.step("long", long, 1.0) is None
    waited_s, loaded = replica.serve("short", short, 0.02)
    assert waited_s <= A_STEP_S and loaded == 0
    assert replica.serve("long", long, 1.0)[1] == 100
    assert replica.serve("again", short, 0.02)[1] == 10


def test_computing_that_delays_others_is_left_for_longer_waits(make_replica: MakeReplica) -> None:
    """Computing takes 4 s, and would delay 24 others by as much. Loading takes 30 s of one."""
    prompt = keys(*range(100, 400))
    replica = make_replica(slots=400, chunk_s=0.1, held=[*keys(*range(8)), *prompt])
    replica.measure(*range(8))
    waited_s, loaded = replica.serve("a", prompt, 4.0 / 300, others=1)
    assert waited_s <= A_STEP_S and loaded == 0
    waited_s, loaded = replica.serve("b", prompt, 4.0 / 300, others=24)
    assert loaded == 300 and waited_s == pytest.approx(30.0, abs=2.0)


def test_the_prefix_that_pays_is_loaded_and_the_rest_computed(make_replica: MakeReplica) -> None:
    """Its beginning is the next to be read, for another prompt; the rest comes after all of that.

    The prefix of 10 comes after 0.1 s and takes 0.2 s to compute, all 60 after 1.5 s and 1.2 s.
    """
    other, rest = keys(*range(100, 200)), keys(*range(200, 250))
    replica = make_replica(slots=400, chunk_s=0.01, held=[*keys(*range(8)), *other, *rest])
    replica.measure(*range(8))
    assert replica.step("other", other, 1.0) is None
    waited_s, loaded = replica.serve("a", [*other[:10], *rest], 0.02)
    assert loaded == 10 and waited_s <= 0.2
    assert replica.serve("other", other, 1.0)[1] == 100
    assert replica.engine.stats().disk.gets == 8 + 100


def test_a_tier_that_becomes_slow_is_left_with_the_prefix_that_came(
    make_replica: MakeReplica,
) -> None:
    prompt = keys(*range(100, 200))
    replica = make_replica(slots=400, chunk_s=0.01, held=[*keys(*range(8)), *prompt])
    replica.measure(*range(8))
    for _ in range(50):
        assert replica.step("a", prompt, 0.02) is None
        assert replica.read()
    replica.tier.chunk_s = 0.5
    waited_s, loaded = replica.serve("a", prompt, 0.02)
    assert 50 <= loaded < 60 and waited_s <= 2.0 + 0.3


@pytest.mark.parametrize("rate_is_known", [True, False])
def test_a_hung_disk_costs_no_more_than_computing(
    make_replica: MakeReplica, rate_is_known: bool
) -> None:
    held = keys(*range(300))
    replica = make_replica(slots=100, chunk_s=0.01, held=held)
    if rate_is_known:
        replica.measure(*range(200, 208))
    for number in range(5):
        prompt = held[20 * number : 20 * number + 20]
        waited_s, loaded = replica.serve(str(number), prompt, 0.1, hangs=True)
        assert loaded == 0 and waited_s <= 2.0 + 0.3
        replica.waits.end(str(number))
        assert replica.engine.stats().cpu_used_bytes <= 8 * CHUNK_BYTES, "slots for nobody"


def test_no_room_is_not_waited_for_beyond_computing(make_replica: MakeReplica) -> None:
    """Three quarters of the pool are pinned for a prefetch; a quarter of it is free."""
    replica = make_replica(slots=100, chunk_s=0.0001, held=keys(*range(100)))
    promotion = replica.engine.promote(keys(*range(75)), pin_s=20.0)
    while not promotion.done:
        replica.read()
    waited_s, loaded = replica.serve("a", keys(90), 0.02)
    assert waited_s <= 0.02 and loaded == 0
    # A pin that ends earlier than computing is waited for.
    replica.clock.advance(18.0)
    waited_s, loaded = replica.serve("b", keys(91), 5.0)
    assert 1.5 < waited_s < 2.5 and loaded == 1


def test_room_that_a_request_holds_is_waited_for_until_computing(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(slots=4, chunk_s=0.0001, held=keys(*range(8)))
    assert replica.serve("a", keys(0, 1, 2), 1.0)[1] == 3
    waited_s, loaded = replica.serve("b", keys(4), 1.0)
    assert loaded == 0 and 1.0 <= waited_s <= 1.3
    # Two of them, so that one queues behind the other.
    assert replica.step("c", keys(5), 10.0) is None
    waited_s, loaded = replica.serve("d", keys(6), 1.0)
    assert loaded == 0 and 1.0 <= waited_s <= 1.3
    assert replica.step("c", keys(5), 10.0) is None
    replica.waits.end("a")
    assert replica.serve("c", keys(5), 10.0)[1] == 1


def test_a_slow_measurement_is_not_for_ever(make_replica: MakeReplica) -> None:
    """A few chunks are read for nobody, so that a disk that recovers is used again."""
    prompt = keys(*range(100, 140))
    replica = make_replica(slots=200, chunk_s=1.0, held=[*keys(*range(8)), *prompt])
    replica.measure(*range(8))
    replica.tier.chunk_s = 0.001
    assert replica.serve("a", prompt, 0.02)[1] == 0
    assert replica.engine.stats().disk.gets == 8
    for number in range(40):
        replica.clock.advance(11.0)
        waited_s, loaded = replica.serve(f"b{number}", prompt, 0.02)
        while replica.read():
            pass
        if loaded == len(prompt):
            break
        assert waited_s <= A_STEP_S
        replica.engine.clear(["cpu"])
    assert loaded == len(prompt)


# --- classes of reads, and reads that nobody waits for any more ---


def test_a_request_does_not_wait_for_an_aborted_one(make_replica: MakeReplica) -> None:
    aborted = keys(*range(200))
    replica = make_replica(slots=400, chunk_s=0.01, held=[*aborted, key(900)])
    assert replica.step("a", aborted, 1.0) is None
    assert replica.read()
    replica.waits.end("a")
    waited_s, loaded = replica.serve("b", keys(900), 1.0)
    assert loaded == 1 and waited_s <= 0.05
    assert replica.engine.stats().disk.gets <= 12
    used = replica.engine.stats().cpu_used_bytes // CHUNK_BYTES
    assert used == replica.engine.stats().disk.gets, "slots of reads that never begin"


def test_a_read_that_another_waits_for_too_is_not_given_up(make_replica: MakeReplica) -> None:
    replica = make_replica(slots=400, chunk_s=0.01, held=keys(*range(20)))
    assert replica.step("a", keys(*range(20)), 1.0) is None
    assert replica.step("b", keys(*range(10)), 1.0) is None
    replica.waits.end("a")
    assert replica.serve("b", keys(*range(10)), 1.0)[1] == 10
    assert replica.engine.stats().disk.gets == 10


def test_a_request_is_read_for_before_a_prefetch(make_replica: MakeReplica) -> None:
    prefetched = keys(*range(200))
    replica = make_replica(slots=400, chunk_s=0.01, held=[*prefetched, *keys(900, 901)])
    promotion = replica.engine.promote(prefetched, pin_s=10.0)
    waited_s, loaded = replica.serve("b", keys(900, 901), 1.0)
    assert loaded == 2 and waited_s <= 0.1
    # Once a request waits for a part of the prefetch, that part is next.
    assert replica.serve("c", keys(*range(190, 200)), 1.0)[1] == 10
    assert not promotion.done
    while not promotion.done:
        assert replica.read()
    assert promotion.counts.promoted == 200


def test_the_time_of_a_given_up_read_has_no_new_owner_of_its_slot(
    make_replica: MakeReplica,
) -> None:
    """A read under way when its request is aborted keeps its slot until it ends."""
    replica = make_replica(slots=1, chunk_s=0.01, held=keys(1))
    seen: list[object] = []

    def abort_and_store() -> None:
        replica.waits.end("a")
        seen.append(replica.engine.prepare_store(keys(2)))

    original = replica.tier.get_many

    def get_many(chunks: Sequence[Chunk]) -> list[GetOutcome]:
        abort_and_store()
        return original(chunks)

    replica.tier.get_many = get_many  # type: ignore[method-assign]
    assert replica.step("a", keys(1), 1.0) is None
    assert replica.read()
    assert seen == [None], "the slot is being written to"
    assert replica.engine.lookup(key(1)) is Presence.CPU
    assert replica.engine.prepare_store(keys(2)) is not None, "nobody's pin keeps it"


def test_the_measured_speed_is_that_of_the_queue(make_replica: MakeReplica) -> None:
    replica = make_replica(slots=100, chunk_s=0.01, held=keys(*range(20)))
    replica.measure(*range(20))
    info = tier_stack(replica.engine).info()["disk"]
    assert info.read_bytes == 20 * CHUNK_BYTES
    assert info.read_bytes_per_s == pytest.approx(CHUNK_BYTES / 0.01)
