"""The picker behind a real Envoy, as clients and replicas see the two."""

import asyncio
import io
import json
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from cacheengine.launch.vllm_launch import free_ports
from router.app import create_app
from router.config.settings import (
    AdmissionConfig,
    BreakerConfig,
    PrefetchConfig,
    RatesConfig,
    ReplicaConfig,
)
from router.fleet.breaker import Circuit
from router.fleet.replica import ReplicaState, Stall
from router.gateway import messages
from router.gateway.envoy_config import SUBSET, merge
from router.policy import Policy
from router.record.records import Cause, Outcome
from tests.router.conftest import Running, Wait
from tests.router.gateway.conftest import CHAT, RARELY, Change, Gateway, Settings, chat
from tests.router.scripted import (
    CHAT_ANSWER,
    chat_events,
    cut_before_headers,
    json_answer,
    scripted,
    stream,
)
from tests.router.staging.scripted_agent import ASK, running_agent
from tests.servers import make_certificates
from warmroute_common.admin_token import HEADER as _ADMIN_HEADER

ADMIN_HEADER = _ADMIN_HEADER.lower()


def by_parts(settings: Settings) -> Settings:
    """Make of our Envoy what other gateways are: all bodies are streamed through the picker."""
    [listener] = settings["static_resources"]["listeners"]
    http = listener["filter_chains"][0]["filters"][0]["typed_config"]
    namespaces = {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]}
    ask = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "failure_mode_allow": True,
        "message_timeout": "60s",
        "mutation_rules": {"allow_envoy": True},
        "metadata_options": {
            "forwarding_namespaces": namespaces,
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
        "processing_mode": {
            **dict.fromkeys(("request_body_mode", "response_body_mode"), "FULL_DUPLEX_STREAMED"),
            **dict.fromkeys(("request_header_mode", "response_header_mode"), "SEND"),
            **dict.fromkeys(("request_trailer_mode", "response_trailer_mode"), "SEND"),
        },
    }
    http["http_filters"] = [{"name": "picker", "typed_config": ask}, http["http_filters"][-1]]
    return settings


def as_it_is(settings: Settings) -> Settings:
    return settings


def in_http(own: Settings) -> Settings:
    """Return settings of Envoy's HTTP connection manager as an operator writes them."""
    chain = {"name": "clients", "filters": [{"name": "http", "typed_config": own}]}
    return {"static_resources": {"listeners": [{"name": "clients", "filter_chains": [chain]}]}}


def choosing_from(*endpoints: str) -> Change:
    """Have Envoy give the picker a subset, by metadata, as gateways do."""
    entry = {"metadata_namespace": "envoy.lb.subset_hint", "value": {SUBSET: list(endpoints)}}
    kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
    chosen = {"@type": kind, "metadata": [entry]}
    own = in_http({"http_filters": [{"name": "hint", "typed_config": chosen}]})
    return lambda settings: dict(merge(settings, own))


@pytest.mark.parametrize("change", [as_it_is, by_parts])
async def test_an_answer_comes_through_as_the_replica_gave_it(
    gateway: Gateway, client: aiohttp.ClientSession, change: Any
) -> None:
    # Its first part comes alone, so that the picker does not see the end as well.
    gate, rest = asyncio.Event(), asyncio.Event()
    events = chat_events("a", "b", "c" * 50_000)
    gateway.one.will(stream(*events, gates=(gate, rest)))
    picker, _ = await gateway.both(change)
    ask = chat("hello " * 20_000, stream=True)
    async with client.post(picker.url + CHAT, json=ask) as answer:
        assert answer.headers["x-warmroute-replica"] == "one"
        [replica, _] = picker.parts.fleet.replicas.values()
        assert (replica.waiting, replica.decoding) == (1, 0), "vLLM sends headers at once"
        gate.set()
        first = await answer.content.readexactly(len(events[0]))
        rest.set()
        assert first + await answer.read() == b"".join(events)
    record = await picker.record()
    assert (record.streamed, record.status, picker.in_flight()) == (True, 200, 0)
    assert record.outcome is (Outcome.OK if change is by_parts else Outcome.ENDED)
    assert len(replica.errors) == 1, "the time to first token was compared"
    [seen] = gateway.one.seen
    assert json.loads(seen.body) == ask


