"""Prefill at one scripted replica, decode at another; decisions are scripted too."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.config.settings import ReplicaConfig
from router.fleet.breaker import Circuit
from router.fleet.replica import PulledAnswers
from router.proxy.upstream import AttemptFailedError, ReplicaAnswer, Upstream
from router.record.records import Cause, Outcome
from tests.router.conftest import Fleet, Running, Wait
from tests.router.proxy.helpers import ASK, prefilling_at
from tests.router.scripted import (
    CHAT_ANSWER,
    Act,
    Scripted,
    chat_events,
    cut_before_headers,
    json_answer,
    scripted,
    stream,
)

CHAT = "/v1/chat/completions"
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "e"}
LENT = {**CHAT_ANSWER, "kv_transfer_params": PARAMS}


async def lend(request: web.Request) -> web.StreamResponse:
    """Answer a first leg; anything else is answered like a whole request."""
    body = await request.json()
    is_first = (body.get("kv_transfer_params") or {}).get("do_remote_decode") is True
    return web.json_response(LENT if is_first else CHAT_ANSWER)


@asynccontextmanager
async def three(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, moves_to: str | None = None
) -> AsyncIterator[tuple[Running, Scripted]]:
    """A router in front of three replicas, of which ``two`` prefills for ``one`` and ``three``.

    No tick lets one that was left alone prefill again a second later, but the test's own.
    """
    monkeypatch.setattr("router.app._TICK_S", 3600.0)
    async with scripted() as third:
        for each in (fleet.one, fleet.two, third):
            each.will(lend)
        urls = {"one": fleet.one.url, "two": fleet.two.url, "three": third.url}
        router = await fleet.router(
            replicas=tuple(
                ReplicaConfig(url=url, instance_id=name, nixl_role="both")
                for name, url in urls.items()
            )
        )
        prefilling_at(
            monkeypatch,
            lambda decision, replicas: (
                replicas.replicas["two"] if replicas.replicas["two"].nixl_role else None
            ),
            moves_to=moves_to,
        )
        yield router, third


def body_of(upstream: Scripted, at: int = -1) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(upstream.seen[at].body)
    return body


def check_ended(router: Running) -> None:
    """No request is in flight anywhere, in any phase."""
    for each in router.parts.fleet.replicas.values():
        assert (each.waiting, each.decoding, each.fetching, each.staged_tokens) == (0, 0, 0, 0)
        assert not each.queue.wait_s(1e12)


def with_refused_connections(monkeypatch: pytest.MonkeyPatch, upstream: Scripted) -> None:
    """Let no request reach an upstream; its health checks do."""
    send = Upstream.send

    async def sends(self: Upstream, method: str, url: str, **more: Any) -> ReplicaAnswer:
        if url.startswith(upstream.url):
            raise AttemptFailedError(Cause.CONNECT, "no connection")
        return await send(self, method, url, **more)

    monkeypatch.setattr(Upstream, "send", sends)


async def test_the_prompt_is_computed_at_one_replica_and_the_answer_at_another(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second leg has the client's own bytes, and the first one asks for no answer."""
    fleet.one.will(stream(*chat_events("a", "b")))
    async with three(fleet, monkeypatch) as (router, third):
        fleet.one.will(stream(*chat_events("a", "b")))
        sent = (
            b'{ "model":"m",  "messages":[{"role":"user","content":"\\u00e9"}], "stream":true,'
            b'"stream_options":{"include_usage":true},"min_tokens":9,"max_tokens":64 }'
        )
        async with client.post(router.url + CHAT, data=sent) as response:
            assert b'"b"' in await response.read()
            assert response.headers["x-warmroute-replica"] == "one"
            assert response.headers["x-warmroute-prefiller"] == "two"
            assert response.headers["x-warmroute-retries"] == "0"
        first = body_of(fleet.two)
        assert (first["stream"], first["max_tokens"], first["max_completion_tokens"]) == (
            False,
            1,
            1,
        )
        assert not {"stream_options", "min_tokens"} & first.keys()
        assert first["kv_transfer_params"] == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        assert body_of(fleet.one)["kv_transfer_params"] == PARAMS
        assert fleet.one.seen[0].body.endswith(sent.removeprefix(b"{ "))
        assert not third.seen
        record = await router.record()
        assert record.first_leg is not None and record.first_leg.replica_id == "two"
        assert record.cached_tokens == 8, "those of the first leg"
        assert [each.replica_id for each in record.tries] == ["two", "one"]
        check_ended(router)
        async with client.get(router.url + "/metrics") as response:
            metrics = await response.text()
        assert 'warmroute_remote_prefills_total{replica="two",result="done"} 1.0' in metrics
        assert 'warmroute_remote_prefill_seconds_count{replica="two"} 1.0' in metrics


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        ({"remote_prefill_cached_tokens": 2}, PulledAnswers(ended=1, counted_tokens=7)),
        ({"remote_prefill_cached_tokens": "2"}, PulledAnswers(ended=1, uncounted=1)),
        ({}, PulledAnswers(ended=1)),
    ],
)
async def test_what_the_metrics_of_the_replica_that_pulls_count_as_computed_is_noted(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    cached: dict[str, Any],
    expected: PulledAnswers,
) -> None:
    """vLLM counts the tokens that the prefiller had cached as cached at this replica."""
    async with three(fleet, monkeypatch) as (router, _):
        fleet.two.will(json_answer({**CHAT_ANSWER, "kv_transfer_params": PARAMS | cached}))
        async with client.post(router.url + CHAT, json=ASK) as response:
            await response.read()
        await router.record()
        assert router.parts.fleet.replicas["one"].pulled == expected


