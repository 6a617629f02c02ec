"""Requests through the router to scripted upstreams, with the clients that people use."""

import asyncio
from typing import Any

import aiohttp
import anthropic
import pytest
from aiohttp import web

from router.config.settings import ReplicaConfig
from router.record.records import Outcome
from tests.router.conftest import Fleet, Wait
from tests.router.proxy.helpers import ASK, openai_client
from tests.router.scripted import (
    CHAT_ANSWER,
    chat_events,
    json_answer,
    stream,
)

# --- what passes


async def test_an_answer_comes_through(fleet: Fleet) -> None:
    fleet.one.will(json_answer(CHAT_ANSWER))
    router = await fleet.router()
    async with openai_client(router) as client:
        raw = await client.chat.completions.with_raw_response.create(**ASK)
    assert raw.parse().choices[0].message.content == "hi"
    assert raw.headers["x-warmroute-replica"] == "one"
    assert raw.headers["x-warmroute-reason"] == "round-robin"
    assert raw.headers["x-warmroute-retries"] == "0"
    assert int(raw.headers["x-warmroute-prompt-tokens"]) > 0
    for tier in ("gpu", "cpu", "disk", "remote"):
        assert raw.headers[f"x-warmroute-matched-{tier}"] == "0"
    assert float(raw.headers["x-warmroute-predicted-ttft-ms"]) > 0
    record = await router.record()
    assert (record.outcome, record.status, record.replica_id) == (Outcome.OK, 200, "one")
    assert (record.cached_tokens, record.output_tokens) == (8, 1)
    assert record.request_id == raw.headers["x-request-id"]
    assert record.ttft_s is not None and not record.streamed
    assert router.in_flight() == 0


async def test_the_first_byte_of_a_stream_teaches(fleet: Fleet) -> None:
    """It ends the request's prefill, and the replica's rates learn from the time it took."""
    end = asyncio.Event()
    fleet.one.will(stream(*chat_events("a", "b"), gates=(None, end)))
    router = await fleet.router()
    replica = router.parts.fleet.replicas["one"]
    async with openai_client(router) as client:
        async for _ in await client.chat.completions.create(**ASK, stream=True):
            assert end.is_set() or (replica.waiting, replica.decoding) == (0, 1)
            end.set()
    await router.record()
    assert len(replica.errors) == 1


async def test_a_stream_is_not_buffered(fleet: Fleet) -> None:
    """Each event reaches the client before the upstream is allowed to send the next."""
    gates = (None, asyncio.Event(), asyncio.Event(), asyncio.Event())
    fleet.one.will(stream(*chat_events("a", "b", "c"), gates=gates))
    router = await fleet.router()
    said = ""
    async with openai_client(router) as client:
        async for chunk in await client.chat.completions.create(**ASK, stream=True):
            said += chunk.choices[0].delta.content or ""
            assert router.in_flight() == 1
            gate = gates[len(said)]
            assert gate is not None
            gate.set()
    assert said == "abc"
    record = await router.record()
    assert record.streamed and record.outcome is Outcome.OK
    assert router.in_flight() == 0


async def test_the_request_is_passed_byte_for_byte(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    router = await fleet.router()
    body = '{ "messages":[ {"role":"user","content":"\\u00e9 é 😀"} ],  "n" : 1.50, "model":"m"}'
    headers = {
        "Content-Type": "application/json",
        "Authorization": "Bearer mine",
        "X-Custom": "kept",
        "Keep-Alive": "timeout=5",
        "Accept-Encoding": "identity",
    }
    async with client.post(
        f"{router.url}/v1/chat/completions?a=b%20c", data=body.encode(), headers=headers
    ) as response:
        assert response.status == 200
    (seen,) = fleet.one.seen
    assert seen.body == body.encode()
    assert seen.path == "/v1/chat/completions?a=b%20c"
    assert seen.headers["Authorization"] == "Bearer mine"
    assert seen.headers["X-Custom"] == "kept"
    assert seen.headers["Host"] == fleet.one.url.removeprefix("http://")
    assert "Keep-Alive" not in seen.headers
    assert seen.headers["X-Request-Id"] == response.headers["X-Request-Id"]


async def test_a_replica_with_its_own_key_gets_that(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    replica = ReplicaConfig(url=fleet.one.url, api_key="theirs")
    router = await fleet.router(replicas=(replica,))
    async with client.post(
        f"{router.url}/v1/chat/completions", json=ASK, headers={"Authorization": "Bearer mine"}
    ) as response:
        assert response.status == 200
    assert fleet.one.seen[0].headers["Authorization"] == "Bearer theirs"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": ASK["messages"], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": ASK["messages"]}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
)
async def test_every_endpoint_is_proxied(
    fleet: Fleet, client: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> None:
    router = await fleet.router()
    async with client.post(router.url + path, json={"model": "m", **body}) as response:
        assert (response.status, await response.json()) == (200, {"ok": True})
    assert fleet.one.seen[0].path == path
    assert (await router.record()).endpoint == path
    assert router.in_flight() == 0


@pytest.mark.parametrize("status", [400, 404, 422, 501])
async def test_a_replicas_own_error_is_passed_on(
    fleet: Fleet, client: aiohttp.ClientSession, status: int
) -> None:
    fleet.one.will(json_answer({"error": {"message": "theirs"}}, status=status))
    router = await fleet.router()
    async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
        assert response.status == status
        assert (await response.json())["error"]["message"] == "theirs"
    assert not fleet.two.seen
    assert (await router.record()).outcome is Outcome.OK
    assert router.in_flight() == 0


async def test_anthropics_client(fleet: Fleet) -> None:
    answer = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 2, "output_tokens": 1, "cache_read_input_tokens": 8},
    }
    fleet.one.will(json_answer(answer))
    router = await fleet.router()
    async with anthropic.AsyncAnthropic(
        base_url=router.url, api_key="mine", max_retries=0
    ) as client:
        message = await client.messages.create(
            model="m", max_tokens=5, messages=[{"role": "user", "content": "hello"}]
        )
        assert message.content[0].to_dict()["text"] == "hi"
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(
                model="unknown", max_tokens=5, messages=[{"role": "user", "content": "hello"}]
            )
    assert caught.value.body == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": "no replica serves the model 'unknown'; served: m",
        },
    }
    assert "mine" in fleet.one.seen[0].headers["Authorization"]
    assert (await router.record()).cached_tokens == 8


