"""Rules before replicas: what they are offered, told, and that they let go of what ended."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from bench.discrete.rule_router import RuleRouter
from bench.discrete.rules.catalogue import rules
from bench.discrete.rules.rule import Asked, CountingRule, ReplicaMetrics
from replay.our_router import PROBE_S
from replay.replica import ModelReplica, numbers_of
from replay.requests import Sent
from router.index.prompt_keys import KvTier
from tests.bench.discrete.building import BLOCK, Told, in_model_time, machine, prompt, sent


class FirstHealthy(CountingRule):
    """Sends all to the first replica that it is offered; notes what it is offered and told."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.offered: list[list[int]] = []
        self.asked: list[Asked] = []
        self.first_tokens: list[float] = []
        self.told = Told()
        self.metrics: list[tuple[float, int, ReplicaMetrics]] = []

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        self.offered.append(list(healthy))
        self.asked.append(asked)
        self.in_flight.sent(asked.id, healthy[0])
        return healthy[0]

    def first_token(self, request_id: int, now_s: float) -> None:
        self.first_tokens.append(now_s)

    def stored(self, replica: int, tier: KvTier, blocks: Sequence[int]) -> None:
        self.told.stored(replica, tier, blocks)

    def removed(self, replica: int, tier: KvTier, blocks: Sequence[int]) -> None:
        self.told.removed(replica, tier, blocks)

    def cleared(self, replica: int) -> None:
        self.told.cleared(replica)

    def scraped(self, replica: int, metrics: ReplicaMetrics, now_s: float) -> None:
        self.metrics.append((now_s, replica, metrics))


class Bench:
    """Two replicas behind a rule."""

    def __init__(self, replicas: int = 2, **changes: float) -> None:
        self.replicas = [ModelReplica(slot, machine(**changes)) for slot in range(replicas)]
        self.rule = FirstHealthy(replicas)
        self.router = RuleRouter(self.replicas, self.rule)
        self._loop = asyncio.get_running_loop()

    async def ask(self, tokens: int = 50, **options: Any) -> Sent:
        given = prompt(tokens, answer=options.get("answer", 1))
        made = sent(given, now_s=self._loop.time(), **options)
        await self.router.answer(made)
        return made

    def after(self, wait_s: float, act: Callable[[], None]) -> None:
        self._loop.call_later(wait_s, act)