async def test_both_legs_are_in_flight_while_they_run(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Wait,
) -> None:
    """First at the prefiller, while the other replica computes nothing; then at the other."""
    may_prefill, may_answer = asyncio.Event(), asyncio.Event()

    async def slowly(request: web.Request) -> web.StreamResponse:
        await may_prefill.wait()
        return await lend(request)

    async with three(fleet, monkeypatch) as (router, _):
        fleet.two.will(slowly)
        fleet.one.will(stream(*chat_events("a"), gates=(may_answer,)))
        one, two = (router.parts.fleet.replicas[each] for each in ("one", "two"))
        answer = asyncio.create_task(client.post(router.url + CHAT, json={**ASK, "stream": True}))
        await fleet.two.arrived.wait()
        assert (one.waiting, one.fetching, two.waiting, two.fetching) == (1, 1, 1, 0)
        may_prefill.set()
        await fleet.one.arrived.wait()
        assert (one.waiting, one.fetching, two.in_flight) == (1, 0, 0)
        may_answer.set()
        async with await answer as response:
            await response.read()
        await router.record()
        check_ended(router)


async def test_the_answer_comes_from_the_replica_that_is_best_when_the_prompt_is_computed(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with three(fleet, monkeypatch, moves_to="three") as (router, third):
        async with client.post(router.url + CHAT, json=ASK) as response:
            assert await response.json() == CHAT_ANSWER
            assert response.headers["x-warmroute-replica"] == "three"
            assert response.headers["x-warmroute-prefiller"] == "two"
        assert body_of(third)["kv_transfer_params"] == PARAMS and not fleet.one.seen
        record = await router.record()
        assert [each.replica_id for each in record.tries] == ["two", "three"]
        assert (record.replica_id, record.cached_tokens, record.failed_tries) == ("three", 8, [])
        assert router.parts.fleet.replicas["one"].started == 1, "it was chosen at first"
        check_ended(router)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"best_of": 2},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"use_beam_search": True},
        {"prompt_embeds": "AAAA"},
        {"kv_transfer_params": {"do_remote_decode": True}},
        {"kv_transfer_params": None},
    ],
    ids=str,
)
async def test_what_one_replica_must_compute_alone_gets_one_leg(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
) -> None:
    async with three(fleet, monkeypatch) as (router, _):
        ask = {"model": "m", "prompt": "hello", **more}
        async with client.post(router.url + "/v1/completions", json=ask) as response:
            assert response.status == 200
        assert (len(fleet.one.seen), len(fleet.two.seen)) == (1, 0)
        assert body_of(fleet.one) == ask


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/v1/rerank"])
async def test_endpoints_without_an_answer_get_one_leg(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with three(fleet, monkeypatch) as (router, _):
        async with client.post(router.url + path, json={"model": "m", "input": "a"}) as response:
            assert response.status == 200
        assert (len(fleet.one.seen), len(fleet.two.seen)) == (1, 0)


@pytest.mark.parametrize(
    "asked",
    [
        ("/v1/completions", {"prompt": [1, 2, 3]}, "max_tokens"),
        ("/v1/messages", {"messages": ASK["messages"], "max_tokens": 9}, "max_tokens"),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 9}, "max_output_tokens"),
    ],
)
async def test_every_endpoint_with_an_answer_can_have_two_legs(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    asked: tuple[str, dict[str, Any], str],
) -> None:
    path, ask, limit = asked
    async with three(fleet, monkeypatch) as (router, _):
        async with client.post(router.url + path, json={"model": "m", **ask}) as response:
            assert response.status == 200
        first = body_of(fleet.two)
        assert first[limit] == 1 and first["stream"] is False
        assert first.get("store", False) is False, "nobody asks the prefiller for it later"
        assert body_of(fleet.one) == {"model": "m", **ask, "kv_transfer_params": PARAMS}