async def test_a_session_comes_home(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    router = await fleet.router(policy="session")
    served = set()
    for turn in range(4):
        ask = {**ASK, "messages": [{"role": "user", "content": f"turn {turn}"}]}
        async with client.post(
            f"{router.url}/v1/chat/completions", json=ask, headers={"X-Session-Id": "s"}
        ) as response:
            served.add(response.headers["x-warmroute-replica"])
    assert len(served) == 1


async def test_a_previous_response_binds_hard(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    for upstream, name in ((fleet.one, "resp_1"), (fleet.two, "resp_2")):
        upstream.will(json_answer({"id": name, "object": "response", "output": []}))
    router = await fleet.router()
    url = f"{router.url}/v1/responses"
    for _ in range(2):
        async with client.post(url, json={"model": "m", "input": "x"}) as response:
            assert response.status == 200
    for name, replica in (("resp_2", "two"), ("resp_2", "two"), ("resp_1", "one")):
        ask = {"model": "m", "input": "y", "previous_response_id": name}
        async with client.post(url, json=ask) as response:
            assert response.headers["x-warmroute-replica"] == replica
            assert response.headers["x-warmroute-reason"] == "bound"


# --- ends and beginnings


async def test_no_replica_is_up(
    fleet: Fleet, client: aiohttp.ClientSession, dead_port: int
) -> None:
    dead = ReplicaConfig(url=f"http://127.0.0.1:{dead_port}")
    router = await fleet.router(replicas=(dead,))
    async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "no_replica"
    async with client.get(f"{router.url}/health") as response:
        assert response.status == 503


async def test_a_replica_that_falls_ill_is_spared_and_comes_back(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    router = await fleet.router()
    replica = router.parts.fleet.replicas["one"]
    fleet.one.healthy = False
    await eventually(lambda: replica.state == "down")
    async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
        assert response.headers["x-warmroute-replica"] == "two"
    fleet.one.healthy = True
    await eventually(lambda: replica.state == "up")


async def test_a_running_stream_outlives_the_order_to_stop(fleet: Fleet) -> None:
    gate = asyncio.Event()
    fleet.one.will(stream(*chat_events("a", "b"), gates=(None, gate)))
    router = await fleet.router()
    words = []
    async with openai_client(router) as client:
        async for chunk in await client.chat.completions.create(**ASK, stream=True):
            words.append(chunk.choices[0].delta.content)
            if len(words) == 1:
                stopping = asyncio.create_task(router.runner.cleanup())
                asyncio.get_running_loop().call_later(0.05, gate.set)
    await stopping
    assert words == ["a", "b"]


async def test_an_answer_that_says_nonsense_of_itself_is_released(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    async def act(request: web.Request) -> web.Response:
        return web.Response(body=b'{"id": "resp_\xff"}', content_type="application/json")

    fleet.one.will(act)
    router = await fleet.router()
    async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
        assert response.status == 200
        await response.read()
    assert (await router.record()).outcome is Outcome.OK
    assert router.in_flight() == 0


async def test_only_the_router_speaks_in_its_own_headers(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    async def act(request: web.Request) -> web.Response:
        said = {"X-Warmroute-Prefetch": "asked=9", "X-Warmroute-Replica": "me", "X-Kept": "1"}
        return web.json_response({}, headers=said)

    fleet.one.will(act)
    router = await fleet.router()
    async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
        assert response.headers["x-warmroute-replica"] == "one"
        assert "x-warmroute-prefetch" not in response.headers
        assert response.headers["x-kept"] == "1"