async def test_keep_alives_are_no_first_token(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    gate = asyncio.Event()
    gateway.one.will(stream(b": keep-alive\n\n", *chat_events("a"), gates=(None, gate)))
    picker, _ = await gateway.both()
    async with client.post(picker.url + CHAT, json=chat(stream=True)) as answer:
        assert await answer.content.readany() == b": keep-alive\n\n"
        await asyncio.sleep(0.05)
        gate.set()
        await answer.read()
    record = await picker.record()
    assert record.ttft_s is not None and record.ttft_s >= 0.05


@pytest.mark.parametrize("change", [as_it_is, by_parts])
async def test_a_whole_answer_tells_of_the_request(
    gateway: Gateway, client: aiohttp.ClientSession, change: Any
) -> None:
    gateway.one.will(json_answer(CHAT_ANSWER))
    picker, _ = await gateway.both(change)
    async with client.post(picker.url + CHAT, json=chat()) as answer:
        assert await answer.json() == CHAT_ANSWER
    record = await picker.record()
    assert (record.cached_tokens, record.output_tokens, record.outcome) == (8, 1, Outcome.OK)
    assert picker.in_flight() == 0


@pytest.mark.parametrize("change", [as_it_is, by_parts])
async def test_bodies_at_the_picker_have_a_bound(
    gateway: Gateway, client: aiohttp.ClientSession, change: Any
) -> None:
    """Those under way count, and what is parsed of them."""
    gateway.one.will(json_answer(CHAT_ANSWER))
    picker, _ = await gateway.both(change, max_body_bytes=2_000_000, max_bodies_bytes=1_000_000)
    for size, status in ((1_500_000, 503), (700_000, 503), (300_000, 200), (300_000, 200)):
        body = io.BytesIO(json.dumps(chat("x" * size)).encode())
        async with client.post(picker.url + CHAT, data=body) as answer:
            assert answer.status == status, await answer.text()
            if status == 503:
                assert "max_bodies_bytes" in (await answer.json())["error"]["message"]
    assert picker.picker._processor._bodies.held_bytes == 0


async def test_an_answer_has_each_of_our_headers_once(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    """Whatever the replica sends under these names."""
    theirs = {"x-request-id": "its own", "x-warmroute-replica": "me"}

    async def telling(_: web.Request) -> web.Response:
        return web.json_response(CHAT_ANSWER, headers=theirs)

    gateway.one.will(telling)
    picker, _ = await gateway.both()
    async with client.post(
        picker.url + CHAT, json=chat(), headers={"x-request-id": "mine"}
    ) as answer:
        assert answer.status == 200
        assert answer.headers.getall("x-request-id") == ["mine"]
        assert answer.headers.getall("x-warmroute-replica") == ["one"]


async def test_a_client_that_closes_after_the_last_event_got_all_of_it(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    """Where the picker sees the whole answer."""
    events = chat_events("a")
    gateway.one.will(stream(*events, b"", gates=(None, None, asyncio.Event())))
    picker, _ = await gateway.both(by_parts)
    async with client.post(picker.url + CHAT, json=chat(stream=True)) as answer:
        await answer.content.readuntil(events[-1])
    assert (await picker.record()).outcome is Outcome.OK


async def test_every_answer_has_the_id_of_its_record(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    """The picker's refusals too, and Envoy's own."""
    picker, _ = await gateway.both()
    for number, (path, body, status) in enumerate(
        (
            (CHAT, chat(), 200),
            (CHAT, chat() | {"messages": 1}, 400),
            (CHAT, chat() | {"model": "none"}, 404),
            ("/sleep", chat(), 404),
        )
    ):
        headers = {"X-Forwarded-For": "6.6.6.6"}
        async with client.post(picker.url + path, json=body, headers=headers) as answer:
            await answer.read()
            assert answer.status == status
            [told] = answer.headers.getall("x-request-id")
        if path == CHAT:
            record = await picker.record(number + 1)
            assert record.request_id == told
            assert record.client not in (None, "6.6.6.6"), "Envoy adds the peer's address"


async def test_a_clients_key_is_for_replicas_alone(
    gateway: Gateway, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def headers_of(sent: Any) -> dict[str, str]:
        names.extend(each.key for each in sent.headers.headers)
        return original(sent)

    original = messages.headers_of
    monkeypatch.setattr(messages, "headers_of", headers_of)
    picker, _ = await gateway.both()
    keys = {"Authorization": "Bearer mine", "X-Api-Key": "mine too", "X-Session-Id": "a"}
    async with client.post(picker.url + CHAT, json=chat(), headers=keys) as answer:
        assert answer.status == 200
    assert "x-session-id" in names and not {"authorization", "x-api-key"} & set(names)
    assert gateway.one.seen[0].headers["Authorization"] == "Bearer mine"


async def test_a_replica_gets_its_own_key(gateway: Gateway, client: aiohttp.ClientSession) -> None:
    gateway.one.will(json_answer(CHAT_ANSWER))
    replicas = (ReplicaConfig(url=gateway.one.url, api_key="secret"),)
    picker, _ = await gateway.both(replicas=replicas)
    keys = {"Authorization": "Bearer the-clients-own"}
    async with client.post(picker.url + CHAT, json=chat(), headers=keys) as answer:
        assert await answer.json() == CHAT_ANSWER
    assert gateway.one.seen[0].headers["Authorization"] == "Bearer secret"


async def test_the_second_turn_goes_where_the_first_is(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    picker, _ = await gateway.both(policy="ttft")
    for replica in (gateway.one, gateway.two):
        replica.will(json_answer({"ok": True}))  # nothing of how long it took is learned
    for text in ("a long question " * 200, "another question " * 200):
        turns = [{"role": "user", "content": text}]
        async with client.post(picker.url + CHAT, json={"messages": turns}) as first:
            home = first.headers["x-warmroute-replica"]
        turns += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
        async with client.post(picker.url + CHAT, json={"messages": turns}) as second:
            assert second.headers["x-warmroute-replica"] == home
            assert int(second.headers["x-warmroute-matched-gpu"]) > 500


async def test_what_lies_on_disk_is_promoted_before_the_gateway_is_told(
    gateway: Gateway, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """A client that leaves meanwhile is released."""
    agent = await gateway.stack.enter_async_context(running_agent())
    replica = ReplicaConfig(url=gateway.one.url, instance_id="one", agent_url=agent.url)
    # The wait for the promotion is long: Envoy reports that the client has left before it ends.
    picker, _ = await gateway.both(
        policy="ttft",
        replicas=(replica,),
        rates=RatesConfig(prefill_tokens_per_s=1.0),
        prefetch=PrefetchConfig(wait_cap_s=60.0),
    )
    agent.gate = asyncio.Event()
    url = f"{picker.url}/v1/completions"
    leaving = asyncio.create_task(client.post(url, json=ASK).__aenter__())
    await agent.arrived.wait()
    assert picker.in_flight() == 1
    leaving.cancel()
    await eventually(lambda: picker.in_flight() == 0)
    agent.gate.set()
    assert not gateway.one.seen
    async with client.post(url, json=ASK) as answer:
        assert answer.headers["x-warmroute-prefetch"].startswith("asked=")
    assert len(agent.asked) == 2 and len(gateway.one.seen) == 1


async def test_a_replica_that_refuses_is_made_good_by_the_next(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    async with scripted() as gone:
        replicas = tuple(
            ReplicaConfig(url=url, instance_id=name)
            for name, url in (("gone", gone.url), ("two", gateway.two.url))
        )
        picker, _ = await gateway.both(replicas=replicas, timeouts=RARELY)
    gateway.two.will(stream(*chat_events("a")))
    async with client.post(picker.url + CHAT, json=chat(stream=True)) as answer:
        assert await answer.read() == b"".join(chat_events("a"))
        assert answer.headers["x-warmroute-replica"] == "two"
    record = await picker.record()
    assert [(each.replica_id, each.cause) for each in record.failed_tries] == [
        ("gone", Cause.GATEWAY)
    ]
    assert (record.replica_id, picker.in_flight()) == ("two", 0)
    assert record.streamed is False, "when Envoy asked the second is not known: it teaches nothing"


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_replica_that_was_down_when_the_first_was_picked_answers_after_it(
    gateway: Gateway, client: aiohttp.ClientSession, eventually: Wait, *, hangs: bool
) -> None:
    """But not one that hangs."""
    gateway.timeouts = replace(gateway.timeouts, health_timeout_s=2.0)
    gateway.two.healthy, gateway.two.silent = False, hangs
    picker, _ = await gateway.both(policy="ttft")
    two = picker.parts.fleet.replicas["two"]
    await eventually(lambda: two.stall is Stall.SILENT if hangs else bool(two.why_down))
    gate = asyncio.Event()

    async def breaks_off_later(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return await cut_before_headers(request)

    gateway.one.will(breaks_off_later)
    asking = asyncio.create_task(post(client, picker))
    await gateway.one.arrived.wait()
    gateway.two.healthy = True
    await eventually(lambda: hangs or two.state is ReplicaState.UP)
    gate.set()
    assert await asking == (503 if hangs else 200)
    assert len(gateway.two.seen) == (0 if hangs else 1)
    record = await picker.record()
    assert (record.replica_id, picker.in_flight()) == ("one" if hangs else "two", 0)


async def test_a_request_is_tried_no_more_often_than_there_are_destinations(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    gateway.one.will(json_answer({"error": "not now"}, status=503))
    picker, _ = await gateway.both(choosing_from(gateway.one.url.removeprefix("http://")))
    async with client.post(picker.url + CHAT, json=chat()) as answer:
        assert answer.status == 503 and await answer.json() == {"error": "not now"}
    assert (len(gateway.one.seen), len(gateway.two.seen)) == (1, 0)
    record = await picker.record()
    assert record.failed_tries[0].cause is Cause.STATUS and picker.in_flight() == 0


async def test_only_an_endpoint_that_the_gateway_names_is_picked(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    """The gateway does it by metadata; a header of that name is the client's, and ignored."""
    two = gateway.two.url.removeprefix("http://")
    picker, _ = await gateway.both(choosing_from(two, "10.0.0.1:8000"))
    headers = {SUBSET: gateway.one.url.removeprefix("http://")}
    for _ in range(3):
        async with client.post(picker.url + CHAT, json=chat(), headers=headers) as answer:
            assert answer.headers["x-warmroute-replica"] == "two"
            assert answer.headers["x-warmroute-reason"] != "retry"


@pytest.mark.parametrize("change", [as_it_is, by_parts])
async def test_a_client_cannot_choose_its_replica(
    gateway: Gateway, client: aiohttp.ClientSession, change: Any
) -> None:
    picker, _ = await gateway.both(change)
    headers = {SUBSET: gateway.two.url.removeprefix("http://")}
    async with client.post(picker.url + CHAT, json=chat(), headers=headers) as answer:
        assert answer.headers["x-warmroute-replica"] == "one"


STEERING = {
    SUBSET: "{two}",
    "x-gateway-destination-endpoint": "{two}",
    "x-gateway-destination-endpoint-served": "{two}",
    "x-envoy-max-retries": "3",
    "x-envoy-retry-on": "5xx",
    "x-envoy-upstream-rq-timeout-ms": "1",
    "x-envoy-upstream-rq-per-try-timeout-ms": "1",
    "x-envoy-hedge-on-per-try-timeout": "true",
    ADMIN_HEADER: "a key",
}
"""Headers by which a client could choose its replica, or have a request repeated."""


@pytest.mark.parametrize("runs", [True, False], ids=["with-picker", "without-picker"])
async def test_a_client_steers_nothing_by_headers(
    gateway: Gateway, client: aiohttp.ClientSession, *, runs: bool
) -> None:
    picker, _ = await gateway.both()
    two = gateway.two.url.removeprefix("http://")
    headers = {name: value.format(two=two) for name, value in STEERING.items()}
    if not runs:
        await picker.picker.stop(0.0)
    for _ in range(4):
        async with client.post(picker.url + CHAT, json=chat(), headers=headers) as answer:
            assert answer.status == 200
    assert len(gateway.one.seen) == len(gateway.two.seen) == 2
    for each in gateway.one.seen + gateway.two.seen:
        set_by_picker = {"x-gateway-destination-endpoint"} if runs else set()
        assert {*STEERING} & {name.lower() for name in each.headers} == set_by_picker
    for replica in (gateway.one, gateway.two):
        replica.will(json_answer({"error": "not now"}, status=503))
    async with client.post(picker.url + "/v1/files", data=b"x", headers=headers) as answer:
        assert answer.status == 503
    assert len(gateway.one.seen) + len(gateway.two.seen) == 5


@pytest.mark.parametrize("endpoints", [(), ("10.0.0.1:1",)])
async def test_a_subset_without_a_replica_is_refused(
    gateway: Gateway, client: aiohttp.ClientSession, endpoints: tuple[str, ...]
) -> None:
    picker, _ = await gateway.both(choosing_from(*endpoints))
    async with client.post(picker.url + CHAT, json=chat()) as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "no_replica"
    assert not gateway.one.seen and picker.in_flight() == 0


async def test_what_is_refused_is_told_in_the_clients_words(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    picker, _ = await gateway.both()
    prompt: dict[str, Any] = {"prompt": "hello"}
    for path, body, status, said in (
        (CHAT, b"{", 400, "invalid_json"),
        ("/v1/messages", b"{}{", 400, "invalid_request_error"),
        ("/v1/completions", {**prompt, "model": "x"}, 404, "model_not_found"),
    ):
        data = body if isinstance(body, bytes) else json.dumps(body)
        async with client.post(picker.url + path, data=data) as answer:
            assert (answer.status, answer.content_type) == (status, "application/json")
            error = (await answer.json())["error"]
            assert said in (error.get("code"), error["type"])
    await picker.record(3)
    assert {each.outcome for each in picker.records} == {Outcome.REFUSED}
    assert not gateway.one.seen and picker.in_flight() == 0


async def test_a_full_queue_is_429_and_says_when_to_come_again(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    gate = asyncio.Event()
    picker = await busy(gateway, gate, AdmissionConfig(max_waiting=0))
    first = asyncio.create_task(post(client, picker))
    await gateway.one.arrived.wait()
    async with client.post(picker.url + CHAT, json=chat()) as answer:
        assert answer.status == 429 and int(answer.headers["Retry-After"]) > 0
        assert (await answer.json())["error"]["code"] == "rate_limit_exceeded"
    gate.set()
    assert await first == 200


async def test_a_client_that_leaves_the_queue_is_not_sent_on(
    gateway: Gateway, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    gate = asyncio.Event()
    picker = await busy(gateway, gate, AdmissionConfig())
    first = asyncio.create_task(post(client, picker))
    await gateway.one.arrived.wait()
    leaving = asyncio.create_task(post(client, picker))
    await eventually(lambda: len(picker.parts.admission) == 1)
    leaving.cancel()
    await eventually(lambda: len(picker.parts.admission) == 0)
    gate.set()
    assert await first == 200
    await picker.record(2)
    left, answered = picker.records
    assert left.outcome is Outcome.CLIENT_GONE
    # A gateway may hand over so short an answer in one part: then its end was seen.
    assert answered.outcome in (Outcome.OK, Outcome.ENDED)
    assert len(gateway.one.seen) == 1 and picker.in_flight() == 0


async def busy(gateway: Gateway, gate: asyncio.Event, admission: AdmissionConfig) -> Running:
    """Run a picker that predicts such long prefills that it holds all requests but one."""
    gateway.one.will(stream(*chat_events("a"), gates=(gate,)))
    picker, _ = await gateway.both(
        policy="ttft",
        admission=admission,
        rates=RatesConfig(prefill_tokens_per_s=1.0),
        replicas=(ReplicaConfig(url=gateway.one.url),),
    )
    return picker


async def post(client: aiohttp.ClientSession, picker: Running) -> int:
    async with client.post(picker.url + CHAT, json=chat(stream=True)) as answer:
        await answer.read()
        return answer.status


@pytest.mark.parametrize("change", [as_it_is, by_parts])
async def test_a_client_that_leaves_its_answer_is_released(
    gateway: Gateway, client: aiohttp.ClientSession, eventually: Wait, change: Any
) -> None:
    gateway.one.will(stream(*chat_events("a", "b"), gates=(None, asyncio.Event())))
    picker, _ = await gateway.both(change)
    answer = await client.post(picker.url + CHAT, json=chat(stream=True))
    await answer.content.readany()
    assert picker.in_flight() == 1
    answer.close()
    await gateway.one.aborted.wait()
    await eventually(lambda: picker.in_flight() == 0)
    assert (await picker.record()).outcome is Outcome.ENDED


async def test_what_a_killed_gateway_carried_is_released(
    gateway: Gateway, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    never = asyncio.Event()
    for replica in (gateway.one, gateway.two):
        replica.will(stream(*chat_events("a", "b"), gates=(None, never)))
    picker, envoy = await gateway.both()
    answers = [await client.post(picker.url + CHAT, json=chat(stream=True)) for _ in range(5)]
    for answer in answers:
        await answer.content.readany()
    assert picker.in_flight() == 5
    envoy.kill()
    await eventually(lambda: picker.in_flight() == 0)
    await picker.record(5)
    for answer in answers:
        with pytest.raises(aiohttp.ClientError):
            await answer.read()


async def test_answers_go_on_without_their_picker(
    gateway: Gateway, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    gate = asyncio.Event()
    events = chat_events("a", "b")
    gateway.one.will(stream(*events, gates=(None, gate)))
    gateway.two.will(json_answer(CHAT_ANSWER))
    picker, _ = await gateway.both()
    answer = await client.post(picker.url + CHAT, json=chat(stream=True))
    first = await answer.content.readany()
    await picker.picker.stop(0.0)
    await eventually(lambda: picker.in_flight() == 0)
    gate.set()
    assert first + await answer.read() == b"".join(events)
    async with client.post(picker.url + CHAT, json=chat()) as other:
        assert other.status == 200


async def test_a_picker_that_stops_does_not_wait_for_its_envoy_to_end(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    picker, _ = await gateway.both()
    gateway.one.will(json_answer(CHAT_ANSWER))
    async with client.post(picker.url + CHAT, json=chat()) as answer:
        assert await answer.json() == CHAT_ANSWER
    await asyncio.wait_for(picker.picker.stop(60.0), 20.0)
    assert picker.in_flight() == 0
    assert [each.outcome for each in picker.records] == [Outcome.OK]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("GET", "/v1/files?limit=1", None),
        ("POST", "/v1/audio/transcriptions", b"\x00 no JSON"),
        ("POST", "/tokenize", b'{"model": "m", "prompt": "a"}'),
    ],
)
async def test_what_has_no_prompt_is_answered_by_any_replica(
    gateway: Gateway,
    client: aiohttp.ClientSession,
    method: str,
    path: str,
    body: bytes | None,
) -> None:
    picker, _ = await gateway.both()
    async with client.request(method, picker.url + path, data=body) as answer:
        assert answer.headers["x-warmroute-replica"] == "one"
        await answer.read()
    assert (await picker.record()).reason == "round-robin" and picker.in_flight() == 0


async def test_a_defect_leaves_no_text_of_the_request_in_the_log(
    gateway: Gateway,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def quoting(*args: object, **named: object) -> NoReturn:
        raise ValueError(f"it begins with {'my'} {'secret'}")  # the trace has this very line

    monkeypatch.setattr(Policy, "parse", quoting)
    picker, _ = await gateway.both()
    async with client.post(picker.url + CHAT, json=chat()) as answer:
        assert answer.status == 500
        assert "the router failed" in (await answer.json())["error"]["message"]
    assert "ValueError" in caplog.text and "quoting" in caplog.text
    assert "my secret" not in caplog.text
    assert picker.in_flight() == 0


REFUSED = [
    ("POST", "/sleep?level=2"),
    ("POST", "/collective_rpc"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/load%5Flora_adapter"),
    ("POST", "/v1/../sleep"),
    ("POST", "/v1/%2e%2e/sleep"),
    ("POST", "/v1//x"),
    ("GET", "/v1/x%2F..%2F..%2Fmetrics"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/"),
    ("PROPFIND", "/v1/files"),
]


@pytest.mark.parametrize("runs", [True, False], ids=["with-picker", "without-picker"])
async def test_only_paths_that_clients_may_reach_are_reachable(
    gateway: Gateway, client: aiohttp.ClientSession, *, runs: bool
) -> None:
    """Envoy itself refuses them, so a picker that restarts opens nothing."""
    picker, _ = await gateway.both(passthrough=("/mine/*",))
    if not runs:
        await picker.picker.stop(0.0)
    for method, path in REFUSED:
        url = URL(picker.url + path, encoded=True)
        async with client.request(method, url) as answer:
            assert answer.status == 404, (method, path)
            error = (await answer.json())["error"]
            assert "'passthrough' in the router's configuration" in error["message"]
            assert error["code"] == "not_found"
    assert not gateway.one.seen and not gateway.two.seen
    for method, path in [
        ("GET", "/v1/files/a%2Fb"),
        ("POST", "/tokenize"),
        ("GET", "/mine/x"),
        ("GET", "/health"),
        ("POST", CHAT),
    ]:
        url = URL(picker.url + path, encoded=True)
        async with client.request(method, url, data=b"{}") as answer:
            assert answer.status != 404, (method, path)


@pytest.mark.parametrize("change", [as_it_is, by_parts])
async def test_a_request_that_breaks_replicas_reaches_two_and_opens_no_breaker(
    gateway: Gateway, client: aiohttp.ClientSession, change: Any
) -> None:
    """A prompt that kills one engine kills the next one too: Envoy must not feed it to a third."""
    async with scripted() as third:
        upstreams = (gateway.one, gateway.two, third)
        for each in upstreams:
            each.will(cut_before_headers)
        replicas = tuple(
            ReplicaConfig(url=each.url, instance_id=f"r{at}") for at, each in enumerate(upstreams)
        )
        breaker = BreakerConfig(failures_in_a_row=2, open_s=60.0)
        picker, _ = await gateway.both(change, replicas=replicas, retries=5, breaker=breaker)
        for turn in range(8):
            async with client.post(picker.url + CHAT, json=chat()) as answer:
                assert answer.status == 503
            await picker.record(turn + 1)
            assert sum(len(each.seen) for each in upstreams) == 2 * (turn + 1)
        states = {each.breaker.state for each in picker.parts.fleet.replicas.values()}
        assert states == {Circuit.CLOSED}
        await picker.picker.stop(0.0)
        for each in upstreams:
            each.seen.clear()
        async with client.post(picker.url + CHAT, json=chat()) as answer:
            assert answer.status in (500, 503)  # 500: Envoy lets no body by that is streamed
        assert sum(len(each.seen) for each in upstreams) <= 2


@pytest.mark.parametrize("change", [as_it_is, by_parts])
async def test_a_replica_whose_streams_begin_with_errors_attracts_no_requests(
    gateway: Gateway, client: aiohttp.ClientSession, change: Any
) -> None:
    """Envoy passes such an answer on; it is not a success, and its time is not a TTFT."""
    failing = b'data: {"error": {"message": "the engine is dead", "code": 500}}\n\n'
    gateway.one.will(stream(failing, b"data: [DONE]\n\n"))
    gateway.two.will(stream(*chat_events("a")))
    breaker = BreakerConfig(failures_in_a_row=2, open_s=60.0)
    picker, _ = await gateway.both(change, breaker=breaker)
    [one, two] = picker.parts.fleet.replicas.values()
    failed = 0
    for turn in range(8):
        async with client.post(picker.url + CHAT, json=chat(stream=True)) as answer:
            is_error = await answer.read() == failing + b"data: [DONE]\n\n"
        record = await picker.record(turn + 1)
        tries = [(each.replica_id, each.cause) for each in record.failed_tries]
        assert tries == [("one", Cause.ERROR)] * is_error
        assert (record.ttft_s is None) is is_error
        failed += is_error
    assert (failed, len(gateway.one.seen)) == (2, 2)
    assert (one.breaker.state, two.breaker.state) == (Circuit.OPEN, Circuit.CLOSED)
    assert not one.errors and picker.in_flight() == 0


@pytest.mark.parametrize("change", [as_it_is, by_parts])
async def test_a_request_that_must_not_be_repeated_gets_one_destination(
    gateway: Gateway, client: aiohttp.ClientSession, change: Any
) -> None:
    gateway.one.will(json_answer({"error": "not now"}, status=503))
    picker, _ = await gateway.both(change)
    async with client.post(picker.url + "/v1/files", data=b"x") as answer:
        assert answer.status == 503
    assert (len(gateway.one.seen), len(gateway.two.seen)) == (1, 0)
    [seen] = gateway.one.seen
    assert "," not in seen.headers["x-gateway-destination-endpoint"]
    await picker.record()
    assert picker.in_flight() == 0


async def test_without_a_picker_a_request_that_must_not_be_repeated_is_sent_once(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    for replica in (gateway.one, gateway.two):
        replica.will(json_answer({"error": "not now"}, status=503))
    picker, _ = await gateway.both()
    await picker.picker.stop(0.0)
    async with client.post(picker.url + "/v1/files", data=b"x") as answer:
        assert answer.status == 503
    assert len(gateway.one.seen) + len(gateway.two.seen) == 1


async def test_a_picker_with_a_certificate_is_asked_and_told_by_tls(
    gateway: Gateway, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    made = make_certificates(tmp_path)
    ports = gateway.config().picker
    assert ports is not None
    settings = replace(ports, certificate=str(made.server), key=str(made.key))
    picker, _ = await gateway.both(picker=settings)
    gateway.one.will(json_answer(CHAT_ANSWER))
    async with client.post(picker.url + CHAT, json=chat()) as answer:
        assert await answer.json() == CHAT_ANSWER
        assert answer.headers["x-warmroute-replica"] == "one"
    # The answer's call uses TLS too: without it the request would have no status.
    record = await picker.record()
    assert (record.status, record.outcome) == (200, Outcome.OK)


async def test_a_picker_with_authorities_answers_gateways_with_their_certificate_only(
    gateway: Gateway, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    made = make_certificates(tmp_path)
    config = gateway.config()
    assert config.picker is not None
    picker = replace(
        config.picker, certificate=str(made.server), key=str(made.key), client_ca=str(made.ca)
    )
    replicas = tuple(replace(each, api_key="theirs") for each in config.replicas)
    config = replace(config, picker=picker, replicas=replicas)
    running = await gateway.picker(config)
    envoy = await gateway.envoy(config)
    async with client.post(running.url + CHAT, json=chat()) as answer:
        await answer.read()
    assert not running.records, "it was asked by a gateway that has no certificate"
    [seen] = gateway.one.seen + gateway.two.seen
    assert "theirs" not in str(seen.headers)
    await asyncio.to_thread(envoy.kill)

    chain = {"certificate_chain": {"filename": str(made.server)}}
    certificate = {**chain, "private_key": {"filename": str(made.key)}}
    socket = {"typed_config": {"common_tls_context": {"tls_certificates": [certificate]}}}
    clusters = [{"name": "picker", "transport_socket": socket}]
    own = {"static_resources": {"clusters": clusters}}
    port = free_ports(1)[0]
    await gateway.envoy(replace(config, port=port), lambda settings: dict(merge(settings, own)))
    async with client.post(f"http://127.0.0.1:{port}{CHAT}", json=chat()) as answer:
        assert answer.headers["x-warmroute-replica"] in ("one", "two")
    keys = [each.headers.get("Authorization") for each in gateway.one.seen + gateway.two.seen]
    assert keys.count("Bearer theirs") == 1


async def test_the_pickers_own_port_sends_nothing_to_replicas(
    gateway: Gateway, stranger: aiohttp.ClientSession
) -> None:
    """Else whoever reaches it would use the replicas with their keys, past the gateway."""
    config = gateway.config()
    replicas = tuple(replace(each, api_key="theirs") for each in config.replicas)
    app = create_app(replace(config, replicas=replicas), picks=True)
    async with TestServer(app, handler_cancellation=True) as server:
        for method, path in (
            ("POST", CHAT),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
            ("GET", "/v1/models"),
            ("GET", "/v1/files/x"),
            ("GET", "/version"),
        ):
            async with stranger.request(method, server.make_url(path), json=chat()) as answer:
                assert answer.status == 404, path
        async with stranger.get(server.make_url("/health")) as answer:
            assert answer.status == 200
        async with stranger.get(server.make_url("/metrics")) as answer:
            assert answer.status == 401
    assert not gateway.one.seen and not gateway.two.seen


async def test_an_operators_own_settings_are_merged_in(
    gateway: Gateway, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """TLS, a limit and an access log, in Envoy's own words."""
    made = make_certificates(tmp_path)
    log = tmp_path / "access"
    kinds = "type.googleapis.com/envoy.extensions"
    pair = {"certificate_chain": {"filename": made.server}, "private_key": {"filename": made.key}}
    tls = {
        "@type": f"{kinds}.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": {"tls_certificates": [pair]},
    }
    to_file = {"@type": f"{kinds}.access_loggers.file.v3.FileAccessLog", "path": log}
    limit = {"virtual_hosts": [{"name": "replicas", "request_body_buffer_limit": 1000}]}
    own = in_http(
        {
            "access_log": [{"name": "file", "typed_config": to_file}],
            "route_config": limit,
        }
    )
    [listener] = own["static_resources"]["listeners"]
    listener["per_connection_buffer_limit_bytes"] = 1000
    listener["filter_chains"][0]["transport_socket"] = {"name": "tls", "typed_config": tls}
    picker, envoy = await gateway.both(
        lambda settings: merge(settings, json.loads(json.dumps(own, default=str)))
    )
    trusting = ssl.create_default_context(cafile=str(made.ca))
    url = picker.url.replace("http:", "https:") + CHAT
    async with client.post(url, json=chat(), ssl=trusting) as answer:
        assert answer.status == 200
    async with client.post(url, json=chat("hello " * 1000), ssl=trusting) as answer:
        assert answer.status == 413
    envoy.terminate()
    assert f"POST {CHAT} HTTP/1.1" in log.read_text()


@pytest.mark.parametrize("change", [as_it_is, by_parts])
@pytest.mark.parametrize("numbers", [False, True])
async def test_vllm_gets_the_pickers_priority_instead_of_the_clients(
    gateway: Gateway, client: aiohttp.ClientSession, change: Change, numbers: bool
) -> None:
    """The header goes before the number in the body, which the gateway does not change."""
    admission = AdmissionConfig(replica_priorities=numbers, keyless_priority="batch")
    picker, _ = await gateway.both(change, admission=admission)
    gateway.one.will(json_answer(CHAT_ANSWER))
    gateway.two.will(json_answer(CHAT_ANSWER))
    for body in (chat(priority=-7), chat()):
        async with client.post(
            picker.url + CHAT, json=body, headers={"x-vllm-priority": "-9"}
        ) as answer:
            assert answer.status == 200, await answer.text()
    seen = [*gateway.one.seen, *gateway.two.seen]
    assert [each.headers["x-vllm-priority"] for each in seen] == ["1" if numbers else "0"] * 2
