"""Replicas that fail before and after the first byte, and clients that go away."""

import asyncio
import json
from typing import Any
from unittest.mock import Mock

import aiohttp
import openai
import pytest
from aiohttp import web

from router.config.settings import ReplicaConfig, TimeoutsConfig
from router.fleet.breaker import Circuit
from router.fleet.replica import ReplicaState
from router.proxy.upstream import AttemptFailedError, ReplicaAnswer, Upstream
from router.record.records import Cause, Outcome
from tests.router.conftest import Fleet, Running
from tests.router.proxy.helpers import ASK, openai_client
from tests.router.scripted import (
    CHAT_ANSWER,
    Act,
    chat_events,
    cut_before_headers,
    json_answer,
    scripted,
    stream,
)

# --- retries


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        (json_answer({}, status=429, **{"Retry-After": "1"}), Cause.BUSY),
        (json_answer({}, status=500), Cause.ERROR),
        (json_answer({}, status=502), Cause.STATUS),
        (json_answer({}, status=503), Cause.STATUS),
        (json_answer({}, status=504), Cause.STATUS),
        (cut_before_headers, Cause.CUT),
        (stream(cut=True), Cause.CUT),
    ],
    ids=["429", "500", "502", "503", "504", "cut-before-headers", "cut-before-first-byte"],
)
async def test_trouble_before_the_first_byte_is_retried(
    fleet: Fleet, act: Act, cause: Cause
) -> None:
    fleet.one.will(act)
    fleet.two.will(stream(*chat_events("a", "b")))
    router = await fleet.router()
    async with openai_client(router) as client:
        raw = await client.chat.completions.with_raw_response.create(**ASK, stream=True)
        words = [each.choices[0].delta.content async for each in raw.parse()]
    assert words == ["a", "b"]
    assert raw.headers["x-warmroute-replica"] == "two"
    assert raw.headers["x-warmroute-reason"] == "retry"
    assert raw.headers["x-warmroute-retries"] == "1"
    record = await router.record()
    assert [(each.replica_id, each.cause) for each in record.failed_tries] == [("one", cause)]
    assert router.in_flight() == 0


@pytest.mark.parametrize("cause", [Cause.LOCAL, Cause.CONNECT])
async def test_one_failed_connect_excludes_a_replica_from_this_request_only(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cause: Cause,
) -> None:
    """A probe decides whether it is up; what the router lacks itself is no reason to ask."""
    router = await fleet.router()
    send, failing = Upstream.send, True

    async def sends(upstream: Upstream, method: str, url: str, **more: Any) -> ReplicaAnswer:
        if failing and url.startswith(fleet.one.url):
            raise AttemptFailedError(cause, "no connection")
        return await send(upstream, method, url, **more)

    monkeypatch.setattr(Upstream, "send", sends)
    for _ in range(8):
        async with client.post(router.url + "/v1/chat/completions", json=ASK) as response:
            assert response.status == 200
            assert response.headers["x-warmroute-replica"] == "two"
    one = router.parts.fleet.replicas["one"]
    assert one.state is ReplicaState.UP and one.breaker.state is Circuit.CLOSED
    failing = False
    answered = set()
    for _ in range(2):
        async with client.post(router.url + "/v1/chat/completions", json=ASK) as response:
            answered.add(response.headers["x-warmroute-replica"])
    assert answered == {"one", "two"}
    assert "is down" not in caplog.text