@pytest.mark.parametrize("shared", [True, False])
async def test_an_adapter_must_be_the_same_at_both(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Two replicas may have different adapters of one name."""
    async with three(fleet, monkeypatch) as (router, _):
        for each in (fleet.one, fleet.two):
            path = "/adapters/m" if shared or each is fleet.one else "/adapters/other"
            each.entries = [{"id": "base"}, {"id": "m", "root": path, "parent": "base"}]
        for name, each in (("one", fleet.one), ("two", fleet.two)):
            adapter = {"m": str((each.entries or [])[1]["root"]), "base": None}
            router.parts.fleet.set_models(name, adapter)
        async with client.post(router.url + CHAT, json=ASK) as response:
            assert response.status == 200
        assert len(fleet.two.seen) == (1 if shared else 0)
        assert ("kv_transfer_params" in body_of(fleet.one)) is shared
        await router.record()
        check_ended(router)


# --- the first leg fails


@pytest.mark.parametrize(
    "failing",
    [
        (json_answer({}, status=429), Cause.BUSY),
        (json_answer({}, status=500), Cause.ERROR),
        (json_answer({}, status=503), Cause.STATUS),
        (cut_before_headers, Cause.CUT),
        (stream(b'{"id": 1, "kv_tr', cut=True, content_type="application/json"), Cause.CUT),
        (json_answer({"error": {"message": "no"}}, status=400), Cause.PREFILL),
        (json_answer(CHAT_ANSWER), Cause.PREFILL),
        (json_answer({**CHAT_ANSWER, "kv_transfer_params": None}), Cause.PREFILL),
        (stream(b"not JSON", content_type="application/json"), Cause.PREFILL),
    ],
)
@pytest.mark.parametrize("retries", [2, 0])
async def test_a_first_leg_that_fails_is_no_failed_request(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    failing: tuple[Act, Cause],
    retries: int,
) -> None:
    """The prompt is computed where it is decoded; the record and the metrics say why."""
    act, cause = failing
    async with three(fleet, monkeypatch) as (router, third):
        object.__setattr__(router.parts.lifecycle.config, "retries", retries)
        fleet.two.will(act)
        router.parts.fleet.drain("two")
        async with client.post(router.url + CHAT, json=ASK) as response:
            assert response.status == 200
            assert response.headers["x-warmroute-replica"] in ("one", "three")
            assert "x-warmroute-prefiller" not in response.headers
        record = await router.record()
        tried = [(each.replica_id, each.cause, each.is_prefill) for each in record.failed_tries]
        assert tried == [("two", cause, True)]
        assert record.first_leg is None
        local = [*fleet.one.seen, *third.seen]
        assert len(local) == 1 and json.loads(local[0].body) == ASK
        check_ended(router)
        async with client.get(router.url + "/metrics") as response:
            metrics = await response.text()
        assert f'warmroute_failed_tries_total{{cause="{cause}",replica="two"}}' in metrics
        assert 'warmroute_remote_prefills_total{replica="two",result="failed"}' in metrics


async def test_a_prefiller_without_nixl_connector_is_named_once_and_left_alone(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with three(fleet, monkeypatch) as (router, _):
        fleet.two.will(json_answer(CHAT_ANSWER))
        two = router.parts.fleet.replicas["two"]
        for _ in range(4):
            async with client.post(router.url + CHAT, json=ASK) as response:
                assert response.status == 200
        told = [
            each.getMessage() for each in caplog.records if "NixlConnector" in each.getMessage()
        ]
        assert len(told) == 1 and "two has nixl_role 'both'" in told[0]
        assert two.nixl_role is None and two.breaker.state is Circuit.CLOSED
        first_legs = [each for each in fleet.two.seen if b"do_remote_decode" in each.body]
        assert len(first_legs) == 1
        # It is tried again, later each time, until it works.
        assert [two.nixl_due_s < 1e18, two.pause_nixl(0.0)] == [True, None]
        router.parts.fleet.tick(two.nixl_due_s)
        assert two.nixl_role == "both" and two.pause_nixl(0.0) == 2.0
        router.parts.fleet.tick(2.0)
        fleet.two.will(lend)
        async with client.post(router.url + CHAT, json=ASK) as response:
            assert response.status == 200
        await router.record(5)
        assert two.pause_nixl(0.0) == 1.0


async def test_a_prompt_that_breaks_replicas_reaches_two_in_either_leg(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefiller and one more; no breaker counts it."""
    async with three(fleet, monkeypatch) as (router, third):
        for each in (fleet.one, fleet.two, third):
            each.will(cut_before_headers)
        async with client.post(router.url + CHAT, json=ASK) as response:
            assert response.status == 502
        record = await router.record()
        causes = [(each.cause, each.is_prefill) for each in record.failed_tries]
        assert causes == [(Cause.CUT, True), (Cause.CUT, False)]
        asked = [bool(each.seen) for each in (fleet.one, fleet.two, third)]
        assert sum(asked) == 2
        breakers = [each.breaker for each in router.parts.fleet.replicas.values()]
        assert not any(each.state is not Circuit.CLOSED or each.why for each in breakers)
        check_ended(router)


# --- the second leg fails


async def test_kv_that_no_replica_has_seen_is_pulled_by_the_next(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica refuses connections: the prompt is not computed a second time."""
    with_refused_connections(monkeypatch, fleet.one)
    async with three(fleet, monkeypatch) as (router, third):
        router.parts.fleet.drain("two")
        async with client.post(router.url + CHAT, json=ASK) as response:
            assert response.status == 200
            assert response.headers["x-warmroute-prefiller"] == "two"
        record = await router.record()
        assert [(each.replica_id, each.cause) for each in record.failed_tries] == [
            ("one", Cause.CONNECT)
        ]
        assert body_of(third)["kv_transfer_params"] == PARAMS
        assert len(fleet.two.seen) == 1
        check_ended(router)


async def test_kv_whose_lease_may_have_ended_is_not_pulled(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lent a second time, to the replica that is asked next."""
    monkeypatch.setattr("router.proxy.remote_prefill._LEASE_S", -1.0)
    with_refused_connections(monkeypatch, fleet.one)
    async with three(fleet, monkeypatch) as (router, third):
        router.parts.fleet.drain("two")
        async with client.post(router.url + CHAT, json=ASK) as response:
            assert response.status == 200
        assert len(fleet.two.seen) == 2 and len(third.seen) == 1


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        (cut_before_headers, Cause.CUT),
        (json_answer({}, status=503), Cause.STATUS),
        (json_answer({}, status=429), Cause.BUSY),
    ],
)
async def test_kv_that_a_failed_replica_may_have_pulled_is_lent_again(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    act: Act,
    cause: Cause,
) -> None:
    """The prefiller may have freed it: other prompts' KV could be there now."""
    lends = 0

    async def lend_again(request: web.Request) -> web.StreamResponse:
        nonlocal lends
        if b'do_remote_decode":true' not in await request.read():
            return web.json_response(CHAT_ANSWER)
        lends += 1
        return web.json_response({**LENT, "kv_transfer_params": {**PARAMS, "lent": lends}})

    async with three(fleet, monkeypatch) as (router, third):
        fleet.two.will(lend_again)
        fleet.one.will(act)
        router.parts.fleet.drain("two")
        async with client.post(router.url + CHAT, json=ASK) as response:
            assert response.status == 200
        record = await router.record()
        assert record.failed_tries[0].cause is cause and not record.failed_tries[0].is_prefill
        seen = (*fleet.one.seen, *third.seen)
        pulled = [json.loads(each.body)["kv_transfer_params"]["lent"] for each in seen]
        assert pulled == [1, 2], "each is pulled by one replica only"
        check_ended(router)


