"""Requests held in the router until their replica can take them, over real sockets.

A token takes ten seconds here, as far as the router knows: whoever waits does
so until a first token has come, whatever the clock says.
"""

import asyncio
import json
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from router.config.settings import AdmissionConfig, RatesConfig, ReplicaConfig, TimeoutsConfig
from router.fleet.fleet import Fleet as FleetState
from router.index.prompt_keys import PromptKeyCache
from router.record.records import Outcome
from router.scheduling.admission import AdmissionController, AdmissionQueue
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler
from tests.router.conftest import Fleet, Running, Wait
from tests.router.prompt.prompts_given import tokens
from tests.router.scheduling.helpers import make_learned_fleet
from tests.router.scripted import (
    Scripted,
    chat_events,
    cut_before_headers,
    stream,
)
from warmroute_common.api_errors import OverloadedError

SLOW = RatesConfig(prefill_tokens_per_s=0.1)


async def slow_router(fleet: Fleet, *, replicas: int = 1, **changes: Any) -> Running:
    """A router that believes its replicas to be slow, and to know how slow."""
    configured = (
        ReplicaConfig(url=fleet.one.url, instance_id="one"),
        ReplicaConfig(url=fleet.two.url, instance_id="two"),
    )
    patient = AdmissionConfig(max_wait_s=360_000.0)
    values = {
        "policy": "ttft",
        "rates": SLOW,
        "replicas": configured[:replicas],
        "admission": patient,
    }
    return await fleet.router(**(values | changes))


def hold(upstream: Scripted) -> asyncio.Event:
    """Let an upstream answer its first request when the event is set, the others at once."""
    gate = asyncio.Event()
    upstream.will(stream(*chat_events("a"), gates=(gate,)), stream(*chat_events("b")))
    return gate


def body(prompt: str) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "stream": True}


async def post(
    client: aiohttp.ClientSession, router: Running, prompt: str, **headers: str
) -> tuple[int, Any]:
    url = f"{router.url}/v1/completions"
    async with client.post(url, json=body(prompt), headers=headers) as response:
        text = await response.text()
        return response.status, json.loads(text) if response.status != 200 else text


def prompts_seen(upstream: Scripted) -> list[str]:
    return [json.loads(seen.body)["prompt"] for seen in upstream.seen]


async def first_in(
    client: aiohttp.ClientSession, router: Running, upstream: Scripted, prompt: str = "first"
) -> asyncio.Task[tuple[int, Any]]:
    """Send a request and wait until its replica has it."""
    task = asyncio.create_task(post(client, router, prompt))
    await upstream.arrived.wait()
    return task


LONG, SHORT = "long " * 40, "short " * 10


async def test_the_shortest_goes_first(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    answer = hold(fleet.one)
    router = await slow_router(fleet)
    tasks = [await first_in(client, router, fleet.one)]
    tasks.append(asyncio.create_task(post(client, router, LONG)))
    await eventually(lambda: len(router.parts.admission) == 1)
    tasks.append(asyncio.create_task(post(client, router, SHORT)))
    await eventually(lambda: len(router.parts.admission) == 2)
    assert router.in_flight() == 1 and len(fleet.one.seen) == 1
    async with client.get(f"{router.url}/metrics") as response:
        assert 'warmroute_table_entries{table="waiting"} 2.0' in await response.text()
    answer.set()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200, 200]
    assert prompts_seen(fleet.one) == ["first", SHORT, LONG]
    await router.record(3)
    waits = [record.held_s for record in router.records]
    assert waits[0] == 0.0 and all(wait_s for wait_s in waits[1:])
    assert router.in_flight() == 0 and len(router.parts.admission) == 0


