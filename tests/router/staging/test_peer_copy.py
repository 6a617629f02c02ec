"""Copies of KV before the forward, between two real replicas: real engines, agents, sockets."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from cacheengine.transfer import fetch as fetching
from cacheengine.transfer import protocol
from cacheengine.transfer.protocol import Channel, ChunkDigests
from router.agent_client import AgentClient
from router.config.settings import PrefetchConfig
from router.fleet.cost_model import CostPart
from router.fleet.decision import Decision, KvCopy, Reason
from router.staging import stager as peer_copy
from router.staging.stager import (
    AgentBackoff,
    CopyOutcome,
    PeerCopier,
    Stager,
    StagingResult,
    StagingTiming,
)
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import CHUNK_BYTES, config
from tests.router.agent_server import until
from tests.router.fleet.helpers import candidate
from tests.router.fleet.helpers import decision as made_decision
from tests.router.real_replicas import CHUNKS, RealFleet, real_fleet


@dataclass
class Told:
    """What a fleet hears of copies."""

    observed: list[tuple[str, int, float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@pytest.fixture
def told(real: RealFleet, monkeypatch: pytest.MonkeyPatch) -> Told:
    heard = Told()
    monkeypatch.setattr(real.fleet, "observed_copy", lambda *args: heard.observed.append(args))
    monkeypatch.setattr(real.fleet, "copy_failed", lambda name, _: heard.failed.append(name))
    return heard


@pytest.fixture
async def real(make_bench: MakeBench, tmp_path: Path) -> AsyncIterator[RealFleet]:
    """One holds all chunks, two none."""
    first = make_bench(32, config(tmp_path / "one"))
    first.store(CHUNKS)
    first.finish_puts()
    async with real_fleet([first, make_bench(32, config(tmp_path / "two"))]) as fleet:
        yield fleet


@pytest.fixture
async def copier(real: RealFleet) -> AsyncIterator[PeerCopier]:
    agents, backoff = partial(AgentClient, real.session), AgentBackoff(time.monotonic)
    made = PeerCopier(PrefetchConfig(wait_cap_s=20.0), real.fleet, agents, backoff)
    yield made
    await made.stop()


def decision(
    keys: Sequence[bytes] = CHUNKS, gain_s: float = 20.0, replica_id: str = "two"
) -> Decision:
    """Go to two, and have it copy chunks from one."""
    copy = KvCopy(
        source_id="one",
        keys=tuple(keys),
        nbytes=len(keys) * CHUNK_BYTES,
        expected_gain_s=gain_s,
    )
    return made_decision(candidate(replica_id), Reason.SESSION_SPILL, copy=copy)


def without_copy(chain: Sequence[bytes], replica_id: str = "two") -> Decision:
    """Go to a replica with a prompt of these blocks."""
    return made_decision(candidate(replica_id, chain=tuple(chain)))


async def run(copier: PeerCopier, wanted: Decision) -> CopyOutcome:
    outcome = await copier.run(wanted)
    assert outcome is not None
    return outcome


def ready(real: RealFleet, replica: int) -> int:
    return real.replicas[replica].bench.engine.held_in(CHUNKS, "cpu")


async def test_the_chunks_are_there_when_the_wait_ends(
    real: RealFleet, copier: PeerCopier, told: Told
) -> None:
    outcome = await run(copier, decision())
    assert (outcome.asked, outcome.arrived, outcome.timing) == (20, 20, StagingTiming.IN_TIME)
    assert outcome.moved_bytes == 20 * CHUNK_BYTES
    assert str(outcome) == "from=one;asked=20;arrived=20;in-time"
    assert real.replicas[1].bench.has_right_bytes(CHUNKS)
    ((replica, nbytes, seconds),) = told.observed
    assert (replica, nbytes) == ("two", 20 * CHUNK_BYTES)
    assert seconds > 0


async def test_the_source_may_hold_them_in_any_tier(real: RealFleet, copier: PeerCopier) -> None:
    real.replicas[0].bench.engine.clear(["cpu"], CHUNKS[5:15])
    assert (await run(copier, decision())).timing is StagingTiming.IN_TIME
    assert real.replicas[1].bench.has_right_bytes(CHUNKS)


async def test_who_follows_with_the_same_beginning_waits_for_it_too(
    real: RealFleet, copier: PeerCopier
) -> None:
    leader = asyncio.create_task(run(copier, decision()))
    await asyncio.sleep(0)
    follower = without_copy(CHUNKS)
    assert copier.coming(follower)
    assert await copier.run(follower) is None
    assert ready(real, 1) == len(CHUNKS)
    assert (await leader).timing is StagingTiming.IN_TIME
    assert not copier.coming(follower)


async def test_others_do_not_wait_for_it(copier: PeerCopier) -> None:
    leader = asyncio.create_task(run(copier, decision()))
    await asyncio.sleep(0)
    other_prompt = without_copy([b"another"])
    elsewhere = without_copy(CHUNKS, replica_id="one")
    assert not copier.coming(other_prompt)
    assert not copier.coming(elsewhere)
    assert await copier.run(other_prompt) is None
    assert not leader.done()
    await leader


async def test_who_follows_waits_no_longer_than_it_gains(copier: PeerCopier) -> None:
    leader = asyncio.create_task(run(copier, decision(gain_s=0.0)))
    await asyncio.sleep(0)
    assert await copier.run(without_copy(CHUNKS)) is None
    assert (await leader).timing is StagingTiming.LATE


async def test_what_the_destination_holds_is_not_sent(real: RealFleet, copier: PeerCopier) -> None:
    """Be it on its disk: a prefetch brings that up at the same time."""
    two = real.replicas[1].bench
    two.store(CHUNKS[:15])
    two.finish_puts()
    two.engine.clear(["cpu"], CHUNKS[:15])
    outcome = await run(copier, decision())
    assert (outcome.arrived, outcome.moved_bytes) == (20, 5 * CHUNK_BYTES)
    assert ready(real, 1) == 20


async def test_copies_are_pinned_for_a_while(real: RealFleet, copier: PeerCopier) -> None:
    await run(copier, decision(CHUNKS[:5]))
    bench = real.replicas[1].bench
    assert bench.engine.stats().cpu_held_bytes == 5 * CHUNK_BYTES
    bench.clock.advance(PrefetchConfig().pin_s + 0.1)
    await until(lambda: bench.engine.stats().prefetch_unused_chunks == 5)


async def test_a_late_copy_goes_on_and_is_learned_from(
    real: RealFleet, copier: PeerCopier, told: Told
) -> None:
    outcome = await run(copier, decision(gain_s=0.0))
    assert (outcome.arrived, outcome.pending, outcome.timing) == (0, True, StagingTiming.LATE)
    await until(lambda: bool(told.observed))
    assert ready(real, 1) == 20


async def test_chunks_that_the_source_has_not_are_a_miss(
    real: RealFleet, copier: PeerCopier, told: Told
) -> None:
    real.replicas[0].bench.engine.clear()
    outcome = await run(copier, decision())
    assert (outcome.arrived, outcome.timing, outcome.error) == (0, StagingTiming.FAILED, None)
    assert not told.observed and not told.failed


async def test_a_source_that_is_gone_is_a_miss(
    real: RealFleet, copier: PeerCopier, told: Told
) -> None:
    await asyncio.to_thread(real.replicas[0].stop)
    outcome = await run(copier, decision())
    assert outcome.timing is StagingTiming.FAILED
    assert real.replicas[0].url in (outcome.error or "")
    assert told.failed == ["one"]


async def test_a_source_that_dies_in_the_middle(
    real: RealFleet, copier: PeerCopier, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that arrived are usable, and the time teaches nothing."""
    monkeypatch.setattr(fetching, "_WINDOW_BYTES", 4 * CHUNK_BYTES)
    send = protocol.send_chunk

    def dies(channel: Channel, key: bytes, view: memoryview, proofs: ChunkDigests) -> None:
        # From then on, too: the second of the two connections may open later.
        if CHUNKS.index(key) >= 10:
            # The first window may go over the other connection, and be slower.
            while not ready(real, 1):
                time.sleep(0.001)
            for each in (channel, *real.replicas[0].server._open):
                each.shut()
        send(channel, key, view, proofs)

    monkeypatch.setattr(protocol, "send_chunk", dies)
    outcome = await run(copier, decision())
    assert outcome.timing is StagingTiming.FAILED
    assert 0 < outcome.arrived < 20
    assert real.replicas[1].bench.has_right_bytes(CHUNKS[: outcome.arrived])
    assert not told.observed and not told.failed


