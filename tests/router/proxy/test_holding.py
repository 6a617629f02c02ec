"""Requests that are held: until a replica is up, and with keep-alives to their clients."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from router.api.access import sha256_of
from router.config.settings import (
    AccessConfig,
    AdmissionConfig,
    KeyConfig,
    RatesConfig,
    ReplicaConfig,
    RequestLogConfig,
)
from router.membership.membership import Source
from router.record.records import Outcome
from tests.router.conftest import Fleet, Running, Wait
from tests.router.scripted import CHAT_ANSWER, chat_events, json_answer, stream

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hello"}],
}
KEEP_ALIVE = b": keep-alive\n\n"
PATIENT = AdmissionConfig(no_replica_wait_s=3600.0)
OFTEN = replace(PATIENT, keep_alive_s=0.01)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: ASK,
    "/v1/completions": {"model": "m", "prompt": "hello"},
    "/v1/responses": {"model": "m", "input": "hello"},
    "/v1/messages": ASK,
}


async def post(
    client: aiohttp.ClientSession, router: Running, path: str = CHAT, **changes: Any
) -> tuple[int, bytes]:
    headers = changes.pop("headers", {})
    body = BODIES[path] | changes
    async with client.post(f"{router.url}{path}", json=body, headers=headers) as response:
        return response.status, await response.read()


async def begin_empty(fleet: Fleet, admission: AdmissionConfig = PATIENT, **more: Any) -> Running:
    """Run a router that has no replica."""
    return await fleet.router(replicas=(), admission=admission, **more)


def join(router: Running, fleet: Fleet) -> None:
    """Let a replica come up, as discovery finds it."""
    config = ReplicaConfig(url=fleet.one.url, instance_id="one")
    router.parts.members.name(Source.DNS, [config])


# --- no replica


@pytest.mark.parametrize("policy", ["ttft", "round-robin"])
async def test_a_request_waits_for_the_first_replica(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait, policy: str
) -> None:
    fleet.one.will(json_answer(CHAT_ANSWER))
    router = await begin_empty(fleet, policy=policy)
    tasks = [asyncio.create_task(post(client, router)) for _ in range(3)]
    await eventually(lambda: len(router.parts.admission) == 3)
    async with client.get(f"{router.url}/health") as response:
        assert response.status == 200, "requests must reach it, so that a replica is started"
        assert (await response.json())["status"] == "no replica is up"
    async with client.get(f"{router.url}/metrics") as response:
        metrics = await response.text()
    assert 'warmroute_scaling_without_replica{model="m"} 3.0' in metrics
    assert 'warmroute_scaling_replicas{model="m"} 0.0' in metrics
    assert 'warmroute_table_entries{table="waiting"} 3.0' in metrics
    async with client.get(f"{router.url}/scaling") as response:
        (told,) = (await response.json())["models"]
    assert (told["model"], told["without_replica"], told["predicted_wait_s"]) == ("m", 3, None)
    join(router, fleet)
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 3
    record = await router.record()
    assert record.held_s and record.steps[0].name == "wait"
    assert len(router.parts.admission) == 0 and router.in_flight() == 0


async def test_without_the_setting_the_answer_is_503_at_once(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    router = await begin_empty(fleet, AdmissionConfig())
    assert (await post(client, router))[0] == 503
    async with client.get(f"{router.url}/health") as response:
        assert response.status == 503


async def test_one_that_is_down_is_waited_for(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    fleet.one.healthy = fleet.two.healthy = False
    router = await fleet.router(admission=PATIENT)
    task = asyncio.create_task(post(client, router))
    await eventually(lambda: len(router.parts.admission) == 1)
    fleet.two.healthy = True
    assert (await task)[0] == 200
    assert (await router.record()).replica_id == "two"


async def test_those_that_wait_for_a_busy_replica_wait_for_the_next_one(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    gate = asyncio.Event()
    fleet.one.will(stream(*chat_events("a"), gates=(gate,)))
    router = await fleet.router(
        policy="ttft",
        rates=RatesConfig(prefill_tokens_per_s=0.1),
        replicas=(ReplicaConfig(url=fleet.one.url, instance_id="one"),),
        admission=replace(PATIENT, max_wait_s=360_000.0),
    )
    first = asyncio.create_task(post(client, router, stream=True))
    await fleet.one.arrived.wait()
    second = asyncio.create_task(post(client, router, messages=ASK["messages"] * 2))
    await eventually(lambda: len(router.parts.admission) == 1)
    fleet.one.healthy = False
    await eventually(lambda: bool(router.parts.admission.without_replica()))
    fleet.one.healthy = True
    gate.set()
    assert [(await each)[0] for each in (first, second)] == [200, 200]
    assert router.in_flight() == 0


@pytest.mark.parametrize("by", ["client", "configuration"])
async def test_the_wait_is_bounded(fleet: Fleet, client: aiohttp.ClientSession, by: str) -> None:
    wait_s = 0.05 if by == "configuration" else 3600.0
    router = await begin_empty(fleet, AdmissionConfig(no_replica_wait_s=wait_s))
    headers = {"x-warmroute-max-wait-s": "0.05"} if by == "client" else {}
    status, answer = await post(client, router, headers=headers)
    error = json.loads(answer)["error"]
    assert (status, error["code"]) == (503, "no_replica")
    assert "within 0.05 s (admission.no_replica_wait_s" in error["message"]
    assert len(router.parts.admission) == 0


async def test_no_more_wait_than_may(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    router = await begin_empty(fleet, replace(PATIENT, max_waiting=1))
    task = asyncio.create_task(post(client, router))
    await eventually(lambda: len(router.parts.admission) == 1)
    status, answer = await post(client, router)
    assert status == 429 and b"admission.max_waiting" in answer
    assert (await router.record()).rejected == "full"
    join(router, fleet)
    assert (await task)[0] == 200


async def test_a_client_that_leaves_waits_no_more(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    router = await begin_empty(fleet)
    async with aiohttp.ClientSession() as leaving:
        task = asyncio.create_task(post(leaving, router))
        await eventually(lambda: len(router.parts.admission) == 1)
        task.cancel()
    assert (await router.record()).outcome is Outcome.CLIENT_GONE
    assert len(router.parts.admission) == 0


async def test_a_router_that_stops_refuses_those_that_wait(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    router = await begin_empty(fleet)
    task = asyncio.create_task(post(client, router))
    await eventually(lambda: len(router.parts.admission) == 1)
    router.parts.admission.close()
    status, answer = await task
    assert status == 503 and b"the router stops" in answer
    assert (await post(client, router))[0] == 503


async def test_a_model_that_nobody_ever_served_is_not_waited_for(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """One whose last replica has left is."""
    fleet.two.models = ["other"]
    router = await fleet.router(admission=PATIENT)
    assert (await post(client, router, model="none"))[0] == 404
    one = router.parts.fleet.replicas["one"]
    router.parts.members.name(Source.FILE, [router.parts.fleet.replicas["two"].config])
    await eventually(lambda: one.is_removed)
    task = asyncio.create_task(post(client, router))
    await eventually(lambda: router.parts.admission.without_replica() == {"m": 1})
    join(router, fleet)
    assert (await task)[0] == 200


# --- keep-alives


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_is_held_is_kept_alive(
    fleet: Fleet, client: aiohttp.ClientSession, path: str
) -> None:
    fleet.one.will(stream(*chat_events("a")))
    router = await begin_empty(fleet, OFTEN)
    body = BODIES[path] | {"stream": True}
    async with client.post(f"{router.url}{path}", json=body) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        assert response.headers["x-request-id"]
        assert "x-warmroute-replica" not in response.headers, "it is not known yet"
        for _ in range(3):
            assert await response.content.readexactly(len(KEEP_ALIVE)) == KEEP_ALIVE
        join(router, fleet)
        rest = await response.read()
    assert rest.replace(KEEP_ALIVE, b"") == b"".join(chat_events("a"))
    record = await router.record()
    assert (record.outcome, record.status, record.replica_id) == (Outcome.OK, 200, "one")


async def test_a_stream_held_for_a_busy_replica_is_kept_alive(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    gate = asyncio.Event()
    fleet.one.will(stream(*chat_events("a"), gates=(gate,)), stream(*chat_events("b")))
    router = await fleet.router(
        policy="ttft",
        rates=RatesConfig(prefill_tokens_per_s=0.1),
        replicas=(ReplicaConfig(url=fleet.one.url, instance_id="one"),),
        admission=AdmissionConfig(max_wait_s=360_000.0, keep_alive_s=0.01),
    )
    first = asyncio.create_task(post(client, router, stream=True))
    await fleet.one.arrived.wait()
    body = ASK | {"stream": True, "messages": ASK["messages"] * 2}
    async with client.post(f"{router.url}{CHAT}", json=body) as response:
        assert await response.content.readexactly(len(KEEP_ALIVE)) == KEEP_ALIVE
        gate.set()
        rest = await response.read()
    assert rest.replace(KEEP_ALIVE, b"") == b"".join(chat_events("b"))
    assert (await first) == (200, b"".join(chat_events("a")))
    assert router.in_flight() == 0


@pytest.mark.parametrize("changes", [{}, {"stream": False}])
async def test_a_whole_answer_is_not(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait, changes: dict[str, Any]
) -> None:
    router = await begin_empty(fleet, replace(OFTEN, no_replica_wait_s=0.1))
    status, answer = await post(client, router, **changes)
    assert status == 503 and json.loads(answer)["error"]["code"] == "no_replica"


async def test_none_is_sent_where_that_is_off(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    router = await begin_empty(fleet, AdmissionConfig(no_replica_wait_s=0.1, keep_alive_s=None))
    assert (await post(client, router, stream=True))[0] == 503


async def test_a_later_refusal_is_an_event(fleet: Fleet) -> None:
    """OpenAI's and Anthropic's clients raise it."""
    # Long enough that a keep-alive comes first, on a busy machine too.
    router = await begin_empty(fleet, replace(OFTEN, no_replica_wait_s=1.0))
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="x", max_retries=0) as ours:
        with pytest.raises(openai.APIError, match="no replica came up within"):
            async for _ in await ours.chat.completions.create(
                model="m", stream=True, messages=[{"role": "user", "content": "hello"}]
            ):
                pass
        with pytest.raises(openai.APIError, match="no replica came up within"):
            async for _ in await ours.responses.create(model="m", stream=True, input="hello"):
                pass
    async with anthropic.AsyncAnthropic(base_url=router.url, api_key="x", max_retries=0) as theirs:
        with pytest.raises(anthropic.APIError, match="no replica came up within"):
            async for _ in await theirs.messages.create(
                model="m",
                max_tokens=5,
                stream=True,
                messages=[{"role": "user", "content": "hello"}],
            ):
                pass
    record = await router.record(3)
    assert (record.outcome, record.status) == (Outcome.REFUSED, 200)
    assert "no replica came up" in str(record.error)


async def test_a_late_refusal_by_a_limit_is_counted(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    gate = asyncio.Event()
    fleet.one.will(stream(*chat_events("a"), gates=(gate,)))
    router = await fleet.router(
        policy="ttft",
        rates=RatesConfig(prefill_tokens_per_s=0.1),
        replicas=(ReplicaConfig(url=fleet.one.url, instance_id="one"),),
        admission=AdmissionConfig(max_wait_s=0.1, keep_alive_s=0.01),
    )
    first = asyncio.create_task(post(client, router, stream=True))
    await fleet.one.arrived.wait()
    status, answer = await post(client, router, stream=True, messages=ASK["messages"] * 2)
    assert status in (200, 429) and b"admission.max_wait_s" in answer
    assert (await router.record()).rejected == "deadline"
    gate.set()
    assert (await first)[0] == 200


async def test_an_error_of_the_replica_after_that_is_an_event(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(json_answer({"error": {"message": "too long", "code": 400}}, status=400))
    router = await begin_empty(fleet, OFTEN)
    async with client.post(f"{router.url}{CHAT}", json=ASK | {"stream": True}) as response:
        await response.content.readexactly(len(KEEP_ALIVE))
        join(router, fleet)
        rest = (await response.read()).replace(KEEP_ALIVE, b"")
    assert rest == b'data: {"error":{"message":"too long","code":400}}\n\n'


async def test_a_client_that_leaves_after_keep_alives_is_gone(
    fleet: Fleet, eventually: Wait
) -> None:
    router = await begin_empty(fleet, OFTEN)
    async with (
        aiohttp.ClientSession() as leaving,
        leaving.post(f"{router.url}{CHAT}", json=ASK | {"stream": True}) as response,
    ):
        await response.content.readexactly(len(KEEP_ALIVE))
    assert (await router.record()).outcome is Outcome.CLIENT_GONE
    assert len(router.parts.admission) == 0


# --- who may see the load


async def test_the_load_is_for_the_administration(
    fleet: Fleet, client: aiohttp.ClientSession, stranger: aiohttp.ClientSession
) -> None:
    keys = AccessConfig(keys=(KeyConfig(name="a", sha256=sha256_of("k")),))
    router = await fleet.router(access=keys)
    async with stranger.get(
        f"{router.url}/scaling", headers={"Authorization": "Bearer k"}
    ) as response:
        assert response.status in (401, 403)
    async with client.get(f"{router.url}/scaling") as response:
        (told,) = (await response.json())["models"]
    assert (told["model"], told["replicas"], told["binds"]) == ("m", 2, "prefill")
    assert [each["replicas"] for each in told["sizes"]] == [1, 2, 3]


# --- what a replay needs


async def test_hashes_of_prompts_are_recorded_where_that_is_on(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """Equal beginnings have equal hashes; a request that is refused while it waits has some too."""
    gate = asyncio.Event()
    fleet.one.will(stream(*chat_events("a"), gates=(gate,)))
    router = await fleet.router(
        policy="ttft",
        rates=RatesConfig(prefill_tokens_per_s=0.1),
        replicas=(ReplicaConfig(url=fleet.one.url, instance_id="one"),),
        admission=AdmissionConfig(max_wait_s=0.1),
        request_log=RequestLogConfig(prompt_hashes=True),
    )
    long = "word " * 2_000
    first = asyncio.create_task(
        post(client, router, "/v1/completions", prompt=long + "one", stream=True, user="me")
    )
    await fleet.one.arrived.wait()
    status, _ = await post(client, router, "/v1/completions", prompt=long + "two " * 1_000)
    assert status == 429
    gate.set()
    assert (await first)[0] == 200
    refused, answered = await router.record(1), await router.record(2)
    assert refused.prompt_hashes is not None and answered.prompt_hashes is not None
    shared = answered.prompt_hashes.hashes
    assert len(shared) > 5 and refused.prompt_hashes.hashes[: len(shared)] == shared
    assert len(refused.prompt_hashes.hashes) > len(shared)
    assert refused.prompt_hashes.session is None
    assert answered.prompt_hashes.session not in (None, "me")


async def test_else_none_are(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    router = await fleet.router()
    assert (await post(client, router))[0] == 200
    assert (await router.record()).prompt_hashes is None
