"""Our own router before model replicas: homes, what it hears and learns, what it stages."""

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from bench.discrete.contenders import OURS, play
from bench.discrete.play import FleetOptions
from bench.workloads.session import Span
from replay.our_router import Settings
from replay.staging import KV_BYTES_PER_TOKEN
from router.config.settings import RatesConfig
from router.fleet.cost_model import CostPart
from router.fleet.decision import Reason
from router.index.prompt_keys import KvTier
from tests.bench.discrete.before_ours import Bench
from tests.bench.discrete.building import (
    in_model_time,
    machine,
    prompt,
    served,
    talk,
)

FLEET = FleetOptions(replicas=3, machine=machine(), noise=0.0)


def test_a_session_stays_where_its_kv_is() -> None:
    given = [
        talk(
            *((200, 20), *[(40, 20)] * 5),
            start_s=0.2 * number,
            pause_s=1.0,
            name=f"s{number}",
            texts=count(10 * (number + 1)),
        )
        for number in range(3)
    ]
    records = play(OURS, given, FLEET).records
    assert all(each.ok for each in records)
    for number in range(3):
        (home,) = {each.instance_id for each in records if each.session == f"s{number}"}
        assert home is not None
    for each in records:
        if each.turn:
            # All was found but what was said since, and less than two blocks of the answer.
            assert each.computed_tokens <= 40 + 20
    assert len({each.instance_id for each in records}) == 3


@in_model_time
async def test_what_replicas_tell_is_known_at_once() -> None:
    bench = Bench()
    await served(bench.replicas[1], prompt(200))
    await asyncio.sleep(1.0)
    index = bench.router.fleet.index
    assert index.held(1) == {KvTier.GPU: 20, KvTier.CPU: 10, KvTier.DISK: 10}
    asked = await bench.ask(200)
    assert asked.record.instance_id == "r1"
    assert asked.record.cached_tokens == {"gpu": 190, "cpu": 0, "disk": 0}
    bench.replicas[1].die()
    bench.router.fleet.tick(bench.loop.time())
    held = index.held(1)
    assert (held.get(KvTier.GPU, 0), held.get(KvTier.CPU, 0), held[KvTier.DISK]) == (0, 0, 10)
    await bench.stop()


@in_model_time
async def test_a_record_tells_the_routers_reason_and_prediction() -> None:
    bench = Bench()
    first = await bench.ask(200, session="s")
    assert first.record.headers["reason"] == str(Reason.NO_INFORMATION)
    assert (first.record.predicted_ttft_s or 0.0) > 0
    again = await bench.ask(220, session="s")
    assert again.record.headers["reason"] == str(Reason.SESSION_HOME)
    await bench.stop()


@in_model_time
async def test_what_replicas_measure_is_reported() -> None:
    bench = Bench(1)
    rates = bench.router.fleet.replicas["r0"].rates
    for text in range(1, 30):
        await bench.ask(200, text=text, answer=20)
    await asyncio.sleep(40.0)
    assert rates.per_second(CostPart.PREFILL) == pytest.approx(1_000, rel=0.1)
    await bench.stop()


@in_model_time
async def test_a_prompt_on_disk_is_prefetched_before_it_is_sent() -> None:
    bench = Bench(1, gpu_tokens=400, cpu_tokens=400, disk_tokens_per_s=50_000.0)
    for text in (1, 2):
        await bench.ask(200 * text, text=text)
        await asyncio.sleep(2.0)
    asked = await bench.ask(179, text=1)
    assert "prefetch" in {name.removeprefix("x-warmroute-") for name in asked.record.headers}
    assert asked.record.cached_tokens["cpu"] == 160  # the replica did not have to read it
    await bench.stop()


@in_model_time
async def test_a_spilled_session_has_its_kv_copied_and_the_copys_rate_is_learned() -> None:
    bench = Bench(
        2,
        gpu_tokens=20_000,
        cpu_tokens=20_000,
        peer_tokens_per_s=50_000.0,
        receive_tokens_per_s=50_000.0,
    )
    first = await bench.ask(4_000, session="s")
    other = await bench.ask(3_000, text=2)
    assert first.record.instance_id != other.record.instance_id
    await asyncio.sleep(2.0)
    home = int((first.record.instance_id or "")[1:])
    away = bench.router.fleet.replicas[f"r{1 - home}"]
    default = away.rates.per_second(CostPart.PEER) / KV_BYTES_PER_TOKEN
    busy = bench.loop.create_task(bench.ask(14_000, session="s"))
    await asyncio.sleep(0.1)
    spilled = await bench.ask(4_020, session="s")
    await busy
    assert spilled.record.instance_id == f"r{1 - home}"
    assert spilled.record.cached_tokens["cpu"] == 4_000
    assert bench.router.counts()["copied_tokens"] == 4_000
    learned = away.rates.per_second(CostPart.PEER) / KV_BYTES_PER_TOKEN
    assert default < 10_000
    assert 20_000 < learned < 60_000
    await bench.stop()


@in_model_time
async def test_the_speed_of_a_disk_is_told_by_its_replica() -> None:
    bench = Bench(1, gpu_tokens=400, cpu_tokens=400)
    rates = bench.router.fleet.replicas["r0"].rates
    for text in (1, 2):
        await bench.ask(200 * text, text=text)
        await asyncio.sleep(2.0)
    await asyncio.sleep(40.0)
    assert not rates.knows(CostPart.DISK)
    await bench.ask(179, text=1)
    await asyncio.sleep(40.0)
    assert rates.per_second(CostPart.DISK) == pytest.approx(500 * KV_BYTES_PER_TOKEN, rel=0.01)
    await bench.stop()


def test_true_rates_are_the_machines() -> None:
    @in_model_time
    async def scenario() -> None:
        bench = Bench(1, settings=Settings(true_rates=True))
        rates = bench.router._config.rates
        assert rates.prefill_tokens_per_s == 1_000.0
        assert rates.disk_bytes_per_s / rates.peer_bytes_per_s == 500 / 200
        await bench.stop()
        plain = Bench(1)
        assert plain.router._config.rates == RatesConfig()
        await plain.stop()

    scenario()


def test_prefetch_is_begun_and_ended_with_its_turn() -> None:
    """Sessions whose KV was evicted between two turns: all turns end, nothing stays pinned."""
    small = replace(FLEET, machine=machine(gpu_tokens=900, cpu_tokens=600, disk_tokens=20_000))
    given = [
        talk(
            *[(120, 10)] * 4,
            start_s=0.3 * number,
            pause_s=2.0,
            name=f"s{number}",
            texts=count(10 * (number + 1)),
            shared=(Span(1, 100),),
        )
        for number in range(12)
    ]
    run = play(OURS, given, small)
    assert all(each.ok for each in run.records)
    assert run.counts["promoted_tokens"] > 0