async def test_a_source_that_hangs_is_left_alone(
    real: RealFleet, copier: PeerCopier, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(protocol, "send_chunk", lambda *args: gate.wait())
    monkeypatch.setattr(peer_copy, "_STALL_S", 0.2)
    assert (await run(copier, decision(gain_s=0.0))).timing is StagingTiming.LATE
    await until(lambda: told.failed == ["one"])
    gate.set()


async def test_a_destination_that_is_gone(real: RealFleet, copier: PeerCopier, told: Told) -> None:
    await asyncio.to_thread(real.replicas[1].stop)
    outcome = await run(copier, decision())
    assert outcome.timing is StagingTiming.FAILED and outcome.error
    assert told.failed == ["two"], "its source may give to others"


async def test_replicas_that_exchange_nothing(real: RealFleet, copier: PeerCopier) -> None:
    real.fleet.replicas["one"].transfer_port = None
    outcome = await run(copier, decision())
    assert (outcome.timing, outcome.arrived) == (StagingTiming.FAILED, 0)


async def test_nothing_is_copied_without_need(real: RealFleet, copier: PeerCopier) -> None:
    off = replace(real.fleet.config, prefetch=PrefetchConfig(enabled=False))
    stager = Stager(off, real.fleet, partial(AgentClient, real.session))
    assert await stager.prepare(decision()) == StagingResult()
    assert await copier.run(replace(decision(), copy=None)) is None
    assert ready(real, 1) == 0


async def test_so_many_at_once_and_no_more(
    real: RealFleet, copier: PeerCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()

    async def waits(*args: object) -> CopyOutcome:
        await gate.wait()
        return CopyOutcome(source_id="one", asked=20, arrived=20)

    monkeypatch.setattr(copier, "_follow", waits)
    late = [await run(copier, decision(gain_s=0.0)) for _ in range(PeerCopier.most)]
    assert {each.timing for each in late} == {StagingTiming.LATE}
    assert "under way already" in ((await run(copier, decision())).error or "")
    gate.set()
    await until(lambda: not copier._under_way)
    assert (await run(copier, decision())).timing is StagingTiming.IN_TIME


async def test_the_fleet_learns_the_rate_and_rests_from_a_source(real: RealFleet) -> None:
    replica = real.fleet.replicas["two"]
    assert not replica.rates.knows(CostPart.PEER)
    small = 100 * replica.kv_bytes_per_token
    real.fleet.observed_copy("two", int(small), 1.0)
    assert not replica.rates.knows(CostPart.PEER), "a small copy teaches nothing"
    before = replica.rates.per_second(CostPart.PEER)
    for _ in range(5):
        real.fleet.observed_copy("two", int(before), 10.0)
    assert replica.rates.per_second(CostPart.PEER) == pytest.approx(before / 10, rel=0.3)
    assert replica.rates.knows(CostPart.PEER)
    real.fleet.copy_failed("one", 100.0)
    assert real.fleet.replicas["one"].no_copies_until_s > 100.0
