"""Replicas that hang, fall silent or fail again and again: found out, left alone, tried again."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.config.settings import BreakerConfig, ReplicaConfig, TimeoutsConfig
from router.fleet.breaker import Circuit
from router.record.records import Cause, Outcome
from tests.router.conftest import Fleet, Running, Wait
from tests.router.scripted import (
    Act,
    chat_events,
    cut_before_headers,
    json_answer,
    scripted,
    stream,
)

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
QUICK = TimeoutsConfig(health_interval_s=0.05, health_timeout_s=30.0)
SOON_SILENT = replace(QUICK, health_timeout_s=0.5)


async def ask(client: aiohttp.ClientSession, router: Running, **more: Any) -> tuple[int, str]:
    """Return the status, and which replica has answered."""
    async with client.post(router.url + CHAT, json={**ASK, **more}) as response:
        await response.read()
        return response.status, response.headers.get("x-warmroute-replica", "")


async def with_soon_silent(fleet: Fleet, eventually: Wait) -> Running:
    """Run a router that soon finds a replica silent, and has found all of them up."""
    router = await fleet.router(timeouts=SOON_SILENT)
    # A single late answer is enough for down at first.
    await eventually(
        lambda: all(each.state == "up" for each in router.parts.fleet.replicas.values())
    )
    return router


def hang(gate: asyncio.Event | None = None) -> Act:
    """Take a request and answer nothing."""
    return stream(b"late", gates=(gate or asyncio.Event(),))


# --- replicas that answer /health and compute nothing


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("is_sleeping", "it sleeps (/is_sleeping); POST /wake_up there wakes it"),
        ("is_paused", "it is paused (/is_paused); POST /resume there ends that"),
    ],
)
async def test_a_replica_that_stands_still_gets_nothing_until_it_computes_again(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait, field: str, why: str
) -> None:
    """Requests to a sleeping vLLM hang without end, and its /health answers."""
    fleet.one.standstill = {field: True}
    router = await fleet.router(timeouts=QUICK)
    fleet.one.will(hang())
    assert {await ask(client, router) for _ in range(4)} == {(200, "two")}
    async with client.get(f"{router.url}/replicas") as response:
        told = {each["id"]: each for each in await response.json()}
    assert (told["one"]["state"], told["one"]["why"]) == ("down", why)
    assert told["one"]["breaker"] == "closed"
    fleet.one.will(json_answer({"ok": True}))
    fleet.one.standstill = {}
    await eventually(lambda: router.parts.fleet.replicas["one"].state == "up")
    assert {await ask(client, router) for _ in range(2)} == {(200, "one"), (200, "two")}


async def test_the_gauge_of_sleep_counts_where_the_endpoints_are_hidden(
    fleet: Fleet, eventually: Wait
) -> None:
    gauge = 'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} '
    fleet.one.metrics = gauge + "0.0\n"
    router = await fleet.router(timeouts=QUICK)
    replica = router.parts.fleet.replicas["one"]
    await eventually(lambda: replica.state == "down" and "it sleeps" in replica.why_down)
    fleet.one.metrics = gauge + "1.0\n"
    await eventually(lambda: replica.state == "up")


async def test_requests_that_wait_at_a_replica_when_it_falls_asleep_are_sent_elsewhere(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """No breaker counts that: the replica was told to sleep."""
    fleet.one.standstill = {}
    fleet.one.will(hang())
    router = await fleet.router(timeouts=QUICK)
    asked = asyncio.create_task(ask(client, router))
    await fleet.one.arrived.wait()
    fleet.one.standstill = {"is_sleeping": True}
    assert await asked == (200, "two")
    record = await router.record()
    assert [each.cause for each in record.failed_tries] == [Cause.HUNG]
    one = router.parts.fleet.replicas["one"]
    assert not one.breaker._in_a_row


COMPUTED = "vllm:num_requests_running 1.0\nvllm:prompt_tokens_total 100.0\n"


@pytest.fixture
def soon_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.in_flight._LEAST_OVERDUE_S", 0.05)
    monkeypatch.setattr("router.feeds.health_monitor._STUCK_S", 0.0)
    monkeypatch.setattr("router.app._TICK_S", 0.02)


@pytest.mark.parametrize("path", [CHAT, "/v1/files"])
@pytest.mark.usefixtures("soon_overdue")
async def test_a_replica_that_computes_nothing_does_not_hold_requests_without_end(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait, path: str
) -> None:
    """Its engine hangs, and its server does not know: neither its tokens nor its KV change.

    Another replica answers the requests that may be repeated; the others get 504.
    """
    fleet.one.metrics = COMPUTED
    fleet.one.will(hang())
    router = await fleet.router(timeouts=QUICK)
    async with client.post(router.url + path, json=ASK) as response:
        assert response.status == (200 if path == CHAT else 504)
    record = await router.record()
    assert [each.cause for each in record.failed_tries] == [Cause.TIMEOUT]
    one = router.parts.fleet.replicas["one"]
    assert one.state == "down"
    assert "computes nothing" in one.why_down
    fleet.one.metrics = COMPUTED.replace("100", "101")
    await eventually(lambda: one.state == "up")


@pytest.mark.usefixtures("soon_overdue")
async def test_an_overdue_request_is_left_where_tokens_are_computed(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """A whole answer may take many minutes; so may a prompt behind those of other clients."""
    gate = asyncio.Event()
    fleet.one.will(stream(*chat_events("a"), gates=(gate,)))
    router = await fleet.router(timeouts=QUICK)
    asked = asyncio.create_task(ask(client, router))
    fleet.one.metrics = COMPUTED.replace("100", "{looks}")
    looks = fleet.one.looks
    await eventually(lambda: fleet.one.looks >= looks + 10)
    assert router.parts.fleet.replicas["one"].state == "up"
    gate.set()
    assert await asked == (200, "one")


# --- replicas that hang


async def test_requests_at_a_replica_that_hangs_are_sent_elsewhere(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """Nothing bounds the wait for a first byte; but its health checks are not answered either."""
    fleet.one.will(hang())
    router = await with_soon_silent(fleet, eventually)
    asked = [asyncio.create_task(ask(client, router)) for _ in range(2)]
    await fleet.one.arrived.wait()
    fleet.one.silent = True
    assert {await each for each in asked} == {(200, "two")}
    await fleet.one.aborted.wait()
    await router.record(2)
    (moved,) = (each for each in router.records if each.failed_tries)
    assert moved.failed_tries[0].cause is Cause.SILENT
    assert "/health does not answer within" in moved.failed_tries[0].detail
    assert router.in_flight() == 0
    assert len(router.parts.waits) == 0


async def test_a_stream_that_has_begun_there_is_left_alone(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    end = asyncio.Event()
    fleet.one.will(stream(*chat_events("a", "b"), gates=(None, end)))
    router = await with_soon_silent(fleet, eventually)
    async with client.post(router.url + CHAT, json=ASK) as response:
        await response.content.readany()
        fleet.one.silent = True
        await eventually(lambda: router.parts.fleet.replicas["one"].stall == "silent")
        end.set()
        assert b"[DONE]" in await response.read()
    assert (await router.record()).outcome is Outcome.OK


async def test_one_that_is_down_and_not_silent_may_end_what_it_has(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """As a server does that stops: it takes nothing new, and finishes."""
    gate = asyncio.Event()
    fleet.one.will(stream(*chat_events("a"), gates=(gate,)))
    router = await fleet.router(timeouts=QUICK)
    asked = asyncio.create_task(ask(client, router))
    await fleet.one.arrived.wait()
    fleet.one.healthy = False
    await eventually(lambda: router.parts.fleet.replicas["one"].state == "down")
    assert await ask(client, router) == (200, "two")
    gate.set()
    assert await asked == (200, "one")


async def test_a_request_goes_on_waiting_while_no_other_replica_is_up(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """A busy replica may not answer its health checks and yet finish; to give up would lose it."""
    fleet.one.will(hang())
    router = await with_soon_silent(fleet, eventually)
    fleet.two.healthy = False
    await eventually(lambda: router.parts.fleet.replicas["two"].state == "down")
    asked = asyncio.create_task(ask(client, router))
    await fleet.one.arrived.wait()
    fleet.one.silent = True
    await eventually(lambda: router.parts.fleet.replicas["one"].stall == "silent")
    assert len(router.parts.waits) == 1
    fleet.two.healthy = True
    assert await asked == (200, "two")
    assert router.in_flight() == 0


async def test_what_may_not_be_repeated_goes_on_waiting(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """A file may have been stored, a batch begun."""
    gate = asyncio.Event()
    fleet.one.will(hang(gate))
    router = await with_soon_silent(fleet, eventually)
    asked = asyncio.create_task(client.post(f"{router.url}/v1/files", data=b"x"))
    await fleet.one.arrived.wait()
    fleet.one.silent = True
    await eventually(lambda: router.parts.fleet.replicas["one"].stall == "silent")
    gate.set()
    async with await asked as response:
        assert await response.read() == b"late"
    assert not fleet.two.seen


async def test_a_sign_of_life_keeps_a_busy_replica_up(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """It streams to one client while it answers no health check."""
    beat = asyncio.Event()

    async def beating(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while not beat.is_set():
            await response.write(b"data: x\n\n")
            await asyncio.sleep(0.005)
        return response

    fleet.one.will(beating)
    router = await fleet.router(timeouts=replace(QUICK, health_timeout_s=0.3))
    replica = router.parts.fleet.replicas["one"]
    async with client.post(router.url + CHAT, json=ASK) as response:
        await response.content.readany()
        fleet.one.silent = True
        heard = fleet.one.unanswered
        await eventually(lambda: fleet.one.unanswered >= heard + 5)
        assert replica.state == "up"
        beat.set()
        await response.read()
    await eventually(lambda: replica.state == "down")


async def test_a_stream_that_says_nothing_more_is_ended(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(stream(b"data: one\n\n", b"never", gates=(None, asyncio.Event())))
    router = await fleet.router(timeouts=replace(QUICK, stream_idle_s=0.1))
    async with client.post(router.url + CHAT, json={**ASK, "stream": True}) as response:
        said = await response.read()
    assert said.startswith(b"data: one\n\n")
    assert b"the text so far is incomplete" in said
    await fleet.one.aborted.wait()
    record = await router.record()
    assert record.outcome is Outcome.CUT
    assert "timeouts.stream_idle_s" in (record.error or "")
    assert router.in_flight() == 0


async def test_a_stream_that_goes_on_may_last(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    """Longer than it may rest."""
    idle_s, sent = 2.0, 0

    async def slowly(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        until_s = time.monotonic() + 1.2 * idle_s
        while time.monotonic() < until_s:
            await response.write(b"data: x\n\n")
            sent += 1
            await asyncio.sleep(0.02)
        return response

    fleet.one.will(slowly)
    router = await fleet.router(timeouts=replace(QUICK, stream_idle_s=idle_s))
    async with client.post(router.url + CHAT, json={**ASK, "stream": True}) as response:
        assert await response.read() == b"data: x\n\n" * sent


async def test_a_client_that_never_reads_is_let_go(fleet: Fleet) -> None:
    fleet.one.will(stream(*([b"x" * 100_000] * 10_000)))
    router = await fleet.router(timeouts=replace(QUICK, stream_idle_s=0.1))
    _, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":")[-1]))
    body = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "x"}]}'
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    assert (await router.record()).outcome is Outcome.CLIENT_GONE
    await fleet.one.aborted.wait()
    assert router.in_flight() == 0
    writer.close()


# --- replicas that fail


@pytest.mark.parametrize(
    ("act", "timeouts"),
    [
        (json_answer({}, status=500), QUICK),
        (json_answer({}, status=503), QUICK),
        (cut_before_headers, QUICK),
        (stream(b"data: x\n\n", cut=True), QUICK),
        # The other replica answers within this time, on a busy machine too.
        (hang(), replace(QUICK, first_byte_s=1.0)),
    ],
    ids=["500", "503", "cut", "cut-later", "timeout"],
)
async def test_a_replica_that_fails_again_and_again_is_left_alone(
    fleet: Fleet, client: aiohttp.ClientSession, act: Act, timeouts: TimeoutsConfig
) -> None:
    fleet.one.will(act)
    # The half of ten where an answer begins before it is cut, else three in a row.
    breaker = BreakerConfig(failures_in_a_row=3, open_s=60.0)
    router = await fleet.router(breaker=breaker, timeouts=timeouts)
    replica = router.parts.fleet.replicas["one"]
    for _ in range(20):
        await ask(client, router, stream=True)
    assert replica.breaker.state is Circuit.OPEN
    seen = len(fleet.one.seen)
    for _ in range(5):
        assert await ask(client, router) == (200, "two")
    assert len(fleet.one.seen) == seen
    assert router.in_flight() == 0


@pytest.mark.parametrize("status", [400, 404, 422, 429, 501])
async def test_what_is_the_clients_fault_opens_nothing(
    fleet: Fleet, client: aiohttp.ClientSession, status: int
) -> None:
    fleet.one.will(json_answer({}, status=status))
    router = await fleet.router(breaker=BreakerConfig(failures_in_a_row=2))
    for _ in range(10):
        await ask(client, router)
    assert router.parts.fleet.replicas["one"].breaker.state is Circuit.CLOSED


async def test_clients_that_leave_open_nothing(fleet: Fleet) -> None:
    fleet.one.will(hang())
    router = await fleet.router(
        breaker=BreakerConfig(failures_in_a_row=2),
        replicas=(ReplicaConfig(url=fleet.one.url, instance_id="one"),),
    )
    for turn in range(4):
        async with aiohttp.ClientSession() as client:
            asked = asyncio.create_task(ask(client, router))
            await fleet.one.arrived.wait()
            asked.cancel()
            assert (await router.record(turn + 1)).outcome is Outcome.CLIENT_GONE
            fleet.one.arrived.clear()
    assert router.parts.fleet.replicas["one"].breaker.state is Circuit.CLOSED
    assert router.in_flight() == 0


async def test_a_replica_that_is_well_again_gets_one_request_and_then_all(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(json_answer({}, status=503))
    router = await fleet.router(breaker=BreakerConfig(failures_in_a_row=2, open_s=0.05))
    replica = router.parts.fleet.replicas["one"]
    while replica.breaker.state is Circuit.CLOSED:
        assert await ask(client, router) == (200, "two")
    gate = asyncio.Event()
    before = len(fleet.one.seen)
    fleet.one.arrived.clear()
    fleet.one.will(stream(*chat_events("a"), gates=(gate,)))
    trials = []
    while not fleet.one.arrived.is_set():
        trials.append(asyncio.create_task(ask(client, router)))
        await asyncio.wait([trials[-1]], timeout=0.05)
    assert len(fleet.one.seen) == before + 1
    assert await ask(client, router) == (200, "two"), "one at a time"
    gate.set()
    await asyncio.gather(*trials)
    assert str(replica.breaker.state) == "closed"
    assert {(await ask(client, router))[1] for _ in range(2)} == {"one", "two"}
    assert router.in_flight() == 0


async def test_a_fleet_that_fails_as_a_whole_is_still_asked(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    for upstream in (fleet.one, fleet.two):
        upstream.will(json_answer({}, status=503))
    router = await fleet.router(breaker=BreakerConfig(failures_in_a_row=2, open_s=60.0))
    for _ in range(6):
        assert (await ask(client, router))[0] == 503
    states = {each.breaker.state for each in router.parts.fleet.replicas.values()}
    assert states == {Circuit.OPEN}
    for upstream in (fleet.one, fleet.two):
        upstream.will(stream(*chat_events("a")))
    assert (await ask(client, router))[0] == 200


async def test_bursts_of_503_leave_nothing_in_flight_and_lose_nothing(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """One of three replicas fails in bursts and breaks off, while forty clients ask at once."""
    async with scripted() as third:
        bad = [json_answer({}, status=503), cut_before_headers, json_answer({}, status=502)] * 4
        good = [stream(*chat_events("a"))] * 4
        fleet.one.will(*((bad + good) * 10))
        for upstream in (fleet.two, third):
            upstream.will(stream(*chat_events("a")))
        replicas = tuple(
            ReplicaConfig(url=each.url, instance_id=name)
            for name, each in (("one", fleet.one), ("two", fleet.two), ("three", third))
        )
        breaker = BreakerConfig(open_s=0.02, max_open_s=0.1)
        router = await fleet.router(replicas=replicas, breaker=breaker)

        async def client_of_many() -> set[int]:
            return {(await ask(client, router))[0] for _ in range(10)}

        found = await asyncio.gather(*(client_of_many() for _ in range(40)))
        assert set().union(*found) == {200}
        await router.record(400)
        assert router.in_flight() == 0
        assert router.parts.fleet.replicas["one"].breaker.openings > 0
        for each in router.parts.fleet.replicas.values():
            each.breaker.check()
