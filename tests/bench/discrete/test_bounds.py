"""The bound of all contenders: one infinite cache, and a router that knows all replicas."""

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from bench.discrete.bounds import ForesightRouter, SharedCache
from bench.discrete.contenders import OURS, SHARED_CACHE, play
from bench.discrete.conversation import Conversation
from bench.discrete.play import FleetOptions
from bench.workloads.session import Span, Turn
from replay.replica import Fault, ModelReplica
from replay.requests import Sent
from tests.bench.discrete.building import (
    BLOCK,
    CHUNK,
    Heard,
    in_model_time,
    machine,
    prompt,
    sent,
    served,
    talk,
)


def sharing(replicas: int) -> list[ModelReplica]:
    """Replicas over one infinite cache, from which loads take no time."""
    at_once = replace(machine(), rates=replace(machine().rates, load_tokens_per_s=1e15))
    shared = SharedCache(CHUNK)
    return [ModelReplica(slot, at_once, shared=shared) for slot in range(replicas)]


@in_model_time
async def test_what_one_replica_has_computed_another_has() -> None:
    one, other = sharing(2)
    assert await served(one, prompt(99)) == pytest.approx(0.109)
    serving = other.submit(prompt(99), 1, Heard())
    await serving.done
    assert (serving.request.cached.gpu, serving.request.cached.cpu) == (0, 80)
    assert serving.request.first_token_s == pytest.approx(0.109 + 0.029)


@in_model_time
async def test_an_answer_is_shared_too() -> None:
    one, other = sharing(2)
    said = Conversation(BLOCK)
    await served(one, said.turn([Span(1, 60)], Span(-1, 41)), 41)
    serving = other.submit(said.turn([Span(2, 30)], Span(-2, 1)), 1, Heard())
    await serving.done
    # 60 tokens of the prompt and 40 of the answer: its last one was never run.
    assert serving.request.cached.cpu == 100


@in_model_time
async def test_the_shared_cache_forgets_nothing_when_a_replica_dies() -> None:
    one, other = sharing(2)
    await served(one, prompt(99))
    one.die()
    assert await served(other, prompt(99)) == pytest.approx(0.029)
    one.come_back()
    assert await served(one, prompt(99)) == pytest.approx(0.029)


class Bench:
    """The router before replicas that share a cache."""

    def __init__(self, replicas: int = 2) -> None:
        self.replicas = sharing(replicas)
        self.router = ForesightRouter(self.replicas)
        self.loop = asyncio.get_running_loop()

    async def ask(self, tokens: int, *, text: int = 1) -> Sent:
        made = sent(prompt(tokens, text=text), now_s=self.loop.time())
        await self.router.answer(made)
        return made


@in_model_time
async def test_the_router_sends_to_the_replica_that_has_it_on_its_gpu() -> None:
    bench = Bench()
    await served(bench.replicas[1], prompt(99))
    asked = await bench.ask(99)
    assert asked.record.instance_id == "r1"
    assert asked.record.ttft_s == pytest.approx(0.019)
    await bench.router.stop()


@in_model_time
async def test_the_router_goes_round_a_long_queue() -> None:
    bench = Bench()
    await served(bench.replicas[1], prompt(99))
    bench.replicas[1].submit(prompt(900, text=7), 1, Heard())
    assert (await bench.ask(99)).record.instance_id == "r0"
    await bench.router.stop()


@in_model_time
async def test_the_router_sends_short_ones_before_long_ones() -> None:
    bench = Bench(1)
    first = bench.loop.create_task(bench.ask(900, text=1))
    await asyncio.sleep(0.01)
    late = [bench.loop.create_task(bench.ask(900 - 800 * at, text=2 + at)) for at in (0, 1)]
    asked = [await each for each in (first, *late)]
    ends_s = [each.record.sent_s + (each.record.total_s or 0.0) for each in asked]
    assert ends_s[0] < ends_s[2] < ends_s[1]
    await bench.router.stop()


@in_model_time
async def test_the_router_answers_elsewhere_what_died_before_it_began() -> None:
    bench = Bench()
    await served(bench.replicas[0], prompt(499))
    asking = bench.loop.create_task(bench.ask(999))
    await asyncio.sleep(0.1)
    bench.replicas[0].die()
    asked = await asking
    assert (asked.record.ok, asked.record.instance_id) == (True, "r1")
    await bench.router.stop()


@in_model_time
async def test_without_a_replica_the_router_waits_for_one() -> None:
    bench = Bench(1)
    bench.replicas[0].die()
    asking = bench.loop.create_task(bench.ask(99))
    await asyncio.sleep(3.0)
    assert not asking.done()
    bench.replicas[0].come_back()
    asked = await asking
    assert asked.record.ok
    assert asked.record.ttft_s == pytest.approx(3.0 + 0.109, abs=0.1)
    await bench.router.stop()


@in_model_time
async def test_what_fits_nowhere_is_refused() -> None:
    bench = Bench(1)
    assert (await bench.ask(2_000)).record.status == 400
    await bench.router.stop()


AGENTS = [
    talk(
        *((60 + 10 * number, 20), (150, 30), (90, 20), (200, 25), (40, 30)),
        start_s=0.4 * number,
        pause_s=0.5,
        name=f"agent-{number}",
        texts=count(100 * (number + 1)),
        shared=(Span(1, 300), Span(2 + number % 3, 100)),
    )
    for number in range(16)
]
"""Sessions that grow, behind one prompt of tools and three of groups."""
REQUESTS = 5 * len(AGENTS)
FLEET = FleetOptions(
    replicas=3, machine=machine(gpu_tokens=1_500, cpu_tokens=1_000, disk_tokens=20_000)
)


def test_no_request_is_lost() -> None:
    records = play(SHARED_CACHE, AGENTS, FLEET).records
    assert [each.number for each in records] == list(range(REQUESTS))
    assert all(each.ok for each in records)


def test_of_a_fleet_whose_replica_dies_only_streams_break_off() -> None:
    options = replace(FLEET, faults=[Fault(slot=0, dies_s=2.0, returns_s=4.0)])
    quiet = [replace(each, turns=_whole(each.turns)) for each in AGENTS]
    assert all(each.ok for each in play(SHARED_CACHE, quiet, options).records)
    errors = {each.error for each in play(SHARED_CACHE, AGENTS, options).records if each.status}
    assert errors <= {None, "the answer broke off"}


def _whole(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    return tuple(replace(each, streamed=False) for each in turns)


def test_one_infinite_cache_is_at_least_as_good_as_ours() -> None:
    ttft_s = {}
    computed = {}
    for name in (OURS, SHARED_CACHE):
        records = play(name, AGENTS, FLEET).records
        assert all(each.ok for each in records)
        ttft_s[name] = sum(each.ttft_s or 0.0 for each in records) / REQUESTS
        computed[name] = sum(each.computed_tokens for each in records)
    assert ttft_s[SHARED_CACHE] <= ttft_s[OURS]
    assert computed[SHARED_CACHE] < computed[OURS]