def before_a_rule(
    test: Callable[[Bench], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    """Give a test a fleet, and see that in the end nothing is counted as in flight."""

    @in_model_time
    async def run() -> None:
        bench = Bench()
        await test(bench)
        assert bench.rule.in_flight.requests == [0, 0]
        await bench.router.stop()

    run.__name__ = test.__name__
    return run


@before_a_rule
async def test_an_answer_is_noted_with_its_replica_and_what_was_cached(bench: Bench) -> None:
    first, again = await bench.ask(95), await bench.ask(95)
    assert (first.record.ok, first.record.status, first.record.instance_id) == (True, 200, "r0")
    assert first.record.ttft_s == pytest.approx(0.105)
    assert again.record.cached_tokens == {"gpu": 90, "cpu": 0, "disk": 0}
    assert bench.rule.first_tokens == [pytest.approx(0.105), pytest.approx(0.12)]


@before_a_rule
async def test_a_rule_is_asked_for_the_prompts_blocks_and_session(bench: Bench) -> None:
    await bench.ask(25, session="s", answer=100)
    (asked,) = bench.rule.asked
    assert list(asked.blocks) == list(numbers_of(prompt(25)))
    assert (asked.prompt_tokens, asked.block_tokens, asked.session) == (25, BLOCK, "s")


@before_a_rule
async def test_a_dead_replica_is_tried_once_and_then_left_alone(bench: Bench) -> None:
    bench.replicas[0].die()
    first, second = await bench.ask(), await bench.ask()
    assert (first.record.instance_id, second.record.instance_id) == ("r1", "r1")
    assert bench.rule.offered == [[0, 1], [1], [1]]
    bench.replicas[0].come_back()
    await asyncio.sleep(PROBE_S)
    assert (await bench.ask()).record.instance_id == "r0"


@before_a_rule
async def test_of_requests_that_come_together_each_tries_the_dead_one_once(bench: Bench) -> None:
    bench.replicas[0].die()
    asked = await asyncio.gather(*(bench.ask() for _ in range(4)))
    assert [each.record.instance_id for each in asked] == ["r1"] * 4
    # The first notices; nobody after it is offered the dead one.
    assert bench.rule.offered == [[0, 1], [1], [1], [1], [1]]


@before_a_rule
async def test_an_answer_that_has_not_begun_is_tried_elsewhere(bench: Bench) -> None:
    bench.after(0.05, bench.replicas[0].die)
    asked = await bench.ask(95)
    assert (asked.record.ok, asked.record.instance_id) == (True, "r1")
    assert asked.record.ttft_s == pytest.approx(0.05 + 0.105)


@before_a_rule
async def test_who_dies_and_is_back_at_once_is_not_tried_again(bench: Bench) -> None:
    def flicker() -> None:
        bench.replicas[0].die()
        bench.replicas[0].come_back()

    bench.after(0.05, flicker)
    assert (await bench.ask(95)).record.instance_id == "r1"
    assert bench.rule.offered == [[0, 1], [1]]


@before_a_rule
async def test_a_stream_that_has_begun_breaks_off(bench: Bench) -> None:
    bench.after(0.15, bench.replicas[0].die)
    asked = await bench.ask(95, answer=50)
    assert (asked.record.ok, asked.record.status) == (False, 200)
    assert asked.record.error == "the answer broke off"
    assert asked.record.ttft_s is None


@before_a_rule
async def test_an_answer_that_is_not_streamed_is_tried_elsewhere(bench: Bench) -> None:
    bench.after(0.15, bench.replicas[0].die)
    asked = await bench.ask(95, answer=50, streamed=False)
    assert (asked.record.ok, asked.record.instance_id) == (True, "r1")
    assert asked.record.ttft_s == pytest.approx(0.15 + 0.105)
    assert bench.rule.first_tokens == []  # nobody sees them


@before_a_rule
async def test_without_a_replica_there_is_an_error(bench: Bench) -> None:
    for each in bench.replicas:
        each.die()
    asked = await bench.ask()
    assert (asked.record.ok, asked.record.status) == (False, 503)
    assert (await bench.ask()).record.status == 503
    assert bench.rule.offered == [[0, 1], [1]]


@before_a_rule
async def test_a_prompt_that_fits_nowhere_is_the_clients_error(bench: Bench) -> None:
    asked = await bench.ask(2_000)
    assert (asked.record.ok, asked.record.status) == (False, 400)
    assert "do not fit" in (asked.record.error or "")


@before_a_rule
async def test_a_rule_hears_what_each_replica_holds(bench: Bench) -> None:
    await bench.ask(60)
    await asyncio.sleep(1.0)
    blocks = list(numbers_of(prompt(60)))
    assert bench.rule.told.of(0, KvTier.GPU) == set(blocks)
    assert (
        bench.rule.told.of(0, KvTier.CPU) == bench.rule.told.of(0, KvTier.DISK) == set(blocks[1::2])
    )
    bench.replicas[0].die()
    assert bench.rule.told.cleared_replicas == [0]
    assert bench.rule.told.of(0, KvTier.DISK) == set(blocks[1::2])


@before_a_rule
async def test_metrics_are_seen_five_times_a_second(bench: Bench) -> None:
    # Of nine requests eight run at once, and one waits.
    asking = [
        asyncio.create_task(bench.router.answer(sent(prompt(50, text=text, answer=50), answer=50)))
        for text in range(9)
    ]
    await asyncio.sleep(0.85)
    times = [at_s for at_s, slot, _ in bench.rule.metrics if slot == 0]
    assert times == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    last = [metrics for _, slot, metrics in bench.rule.metrics if slot == 0][-1]
    assert (last.running, last.waiting) == (8, 1)
    assert 0.4 < last.kv_used < 0.8
    await asyncio.gather(*asking)


@pytest.mark.parametrize("name", sorted(rules(2, BLOCK, 100, 1)))
def test_each_rule_serves_a_fleet_whose_replica_dies_and_returns(name: str) -> None:
    @in_model_time
    async def scenario() -> None:
        replicas = [ModelReplica(slot, machine()) for slot in range(3)]
        router = RuleRouter(replicas, rules(3, BLOCK, 100, 1)[name]())
        asyncio.get_running_loop().call_later(1.0, replicas[0].die)
        asyncio.get_running_loop().call_later(3.0, replicas[0].come_back)
        made = []
        for number in range(60):
            # Answers are not streamed, so that each can be tried again.
            made.append(
                sent(
                    prompt(20 * (1 + number % 7), text=number % 5, answer=5),
                    answer=5,
                    session=f"s{number % 5}",
                    streamed=False,
                    now_s=asyncio.get_running_loop().time(),
                )
            )
            asyncio.get_running_loop().create_task(router.answer(made[-1]))
            await asyncio.sleep(0.1)
        await asyncio.sleep(5.0)
        assert [each.record.error for each in made] == [None] * 60
        assert {each.record.instance_id for each in made} <= {"r0", "r1", "r2"}
        for each in replicas:
            each.model.check()
            each.engine.check()
        await router.stop()

    scenario()
