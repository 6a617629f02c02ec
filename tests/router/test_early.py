"""Prefetches before a request's tokens are known, and before it comes: real engine, real agent."""

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from router.config.settings import PrefetchConfig, RouterConfig
from router.fleet.policy import Decision, Plan, Reason
from router.latency.ttft_model import Work
from router.residency.tiers import Tier
from router.staging.agent_client import AgentClient
from router.staging.early_prefetch import EarlyPrefetch
from router.staging.prefetch import Prefetcher
from tests.cacheengine.building import Bench, FakeClock, config
from tests.cacheengine.conftest import MakeBench
from tests.router.agent_server import until
from tests.router.real_replicas import CHAIN, CHUNKS, RealFleet, real_fleet

PIN_S = 10.0


@pytest.fixture
def bench(make_bench: MakeBench, tmp_path: Path) -> Bench:
    """The chunks are on disk alone."""
    bench = make_bench(32, config(tmp_path))
    bench.store(CHUNKS)
    bench.finish_puts()
    bench.engine.clear(["cpu"])
    return bench


@pytest.fixture
async def real(bench: Bench, make_bench: MakeBench) -> AsyncIterator[RealFleet]:
    async with real_fleet([bench, make_bench(8)]) as fleet:
        yield fleet


class Driven:
    """An `EarlyPrefetch`, and the turns of a session that a proxy would tell it of."""

    def __init__(self, real: RealFleet, prefetch: PrefetchConfig) -> None:
        self.real = real
        self.clock = FakeClock()
        whole: RouterConfig = replace(real.fleet.config, prefetch=prefetch)
        prefetcher = Prefetcher(prefetch, real.fleet.replicas, partial(AgentClient, real.session))
        self.early = EarlyPrefetch(whole, real.fleet, prefetcher, self.clock)

    def turn(self, *, slot: int = 0, session: str | None = "s", answer_s: float = 1.0) -> None:
        """Let a session's turn come, go to a replica and be answered."""
        decision = Decision(
            replica_id=("one", "two")[slot],
            url="",
            reason=Reason.SESSION_HOME,
            prompt_tokens=5000,
            matched_tokens={},
            predicted_ttft_s=1.0,
            plan=Plan(slot=slot, work=Work(new_tokens=1), chain=CHAIN, session=session),
        )
        with self.early.turn(session):
            ticket = self.real.fleet.start(decision, self.clock())
            self.early.chosen(decision)
            self.clock.advance(answer_s)
            ticket.finish(self.clock(), ok=False)

    def counted(self) -> dict[str, int]:
        return {f"{when} {use}": count for (when, use), count in self.early.counts().items()}


@pytest.fixture
async def driven(real: RealFleet) -> AsyncIterator[Driven]:
    made = Driven(real, PrefetchConfig(pin_s=PIN_S))
    yield made
    await made.early.stop()


def ready(bench: Bench) -> int:
    return bench.engine.held_in(CHUNKS, "cpu")


async def test_the_second_turn_starts_its_prefetch_when_it_comes(
    driven: Driven, bench: Bench
) -> None:
    driven.turn()
    assert bench.engine.stats().prefetches == 0, "nothing is known of the first"
    with driven.early.turn("s"):
        await until(lambda: ready(bench) == 20)
    assert bench.engine.stats().prefetches == 1


async def test_it_is_counted_whether_the_request_goes_there(driven: Driven) -> None:
    driven.turn()
    driven.turn()
    assert driven.counted() == {
        "early used": 1,
        "early unused": 0,
        "ahead used": 0,
        "ahead unused": 0,
    }
    driven.turn(slot=1)
    assert driven.counted()["early unused"] == 1


async def test_a_request_that_went_nowhere_leaves_an_unused_one(driven: Driven) -> None:
    driven.turn()
    with driven.early.turn("s"):
        pass
    assert driven.counted()["early unused"] == 0
    driven.clock.advance(PIN_S + 0.1)
    assert driven.counted()["early unused"] == 1


async def test_only_what_lies_on_disk_at_home_is_asked_for(
    driven: Driven, real: RealFleet, bench: Bench
) -> None:
    fleet = real.fleet
    driven.turn()
    with driven.early.turn("other"), driven.early.turn(None):
        pass
    fleet.drain("one")
    with driven.early.turn("s"):
        pass
    fleet.resume("one")
    fleet.up("one")
    bench.promote(CHUNKS[:8], pin_s=0)
    await real.learn()
    asked = bench.engine.stats().prefetches
    with driven.early.turn("s"):
        await until(lambda: ready(bench) == 20)
    assert bench.engine.stats().prefetches == asked + 1
    await real.learn()
    assert fleet.index.held(0)[Tier.CPU] == 20
    driven.clock.advance(PIN_S + 0.1)
    with driven.early.turn("s"):
        pass
    assert driven.counted() == {
        "early used": 0,
        "early unused": 1,
        "ahead used": 0,
        "ahead unused": 0,
    }


async def test_a_session_that_moved_is_not_prefetched_for_where_it_was(driven: Driven) -> None:
    driven.turn()
    driven.turn(slot=1)
    driven.turn(slot=1)
    before = driven.counted()
    driven.turn(slot=1)
    assert driven.counted() == before


async def test_a_prefetch_that_fails_harms_nobody(driven: Driven, real: RealFleet) -> None:
    driven.turn()
    real.replicas[0].agent.stop()
    driven.turn()
    assert driven.counted()["early used"] == 1


async def test_it_can_be_turned_off(real: RealFleet, bench: Bench) -> None:
    for off in (PrefetchConfig(early=False), PrefetchConfig(enabled=False, ahead=True)):
        driven = Driven(real, off)
        driven.turn()
        driven.turn()
        assert len(driven.early.chains) == 0
        await driven.early.stop()
    assert bench.engine.stats().prefetches == 0


@pytest.fixture
async def rhythmic(real: RealFleet) -> AsyncIterator[Driven]:
    """The session has come three times, a second after its last answer each time."""
    made = Driven(real, PrefetchConfig(early=False, ahead=True, pin_s=PIN_S))
    for _ in range(3):
        made.turn()
        made.clock.advance(1.0)
    yield made
    await made.early.stop()


async def test_a_regular_session_is_prefetched_for_before_it_comes(
    rhythmic: Driven, bench: Bench
) -> None:
    assert ready(bench) == 0
    rhythmic.turn()
    await until(lambda: ready(bench) == 20)
    rhythmic.clock.advance(1.0)
    rhythmic.turn()
    assert rhythmic.counted() == {
        "early used": 0,
        "early unused": 0,
        "ahead used": 1,
        "ahead unused": 0,
    }


async def test_one_that_does_not_come_is_counted(rhythmic: Driven, bench: Bench) -> None:
    rhythmic.turn()
    await until(lambda: ready(bench) == 20)
    rhythmic.clock.advance(60.0)
    assert rhythmic.counted()["ahead unused"] == 1


async def test_who_comes_early_is_not_prefetched_for_any_more(
    rhythmic: Driven, bench: Bench
) -> None:
    """Its timer is cancelled, and set anew by its answer's end."""
    rhythmic.turn()
    assert len(rhythmic.early._timers) == 1
    with rhythmic.early.turn("s"):
        assert len(rhythmic.early._timers) == 0
    assert len(rhythmic.early._timers) == 1
    await rhythmic.early.stop()
    assert len(rhythmic.early._timers) == 0