async def test_a_pull_that_fails_is_answered_locally_by_the_same_replica_too(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM answers 500 where the prefiller has ended, which is not the fault of this replica."""

    async def fail_to_pull(request: web.Request) -> web.StreamResponse:
        is_pull = b"kv_transfer_params" in await request.read()
        return web.json_response({} if is_pull else CHAT_ANSWER, status=500 if is_pull else 200)

    async with three(fleet, monkeypatch) as (router, third):
        fleet.one.will(fail_to_pull)
        third.will(fail_to_pull)
        router.parts.fleet.drain("three")
        async with client.post(router.url + CHAT, json=ASK) as response:
            assert response.status == 200
        record = await router.record()
        assert [(each.replica_id, each.cause) for each in record.failed_tries] == [
            ("one", Cause.PULL)
        ]
        one = router.parts.fleet.replicas["one"]
        assert one.nixl_role is None, "it pulls nothing for a while"
        assert one.breaker.state is Circuit.CLOSED
        check_ended(router)


# --- the client leaves


@pytest.mark.parametrize("leg", ["first", "second", "moved"])
async def test_a_client_that_leaves_ends_the_leg_that_runs(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, leg: str
) -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    moves_to = "three" if leg == "moved" else None
    async with three(fleet, monkeypatch, moves_to=moves_to) as (router, third):
        asked = {"first": fleet.two, "second": fleet.one, "moved": third}[leg]
        asked.will(hang)
        answer = asyncio.create_task(client.post(router.url + CHAT, json=ASK))
        await asked.arrived.wait()
        answer.cancel()
        await asked.aborted.wait()
        record = await router.record()
        assert record.outcome is Outcome.CLIENT_GONE
        assert len(fleet.one.seen) == (1 if leg == "second" else 0)
        check_ended(router)


async def test_a_first_leg_of_an_earlier_try_is_not_recorded(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica that pulled has failed, and the client leaves while the prompt is lent again."""
    lent_again = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        lent_again.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with three(fleet, monkeypatch) as (router, _):
        fleet.two.will(lend, hang)
        fleet.one.will(cut_before_headers)
        answer = asyncio.create_task(client.post(router.url + CHAT, json=ASK))
        await lent_again.wait()
        answer.cancel()
        record = await router.record()
        assert (record.outcome, record.first_leg) == (Outcome.CLIENT_GONE, None)
        check_ended(router)


async def test_a_long_body_is_sent_on_as_it_is(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with three(fleet, monkeypatch) as (router, _):
        ask = {**ASK, "messages": [{"role": "user", "content": "é" * 150_000}]}
        async with client.post(router.url + CHAT, json=ask) as response:
            assert response.status == 200
        assert body_of(fleet.one) == {**ask, "kv_transfer_params": PARAMS}
        assert body_of(fleet.two)["messages"] == ask["messages"]


async def test_a_client_cannot_name_a_prefiller_to_a_sidecar(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """llm-d's routing sidecar would send the prompt to any host."""
    router = await fleet.router()
    headers = {"X-Prefiller-Host-Port": "127.0.0.1:1"}
    async with client.post(router.url + CHAT, json=ASK, headers=headers) as response:
        assert response.status == 200
    assert "x-prefiller-host-port" not in fleet.one.seen[0].headers