async def test_a_protocol_that_was_not_asked_for_is_no_answer(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    async def switch(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 101 x\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")
        request.transport.close()
        return web.Response()

    fleet.one.will(switch)
    router = await fleet.router()
    async with client.post(
        router.url + "/v1/completions", json={"model": "m", "prompt": "x"}
    ) as response:
        assert response.status == 200
        assert response.headers["x-warmroute-replica"] == "two"


async def test_nobody_listening_is_retried_and_remembered(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """A replica dies; probes are rare here, so the request itself finds out."""
    async with scripted() as doomed:
        replicas = (
            ReplicaConfig(url=doomed.url, instance_id="doomed"),
            ReplicaConfig(url=fleet.one.url, instance_id="live"),
        )
        timeouts = TimeoutsConfig(health_interval_s=3600)
        router = await fleet.router(replicas=replicas, timeouts=timeouts)
    for turn in range(3):
        async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
            assert response.headers["x-warmroute-replica"] == "live"
            assert response.headers["x-warmroute-retries"] == ("0" if turn else "1")
    record = await router.record()
    assert record.failed_tries[0].cause is Cause.CONNECT
    assert router.in_flight() == 0


async def test_clients_are_not_told_where_replicas_are(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """Which ones were tried, and why in a word; the request log has all of it."""
    async with scripted() as gone:
        router = await fleet.router(
            replicas=(ReplicaConfig(url=gone.url, instance_id="gone"),),
            timeouts=TimeoutsConfig(health_interval_s=3600),
        )
    async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
        assert response.status == 503
        message = (await response.json())["error"]["message"]
    assert message == "no replica could be reached (gone: connect)"
    [tried] = (await router.record()).failed_tries
    assert gone.url.rpartition(":")[2] in tried.detail


async def test_the_last_refusal_is_the_replicas_own(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    for upstream in (fleet.one, fleet.two):
        upstream.will(
            json_answer({"error": {"message": "full"}}, status=503, **{"Retry-After": "9"})
        )
    router = await fleet.router()
    async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "9"
        assert (await response.json())["error"]["message"] == "full"
    assert (len(fleet.one.seen), len(fleet.two.seen)) == (1, 1)
    assert router.in_flight() == 0


async def test_retries_are_bounded(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    fleet.one.will(cut_before_headers)
    router = await fleet.router(retries=0)
    async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
        assert response.status == 502
        error = (await response.json())["error"]
    assert error["type"] == "upstream_error" and "broke off" in error["message"]
    assert not fleet.two.seen


async def test_no_first_byte_in_time(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    for upstream in (fleet.one, fleet.two):
        upstream.will(stream(b"late", gates=(asyncio.Event(),)))
    # Long enough that the requests reach the replicas, on a busy machine too.
    router = await fleet.router(timeouts=TimeoutsConfig(first_byte_s=0.5))
    async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
        assert response.status == 504
    await fleet.one.aborted.wait()
    await fleet.two.aborted.wait()
    assert router.in_flight() == 0


# --- cuts after the first byte


async def test_a_cut_stream_ends_with_an_error_event(fleet: Fleet) -> None:
    fleet.one.will(stream(*chat_events("a")[:1], cut=True))
    router = await fleet.router()
    said = ""
    async with openai_client(router) as client:
        with pytest.raises(openai.APIError, match="the replica's answer broke off"):
            async for chunk in await client.chat.completions.create(**ASK, stream=True):
                said += chunk.choices[0].delta.content or ""
    assert said == "a"
    assert not fleet.two.seen, "what has begun is not begun again"
    assert (await router.record()).outcome is Outcome.CUT
    assert router.in_flight() == 0


async def test_half_an_event_does_not_swallow_the_error(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    first = b'data: {"a": "\xc3\xa4"}'
    for end in (b"\n\n", b"\r\n\r\n", b"\r\r"):
        for cut_at in range(1, len(first + end)):
            half = (first + end)[:cut_at]
            fleet.one.will(stream(first + end, half, cut=True))
            fleet.two.will(stream(first + end + half, cut=True))
            # Dozens of routers run here: not one of them probes more than once.
            router = await fleet.router(timeouts=TimeoutsConfig(health_interval_s=3600.0))
            async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
                got = await response.read()
            assert got.startswith(first + end + b"data: "), (end, half)
            event = got.removeprefix(first + end + b"data: ")
            assert json.loads(event)["error"]["code"] == "upstream_failed"


async def test_a_cut_message_stream_ends_with_anthropics_event(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(stream(b"event: message_start\ndata: {}\n\n", cut=True))
    router = await fleet.router()
    async with client.post(f"{router.url}/v1/messages", json=ASK) as response:
        event = (await response.read()).decode().split("\n\n")[-2]
    name, data = event.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


async def test_a_cut_answer_that_is_no_stream_is_seen_to_be_cut(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(stream(b'{"half": ', cut=True, content_type="application/json"))
    router = await fleet.router()
    with pytest.raises(aiohttp.ClientError):
        async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
            await response.read()
    assert (await router.record()).outcome is Outcome.CUT
    assert router.in_flight() == 0


async def test_a_cut_stays_the_replicas_fault_where_the_client_does_not_hear_of_it(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client goes away while it is told that the replica broke off."""
    gone = Mock(side_effect=ConnectionResetError("the client has gone, too"))
    monkeypatch.setattr("router.proxy.relay.error_body", gone)
    fleet.one.will(stream(*chat_events("a")[:1], cut=True))
    router = await fleet.router()
    async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    record = await router.record()
    assert gone.called
    assert record.outcome is Outcome.CUT and record.error is not None
    async with client.get(f"{router.url}/metrics") as response:
        counted = await response.text()
    assert 'outcome="cut"' in counted and 'outcome="client-gone"' not in counted


# --- clients that go away


async def leave(
    router: Running, path: bytes = b"/v1/chat/completions", *, after: bytes | asyncio.Event
) -> None:
    """Send a request and close the connection once these bytes were read, or the event is set."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":")[-1]))
    body = json.dumps(ASK | {"prompt": "x", "input": "x"}).encode()
    writer.write(
        b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    if isinstance(after, bytes):
        await reader.readuntil(after)
    else:
        await after.wait()
    writer.close()


PATHS = [
    *(b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages"),
    *(b"/v1/embeddings", b"/v1/score", b"/v1/audio/speech"),
]


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_before_the_first_byte(fleet: Fleet, path: bytes) -> None:
    fleet.one.will(stream(b"never", gates=(asyncio.Event(),)))
    router = await fleet.router()
    await leave(router, path, after=fleet.one.arrived)
    await fleet.one.aborted.wait()
    assert (await router.record()).outcome is Outcome.CLIENT_GONE
    assert router.in_flight() == 0
    assert not fleet.two.seen


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_in_the_middle(fleet: Fleet, path: bytes) -> None:
    fleet.one.will(stream(b"data: one\n\n", b"never", gates=(None, asyncio.Event())))
    router = await fleet.router()
    await leave(router, path, after=b"data: one\n\n")
    await fleet.one.aborted.wait()
    record = await router.record()
    assert (record.outcome, record.status, record.response_bytes) == (
        Outcome.CLIENT_GONE,
        200,
        len(b"data: one\n\n"),
    )
    assert router.in_flight() == 0


async def test_a_client_that_leaves_while_an_endless_answer_flows(fleet: Fleet) -> None:
    fleet.one.will(stream(*([b"x" * 100_000] * 10_000)))
    router = await fleet.router()
    await leave(router, after=b"xxxx")
    await fleet.one.aborted.wait()
    assert (await router.record()).outcome is Outcome.CLIENT_GONE
    assert router.in_flight() == 0


async def test_many_at_once_and_nothing_stays_in_flight(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    acts = [
        stream(*chat_events("a")),
        stream(b"data: x\n\n", cut=True),
        json_answer({}, status=503),
        json_answer(CHAT_ANSWER),
        cut_before_headers,
    ] * 20
    fleet.one.will(*acts)
    fleet.two.will(*acts)
    router = await fleet.router()

    async def ask() -> None:
        async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
            await response.read()

    await asyncio.gather(*(ask() for _ in range(60)))
    await router.record(60)
    assert router.in_flight() == 0
