"""When a request is sent again: within the budget, after a pause, as its replica asked."""

import asyncio
from typing import Any

import aiohttp
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.config.settings import ReplicaConfig
from router.proxy.proxy import Retries, RetryBudget, pause_s
from tests.router.conftest import Fleet, Wait
from tests.router.scripted import CHAT_ANSWER, cut_before_headers, json_answer, scripted

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}

# --- the budget


@pytest.mark.parametrize(
    ("requests", "most"), [(0, 10), (1, 10), (50, 10), (55, 11), (100, 20), (1000, 200)]
)
def test_a_fifth_of_the_requests_may_be_retries_and_ten_in_any_case(
    requests: int, most: int
) -> None:
    budget = RetryBudget()
    budget.requests = requests
    while budget.has_capacity:
        budget.retries += 1
    assert budget.retries == most


@pytest.mark.parametrize(
    ("retry", "jitter", "pause"), [(1, 0.9, 0.0), (2, 0.0, 0.025), (2, 1.0, 0.25), (9, 1.0, 0.25)]
)
def test_the_first_retry_goes_at_once_and_later_ones_pause(
    retry: int, jitter: float, pause: float
) -> None:
    assert pause_s(retry, jitter) == pytest.approx(pause)


async def turns(loops: int = 3) -> None:
    for _ in range(loops):
        await asyncio.sleep(0)


async def full() -> Retries:
    """Return retries of which as many as may are under way."""
    retries = Retries(jitter=lambda: 0.0)
    for _ in range(10):
        assert await retries.enter(1, 60.0)
    return retries


async def test_those_beyond_it_wait_their_turn() -> None:
    retries = await full()
    waiting = [asyncio.create_task(retries.enter(1, 60.0)) for _ in range(3)]
    await turns()
    assert not any(each.done() for each in waiting)
    retries.leave()
    assert await waiting[0]
    await turns()
    assert [each.done() for each in waiting] == [True, False, False]
    assert retries.budget.retries == 10
    # A newcomer is not let by, although there is room for a moment.
    retries.leave()
    late = asyncio.create_task(retries.enter(1, 60.0))
    assert await waiting[1]
    await turns()
    assert not late.done()
    for _ in range(2):
        retries.leave()
    assert await waiting[2] and await late
    for _ in range(10):
        retries.leave()
    assert retries.budget.retries == 0


async def test_more_requests_make_room_for_more_retries() -> None:
    retries = await full()
    waiting = asyncio.create_task(retries.enter(1, 60.0))
    await turns()
    counting = [retries.counting() for _ in range(55)]
    for each in counting[:50]:
        each.__enter__()
    assert not waiting.done()
    for each in counting[50:]:
        each.__enter__()
    assert await waiting
    for each in counting:
        each.__exit__(None, None, None)
    assert retries.budget.requests == 0


async def test_one_that_has_waited_too_long_takes_no_place() -> None:
    retries = await full()
    assert not await retries.enter(1, 0.01)
    retries.leave()
    assert retries.budget.retries == 9
    assert await retries.enter(1, 60.0)


async def test_a_client_that_leaves_as_its_turn_comes_leaves_no_place_taken() -> None:
    retries = await full()
    leaving = asyncio.create_task(retries.enter(1, 60.0))
    behind = asyncio.create_task(retries.enter(1, 60.0))
    await turns()
    retries.leave()  # its turn comes, and in the same turn of the loop
    leaving.cancel()  # its client leaves
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await behind
    assert retries.budget.retries == 10