async def test_how_long_it_was_held_is_said(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    answer = hold(fleet.one)
    router = await slow_router(fleet)
    task = await first_in(client, router, fleet.one)
    url = f"{router.url}/v1/completions"
    held = asyncio.create_task(client.post(url, json=body(SHORT)))
    await eventually(lambda: len(router.parts.admission) == 1)
    answer.set()
    async with await held as response:
        assert float(response.headers["x-warmroute-held-ms"]) > 0
    await task


async def test_it_goes_to_the_replica_that_is_free_first(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    answers = {"one": hold(fleet.one), "two": hold(fleet.two)}
    router = await slow_router(fleet, replicas=2)
    tasks = [asyncio.create_task(post(client, router, f"{n} {LONG}")) for n in range(2)]
    await fleet.one.arrived.wait()
    await fleet.two.arrived.wait()
    tasks.append(asyncio.create_task(post(client, router, SHORT)))
    await eventually(lambda: len(router.parts.admission) == 1)
    answers["two"].set()
    await eventually(lambda: prompts_seen(fleet.two)[-1] == SHORT)
    answers["one"].set()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200, 200]
    assert router.in_flight() == 0


# --- refusals


async def test_a_full_line_is_said_at_once(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    answer = hold(fleet.one)
    router = await slow_router(fleet, admission=AdmissionConfig(max_waiting=0))
    task = await first_in(client, router, fleet.one)
    async with openai.AsyncOpenAI(
        base_url=f"{router.url}/v1", api_key="mine", max_retries=0
    ) as asking:
        with pytest.raises(openai.RateLimitError) as caught:
            await asking.completions.create(model="m", prompt=SHORT)
    error = caught.value
    assert (error.type, error.code) == ("rate_limit_error", "rate_limit_exceeded")
    assert "admission.max_waiting" in error.message
    assert int(error.response.headers["Retry-After"]) >= 1
    async with anthropic.AsyncAnthropic(
        base_url=router.url, api_key="mine", max_retries=0
    ) as asking_too:
        with pytest.raises(anthropic.RateLimitError) as refused:
            await asking_too.messages.create(
                model="m", max_tokens=5, messages=[{"role": "user", "content": SHORT}]
            )
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["error"]["type"] == "rate_limit_error"
    record = await router.record()
    assert (record.outcome, record.status, record.rejected) == (Outcome.REFUSED, 429, "full")
    async with client.get(f"{router.url}/metrics") as response:
        assert (
            'admission_rejected_total{cause="full",priority="normal"} 2.0' in await response.text()
        )
    answer.set()
    assert (await task)[0] == 200
    assert router.in_flight() == 0


@pytest.mark.parametrize("by", ["client", "configuration"])
async def test_a_deadline(fleet: Fleet, client: aiohttp.ClientSession, by: str) -> None:
    answer = hold(fleet.one)
    wait_s = 0.05 if by == "configuration" else 3600.0
    router = await slow_router(fleet, admission=AdmissionConfig(max_wait_s=wait_s))
    task = await first_in(client, router, fleet.one)
    headers = {"x-warmroute-max-wait-s": "0.05"} if by == "client" else {}
    status, error = await post(client, router, SHORT, **headers)
    assert status == 429 and "within 0.05 s" in error["error"]["message"]
    assert (await router.record()).rejected == "deadline"
    assert len(fleet.one.seen) == 1
    answer.set()
    assert (await task)[0] == 200
    assert router.in_flight() == 0 and len(router.parts.admission) == 0


@pytest.mark.parametrize("said", ["soon", "-1", "nan"])
async def test_a_deadline_that_is_none(
    fleet: Fleet, client: aiohttp.ClientSession, said: str
) -> None:
    router = await slow_router(fleet)
    status, error = await post(client, router, SHORT, **{"x-warmroute-max-wait-s": said})
    assert status == 400 and "number of seconds" in error["error"]["message"]
    assert router.in_flight() == 0


# --- faults


async def test_a_client_that_leaves_while_waiting(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    answer = hold(fleet.one)
    router = await slow_router(fleet)
    task = await first_in(client, router, fleet.one)
    async with aiohttp.ClientSession() as leaving:
        waiting = asyncio.create_task(post(leaving, router, SHORT))
        await eventually(lambda: len(router.parts.admission) == 1)
        waiting.cancel()
    assert (await router.record()).outcome is Outcome.CLIENT_GONE
    assert len(router.parts.admission) == 0
    answer.set()
    assert (await task)[0] == 200
    assert len(fleet.one.seen) == 1 and router.in_flight() == 0


async def test_a_retry_does_not_wait_again(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """Its first replica breaks off; the other is busy, and gets it nevertheless."""
    answers = {fleet.one.url: hold(fleet.one), fleet.two.url: hold(fleet.two)}
    router = await slow_router(fleet, replicas=2)
    task = asyncio.create_task(post(client, router, LONG))
    await eventually(lambda: bool(fleet.one.seen or fleet.two.seen))
    busy, other = (fleet.one, fleet.two) if fleet.one.seen else (fleet.two, fleet.one)
    other.will(cut_before_headers)
    assert (await post(client, router, SHORT))[0] == 200
    # The other one may be asked once more, if its connection had been used before.
    assert {*prompts_seen(other)} == {SHORT} and prompts_seen(busy) == [LONG, SHORT]
    answers[busy.url].set()
    assert (await task)[0] == 200
    assert router.in_flight() == 0


async def test_those_who_wait_are_told_when_no_replica_is_left(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    answer = hold(fleet.one)
    router = await slow_router(fleet)
    task = await first_in(client, router, fleet.one)
    waiting = asyncio.create_task(post(client, router, SHORT))
    await eventually(lambda: len(router.parts.admission) == 1)
    fleet.one.healthy = False
    status, error = await waiting
    assert (status, error["error"]["code"]) == (503, "no_replica")
    answer.set()
    assert (await task)[0] == 200
    assert router.in_flight() == 0


async def test_those_who_wait_are_served_while_the_router_stops(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    answer = hold(fleet.one)
    router = await slow_router(fleet)
    tasks = [await first_in(client, router, fleet.one)]
    tasks.append(asyncio.create_task(post(client, router, SHORT)))
    await eventually(lambda: len(router.parts.admission) == 1)
    stopping = asyncio.create_task(router.runner.cleanup())
    asyncio.get_running_loop().call_later(0.05, answer.set)
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]
    await stopping


async def test_those_who_cannot_be_served_before_the_router_stops_are_told(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    answer = hold(fleet.one)
    router = await slow_router(fleet, timeouts=TimeoutsConfig(drain_s=1.0))
    task = await first_in(client, router, fleet.one)
    waiting = asyncio.create_task(post(client, router, SHORT))
    await eventually(lambda: len(router.parts.admission) == 1)
    # The first request is not cut off after `drain_s`, however slow the machine is.
    router.runner._shutdown_timeout = 60.0
    stopping = asyncio.create_task(router.runner.cleanup())
    status, error = await waiting
    assert (status, error["error"]["code"]) == (503, "overloaded")
    answer.set()
    assert (await task)[0] == 200
    await stopping


async def test_a_burst_of_equal_prompts(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """Each replica computes it once at most; the others wait for that, and all are sent once."""
    prompt = "the same beginning " * 200
    answers = [hold(fleet.one), hold(fleet.two)]
    router = await slow_router(fleet, replicas=2)
    ids = [f"burst-{number}" for number in range(100)]
    tasks = [
        asyncio.create_task(post(client, router, prompt, **{"X-Request-Id": each})) for each in ids
    ]
    await eventually(
        lambda: len(router.parts.admission) + len(fleet.one.seen + fleet.two.seen) == 100
    )
    assert len(router.parts.admission) >= 98
    for answer in answers:
        answer.set()
    assert {status for status, _ in await asyncio.gather(*tasks)} == {200}
    seen = [each.headers["X-Request-Id"] for each in (*fleet.one.seen, *fleet.two.seen)]
    assert sorted(seen) == sorted(ids)
    await router.record(100)
    assert router.in_flight() == 0 and len(router.parts.admission) == 0


# --- cancelled in between, turn by turn of the loop


class Turns:
    """An admission without sockets, whose clock stands still."""

    def __init__(self) -> None:
        self.fleet: FleetState = make_learned_fleet()
        self.now_s = 0.0
        self.admission = AdmissionController(
            AdmissionQueue(RequestScheduler(self.fleet)), lambda: self.now_s
        )
        self.request = PlacementRequest(keys=PromptKeyCache(tokens(1000)))

    async def admit(self) -> None:
        """Be admitted and finish at once."""
        admitted = await self.admission.admit(self.request)
        admitted.ticket.finish(self.now_s, ok=False)

    def in_flight(self) -> int:
        return self.fleet.replicas["r0"].in_flight


async def waiting_turns() -> tuple[Turns, asyncio.Task[None], asyncio.Task[None]]:
    """Return one admission with a replica that is busy, and two who wait for it."""
    turns = Turns()
    busy = await turns.admission.admit(turns.request)
    first, second = (asyncio.create_task(turns.admit()) for _ in range(2))
    await asyncio.sleep(0)
    assert len(turns.admission) == 2 and turns.in_flight() == 1
    busy.ticket.finish(turns.now_s, ok=False)
    return turns, first, second


async def test_cancelled_after_its_release_and_before_it_wakes() -> None:
    """A dispatch has started its ticket; the client leaves before its handler runs again."""
    turns, first, second = await waiting_turns()
    turns.admission._dispatch()
    assert turns.in_flight() == 1 and len(turns.admission) == 1
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    turns.now_s += 1.0
    await second
    assert turns.in_flight() == 0 and len(turns.admission) == 0


async def test_released_after_its_cancellation_and_before_that_is_seen() -> None:
    """The client has left, but its handler has not run: a dispatch still finds it in the queue."""
    turns, first, second = await waiting_turns()
    first.cancel()
    turns.admission._dispatch()
    assert turns.in_flight() == 0, "given back at once"
    with pytest.raises(asyncio.CancelledError):
        await first
    turns.now_s += 1.0
    await second
    assert turns.in_flight() == 0 and len(turns.admission) == 0


async def test_released_after_the_router_was_told_to_stop() -> None:
    turns, first, second = await waiting_turns()
    turns.admission.close()
    turns.admission._dispatch()
    assert turns.in_flight() == 0
    for task in (first, second):
        with pytest.raises(OverloadedError):
            await task
    assert len(turns.admission) == 0
    await turns.admit()
