"""Our router where something fails: replicas that die and return, and lines that are full."""

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from bench.discrete.contenders import OURS, play
from bench.discrete.play import FleetOptions
from replay.our_router import PROBE_S, Settings, with_sections
from replay.replica import Fault
from router.config.settings import AdmissionConfig
from router.fleet.replica import ReplicaState
from tests.bench.discrete.before_ours import Bench
from tests.bench.discrete.building import in_model_time, machine, talk

FLEET = FleetOptions(replicas=3, machine=machine(), noise=0.0)


@in_model_time
async def test_a_request_goes_elsewhere_when_its_replica_has_died() -> None:
    bench = Bench()
    first = await bench.ask(200, session="s")
    home = int((first.record.instance_id or "")[1:])
    bench.replicas[home].die()
    again = await bench.ask(220, session="s")
    assert (again.record.ok, again.record.status) == (True, 200)
    assert again.record.instance_id == f"r{1 - home}"
    assert bench.router.fleet.replicas[f"r{home}"].state is ReplicaState.DOWN
    await bench.stop()


@in_model_time
async def test_an_answer_that_had_not_begun_is_tried_elsewhere() -> None:
    bench = Bench()
    asking = bench.loop.create_task(bench.ask(400))
    await asyncio.sleep(0.1)
    (busy,) = (each for each in bench.replicas if each.model.running)
    busy.die()
    asked = await asking
    assert asked.record.instance_id == f"r{1 - busy.slot}"
    assert asked.record.ttft_s == pytest.approx(0.1 + 0.44)
    await bench.stop()


@in_model_time
async def test_who_dies_and_is_back_at_once_is_not_tried_again() -> None:
    bench = Bench()
    asking = bench.loop.create_task(bench.ask(400))
    await asyncio.sleep(0.1)
    (busy,) = (each for each in bench.replicas if each.model.running)
    busy.die()
    busy.come_back()
    assert (await asking).record.instance_id == f"r{1 - busy.slot}"
    await bench.stop()


@in_model_time
async def test_a_stream_that_has_begun_breaks_off_and_other_answers_do_not() -> None:
    for streamed in (True, False):
        bench = Bench()
        asking = bench.loop.create_task(bench.ask(90, answer=50, streamed=streamed))
        await asyncio.sleep(0.2)
        (busy,) = (each for each in bench.replicas if each.model.running)
        busy.die()
        asked = await asking
        assert asked.record.ok is not streamed
        assert asked.record.error == ("the answer broke off" if streamed else None)
        await bench.stop()


@in_model_time
async def test_without_a_replica_there_is_an_error() -> None:
    bench = Bench()
    for each in bench.replicas:
        each.die()
    asked = await bench.ask(50)
    assert (asked.record.ok, asked.record.status) == (False, 503)
    await bench.stop()


@in_model_time
async def test_a_prompt_that_fits_nowhere_is_the_clients_error() -> None:
    bench = Bench()
    asked = await bench.ask(2_000)
    assert (asked.record.status, asked.record.ttft_s) == (400, None)
    await bench.stop()


@in_model_time
async def test_one_too_many_is_refused_with_429() -> None:
    settings = with_sections(
        Settings(true_rates=True), admission=AdmissionConfig(max_waiting=1, dispatch_ahead_s=0.1)
    )
    bench = Bench(1, settings=settings)
    await bench.ask(50)  # what is not known of a replica holds nobody up
    asked = await asyncio.gather(*(bench.ask(900, text=2 + number) for number in range(4)))
    assert sorted(each.record.status or 0 for each in asked) == [200, 200, 429, 429]
    refused = [each for each in asked if each.record.status == 429]
    assert all(not each.record.ok and each.record.ttft_s is None for each in refused)
    assert all("queue is full" in (each.record.error or "") for each in refused)
    assert bench.router.counts()["refused"] == 2
    await bench.stop()


@in_model_time
async def test_who_waits_too_long_is_refused_with_429() -> None:
    settings = with_sections(
        Settings(true_rates=True), admission=AdmissionConfig(max_wait_s=0.5, dispatch_ahead_s=0.1)
    )
    bench = Bench(1, settings=settings)
    await bench.ask(50)
    asked = await asyncio.gather(*(bench.ask(900, text=2 + number) for number in range(3)))
    late = [each for each in asked if each.record.status == 429]
    assert late
    assert all(each.record.total_s == pytest.approx(0.0) for each in late)  # on arrival
    await bench.stop()


def test_a_replica_that_returns_is_used_again() -> None:
    given = [
        talk((300, 5), start_s=0.1 * number, texts=count(10 * number + 10), streamed=False)
        for number in range(200)
    ]
    dies_s, returns_s = 4.0, 9.0
    options = replace(FLEET, faults=[Fault(slot=1, dies_s=dies_s, returns_s=returns_s)])
    records = play(OURS, given, options).records
    assert all(each.ok for each in records)

    def used(from_s: float, to_s: float) -> bool:
        return any(each.instance_id == "r1" and from_s <= each.sent_s < to_s for each in records)

    assert used(0.0, dies_s)
    assert not used(dies_s, returns_s - 1.0)
    assert used(returns_s + PROBE_S, returns_s + PROBE_S + 5.0)


@in_model_time
async def test_what_its_disk_kept_is_found_when_a_replica_is_back() -> None:
    # Faster than computing: what the disk of the other tests has not read in time is computed.
    bench = Bench(1, disk_tokens_per_s=50_000.0)
    await bench.ask(399)
    await asyncio.sleep(2.0)
    bench.replicas[0].die()
    await asyncio.sleep(PROBE_S)
    bench.replicas[0].come_back()
    await asyncio.sleep(PROBE_S)
    asked = await bench.ask(399)
    assert asked.record.ok
    assert asked.record.cached_tokens["gpu"] == 0
    assert sum(asked.record.cached_tokens.values()) == 380
    await bench.stop()