async def test_a_client_that_leaves_during_its_pause_leaves_no_place_taken() -> None:
    retries = Retries(jitter=lambda: 1.0)
    paused = asyncio.create_task(retries.enter(2, 60.0))
    await turns()
    assert retries.budget.retries == 1
    paused.cancel()
    with pytest.raises(asyncio.CancelledError):
        await paused
    assert retries.budget.retries == 0


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class AnyOrder(RuleBasedStateMachine):
    """Requests and their retries come, wait, go and are cancelled in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.retries = Retries(jitter=lambda: 0.0)
        self.under_way = 0
        self.waiting: list[asyncio.Task[bool]] = []
        self.counting: list[Any] = []

    def settle(self) -> None:
        self.runner.run(turns(5))
        done = [each for each in self.waiting if each.done()]
        self.under_way += sum(not each.cancelled() and each.result() for each in done)
        self.waiting = [each for each in self.waiting if not each.done()]

    @rule(count=st.integers(1, 30))
    def requests_come(self, count: int) -> None:
        for _ in range(count):
            self.counting.append(self.retries.counting())
            self.counting[-1].__enter__()
        self.settle()

    @precondition(lambda self: self.counting)
    @rule()
    def a_request_ends(self) -> None:
        self.counting.pop().__exit__(None, None, None)
        self.settle()

    @rule(count=st.integers(1, 8))
    def retries_come(self, count: int) -> None:
        async def come() -> None:
            self.waiting += [asyncio.create_task(self.retries.enter(1, 60.0)) for _ in range(count)]

        self.runner.run(come())
        self.settle()

    @precondition(lambda self: self.under_way)
    @rule(cancels=st.booleans())
    def a_retry_ends(self, cancels: bool) -> None:
        async def end() -> None:
            self.retries.leave()
            if cancels and self.waiting:
                self.waiting[0].cancel()

        self.under_way -= 1
        self.runner.run(end())
        self.settle()

    @invariant()
    def places_are_counted(self) -> None:
        budget = self.retries.budget
        assert budget.retries == self.under_way
        assert budget.requests == len(self.counting)
        assert not (self.waiting and budget.has_capacity)

    def teardown(self) -> None:
        self.runner.close()


TestAnyOrder = AnyOrder.TestCase

# --- through the router


async def test_a_second_retry_pauses(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    async with scripted() as third:
        # In their turns: after the first comes the last, of the two that are left.
        for upstream in (fleet.one, third):
            upstream.will(json_answer({}, status=503))
        fleet.two.will(json_answer(CHAT_ANSWER))
        replicas = tuple(
            ReplicaConfig(url=each.url, instance_id=name)
            for name, each in (("one", fleet.one), ("two", fleet.two), ("three", third))
        )
        router = await fleet.router(replicas=replicas)
        async with client.post(router.url + CHAT, json=ASK) as response:
            assert response.status == 200
            assert response.headers["x-warmroute-retries"] == "2"
        record = await router.record()
        assert record.retry_wait_s is not None and record.retry_wait_s >= 0.025
        async with client.get(f"{router.url}/metrics") as response:
            assert "warmroute_retry_wait_seconds_count 1.0" in await response.text()


async def test_a_replica_that_asks_for_patience_is_asked_again_if_no_other_can_answer(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    busy = json_answer({}, status=503, **{"Retry-After": "1"})
    for upstream in (fleet.one, fleet.two):
        upstream.will(busy, json_answer(CHAT_ANSWER))
    router = await fleet.router()
    async with client.post(router.url + CHAT, json=ASK) as response:
        assert response.status == 200
        assert response.headers["x-warmroute-retries"] == "2"
    assert len(fleet.one.seen) + len(fleet.two.seen) == 3
    record = await router.record()
    assert record.retry_wait_s is not None and record.retry_wait_s >= 1.0
    assert router.in_flight() == 0


@pytest.mark.parametrize(
    ("path", "said", "retries"),
    [
        (CHAT, {}, 2),
        (CHAT, {"Retry-After": "6"}, 2),
        (CHAT, {"Retry-After": "Wed, 21 Oct 2037 07:28:00 GMT"}, 2),
        (CHAT, {"Retry-After": "0"}, 0),
        ("/v1/files", {"Retry-After": "0"}, 2),
    ],
    ids=["unsaid", "too-long", "a-date", "no-retries", "not-repeatable"],
)
async def test_else_its_refusal_is_passed_on(
    fleet: Fleet, client: aiohttp.ClientSession, path: str, said: dict[str, str], retries: int
) -> None:
    fleet.one.will(json_answer({}, status=503, **said), json_answer(CHAT_ANSWER))
    one = (ReplicaConfig(url=fleet.one.url, instance_id="one"),)
    router = await fleet.router(replicas=one, retries=retries)
    async with client.post(router.url + path, json=ASK) as response:
        assert response.status == 503
        assert response.headers.get("Retry-After") == said.get("Retry-After")
    assert len(fleet.one.seen) == 1


async def test_patience_ends_with_the_retries(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    fleet.one.will(json_answer({}, status=503, **{"Retry-After": "0"}))
    one = (ReplicaConfig(url=fleet.one.url, instance_id="one"),)
    router = await fleet.router(replicas=one, retries=3)
    async with client.post(router.url + CHAT, json=ASK) as response:
        assert response.status == 503
    # Once, and again when it was to be; what failed then said no better.
    assert len(fleet.one.seen) == 4
    assert router.in_flight() == 0


async def test_many_that_fail_at_once_are_all_answered_by_the_other_replica(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """More retries than the budget has room for: those beyond it wait, and none is lost."""
    fleet.one.will(cut_before_headers)
    fleet.two.will(json_answer(CHAT_ANSWER))
    router = await fleet.router()
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, router.parts.retries.budget.retries)
            await asyncio.sleep(0)

    async def ask() -> int:
        async with client.post(router.url + CHAT, json=ASK) as response:
            await response.read()
            return response.status

    watching = asyncio.create_task(watch())
    assert set(await asyncio.gather(*(ask() for _ in range(80)))) == {200}
    watching.cancel()
    assert most <= 16
    budget = router.parts.retries.budget
    await eventually(lambda: (budget.requests, budget.retries) == (0, 0))
    assert router.in_flight() == 0
