"""Traces: what replicas are told, and what a real collector's port gets of a real router."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from router.config.loading import router_config
from router.config.settings import TracingConfig
from router.record.records import TraceContext, trace_context
from tests.router.agent_server import serving
from tests.router.conftest import Fleet, Running
from tests.router.proxy.helpers import prefilling_at
from tests.router.scripted import (
    CHAT_ANSWER,
    chat_events,
    cut_before_headers,
    json_answer,
    stream,
)
from warmroute_common.config_reader import ConfigError

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{CLIENT}-01"
CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last spans arrive on a slow machine, too."""
    for name in ("_EXPORT_S", "_LAST_SPANS_S"):
        monkeypatch.setattr(f"router.record.tracing.{name}", 60.0)


class Collector:
    """Takes spans as a collector does, by OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.hangs = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        return app

    async def _take(self, request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        for each in sent.resource_spans:
            self.resources.append(values(each.resource))
            self.spans += [span for scope in each.scope_spans for span in scope.spans]
        return web.Response(content_type="application/x-protobuf")

    def of(self, kind: Span.SpanKind.ValueType) -> list[Span]:
        found = [each for each in self.spans if each.kind == kind]
        return sorted(found, key=lambda each: each.start_time_unix_nano)


def values(of: Any) -> dict[str, Any]:
    found = {}
    for each in of.attributes:
        field = each.value.WhichOneof("value")
        found[each.key] = getattr(each.value, field)
    return found


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, TracingConfig]]:
    collector = Collector()
    async with serving(collector.app()) as url:
        yield collector, TracingConfig(endpoint=f"{url}/v1/traces")


async def ask(client: aiohttp.ClientSession, router: Running, **headers: str) -> None:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "secret words"}]}
    async with client.post(f"{router.url}{CHAT}", json=body, headers=headers) as response:
        await response.read()


async def test_a_request_and_its_parts_are_spans_of_the_clients_trace(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    async with collecting() as (collector, tracing):
        router = await fleet.router(tracing=tracing)
        fleet.one.will(stream(*chat_events("a", "b")))
        await ask(client, router, traceparent=SAMPLED, tracestate="vendor=1")
        await router.record()
        await router.runner.cleanup()  # sends what waits
    assert {each.trace_id.hex() for each in collector.spans} == {TRACE}
    (request,) = collector.of(Span.SPAN_KIND_SERVER)
    (sent,) = collector.of(Span.SPAN_KIND_CLIENT)
    inner = {each.name: each for each in collector.of(Span.SPAN_KIND_INTERNAL)}
    assert list(inner) == ["read", "wait", "stage", "stream"]
    assert request.parent_span_id.hex() == CLIENT
    assert {sent.parent_span_id} | {inner[name].parent_span_id for name in ("read", "wait")} == {
        request.span_id
    }
    assert inner["stream"].parent_span_id == sent.span_id
    for each in collector.spans:
        assert request.start_time_unix_nano <= each.start_time_unix_nano
        assert each.start_time_unix_nano <= each.end_time_unix_nano <= request.end_time_unix_nano
    (seen,) = [each for each in fleet.one.seen if each.path == CHAT]
    assert seen.headers["traceparent"] == f"00-{TRACE}-{sent.span_id.hex()}-01"
    assert seen.headers["tracestate"] == "vendor=1"
    assert (request.name, request.status.code) == (f"POST {CHAT}", Status.STATUS_CODE_UNSET)
    told = values(request)
    expected = {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "warmroute.replica": "one",
        "warmroute.reason": "round-robin",
        "warmroute.outcome": "ok",
        "warmroute.failed_tries": 0,
        "warmroute.streamed": True,
    }
    assert told | expected == told
    assert told["gen_ai.usage.input_tokens"] > 0 and told["warmroute.ttft_s"] > 0
    assert values(sent)["server.address"] == "127.0.0.1"
    assert values(sent)["server.port"] == int(fleet.one.url.rpartition(":")[2])
    (resource, *_) = collector.resources
    assert resource["service.name"] == "warmroute" and "service.version" in resource
    assert "secret words" not in str(collector.spans)


async def test_each_try_is_a_span_of_its_own(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    async with collecting() as (collector, tracing):
        router = await fleet.router(tracing=tracing)
        fleet.one.will(cut_before_headers)
        fleet.two.will(json_answer(CHAT_ANSWER))
        await ask(client, router)
        await router.record()
        await router.runner.cleanup()
    (request,) = collector.of(Span.SPAN_KIND_SERVER)
    first, second = collector.of(Span.SPAN_KIND_CLIENT)
    assert not request.parent_span_id, "the client sent no trace: this one begins here"
    assert (first.status.code, values(first)["error.type"]) == (Status.STATUS_CODE_ERROR, "cut")
    assert (second.status.code, values(second)["warmroute.replica"]) == (0, "two")
    assert values(second)["gen_ai.usage.cache_read.input_tokens"] == 8
    assert first.end_time_unix_nano <= second.start_time_unix_nano
    assert values(request)["warmroute.failed_tries"] == 1
    for upstream, span in ((fleet.one, first), (fleet.two, second)):
        # A try may be sent twice: on a connection that was used before, and on a new one.
        seen = {each.headers["traceparent"] for each in upstream.seen if each.path == CHAT}
        assert seen == {f"00-{request.trace_id.hex()}-{span.span_id.hex()}-01"}


async def test_the_prefill_at_another_replica_is_a_span_of_its_own(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended well, although the replica that was to decode failed after it."""
    prefilling_at(monkeypatch, lambda decision, replicas: replicas.replicas["two"])
    async with collecting() as (collector, tracing):
        router = await fleet.router(tracing=tracing)
        fleet.one.will(cut_before_headers)
        fleet.two.will(json_answer({**CHAT_ANSWER, "kv_transfer_params": {}}))
        await ask(client, router)
        await router.record()
        await router.runner.cleanup()
    prefill, cut, last = collector.of(Span.SPAN_KIND_CLIENT)
    told = [values(each) for each in (prefill, cut, last)]
    assert [each["warmroute.replica"] for each in told] == ["two", "one", "two"]
    assert [each.get("error.type") for each in told] == [None, "cut", None]
    assert [each.get("warmroute.is_prefill") for each in told] == [True, None, None]
    assert prefill.end_time_unix_nano <= cut.start_time_unix_nano
    assert [each.status.code for each in (prefill, cut, last)] == [0, Status.STATUS_CODE_ERROR, 0]


async def test_a_request_that_fails_says_so(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    async with collecting() as (collector, tracing):
        router = await fleet.router(tracing=tracing)
        fleet.one.will(stream(*chat_events("a")[:1], cut=True))
        with contextlib.suppress(aiohttp.ClientError):
            await ask(client, router)
        async with client.get(f"{router.url}/v1/nothing/of/ours") as response:
            assert response.status == 200
        await router.record(2)
        await router.runner.cleanup()
    cut, other = collector.of(Span.SPAN_KIND_SERVER)
    assert (cut.status.code, values(cut)["error.type"]) == (Status.STATUS_CODE_ERROR, "cut")
    assert (other.name, values(other)["url.path"]) == ("GET", "/v1/nothing/of/ours")


@pytest.mark.parametrize("said", [f"00-{TRACE}-{CLIENT}-00", None])
async def test_what_is_not_sampled_is_forwarded_and_not_sent(
    fleet: Fleet, client: aiohttp.ClientSession, said: str | None
) -> None:
    async with collecting() as (collector, tracing):
        router = await fleet.router(tracing=replace(tracing, sample_ratio=0.0))
        await ask(client, router, **({} if said is None else {"traceparent": said}))
        await router.record()
        await router.runner.cleanup()
    assert not collector.spans
    (seen,) = [each for each in fleet.one.seen if each.path == CHAT]
    told = seen.headers["traceparent"]
    assert told.endswith("-00") and CLIENT not in told
    assert said is None or TRACE in told


@pytest.mark.parametrize("said", [SAMPLED, "nonsense", None])
async def test_without_tracing_the_replica_gets_the_clients(
    fleet: Fleet, client: aiohttp.ClientSession, said: str | None
) -> None:
    router = await fleet.router()
    await ask(client, router, **({} if said is None else {"traceparent": said}))
    record = await router.record()
    (seen,) = [each for each in fleet.one.seen if each.path == CHAT]
    assert seen.headers.get("traceparent") == said
    assert (record.trace is not None and record.trace.trace_id) == (said == SAMPLED and TRACE)


async def test_a_collector_that_is_gone_costs_requests_nothing(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.record.tracing._LAST_SPANS_S", 0.2)
    router = await fleet.router(tracing=TracingConfig(endpoint="http://127.0.0.1:1/v1/traces"))
    for _ in range(3):
        await ask(client, router)
    record = await router.record(3)
    assert record.status == 200
    async with asyncio.timeout(20):
        await router.runner.cleanup()
    assert not [each for each in threading.enumerate() if "OtelBatch" in each.name], (
        "a thread that retries would use `random` during later tests, which Hypothesis refuses"
    )


async def test_a_missing_extra_is_named(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    monkeypatch.delitem(sys.modules, "router.record.tracing", raising=False)
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        await fleet.router(tracing=TracingConfig())


def test_the_settings() -> None:
    def endpoint(tracing: dict[str, Any]) -> Any:
        given = {"replicas": [{"url": "http://127.0.0.1:1"}], "tracing": tracing}
        return router_config(given, path="router.yaml").tracing

    assert endpoint({}).endpoint == "http://127.0.0.1:4318/v1/traces"
    assert endpoint({"endpoint": "https://c/own/path"}).endpoint == "https://c/own/path"
    with pytest.raises(ConfigError, match=r"tracing.endpoint: 'c:4318' is not an HTTP base URL"):
        endpoint({"endpoint": "c:4318"})
    with pytest.raises(ConfigError, match=r"write 'tracing: {}' for its defaults"):
        endpoint(None)  # type: ignore[arg-type]  # what YAML makes of an empty section


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"ff-{TRACE}-{CLIENT}-01",
        f"00-{TRACE}-{CLIENT}-01-more",
        f"00-{'0' * 32}-{CLIENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{CLIENT}-01",
        f"00-{TRACE}-{CLIENT}-1",
    ],
)
def test_a_header_that_is_none_counts_as_none(header: str) -> None:
    assert trace_context(header, None) is None
    begun = trace_context(header, 1.0)
    assert begun is not None and begun.parent_id is None and begun.trace_id != TRACE


def test_a_header_of_a_later_version_is_read() -> None:
    expected = TraceContext(trace_id=TRACE, parent_id=CLIENT, is_sampled=True)
    assert trace_context(f"01-{TRACE}-{CLIENT}-03-more", None) == expected


def test_the_ratio_is_of_traces_that_begin_here() -> None:
    begun = [trace_context(None, 0.25) for _ in range(4000)]
    sampled = sum(each.is_sampled for each in begun if each is not None)
    assert 800 < sampled < 1200
    told = trace_context(SAMPLED, 0.0)
    assert told is not None and told.is_sampled


async def test_what_was_opened_is_closed_where_the_rest_cannot_be(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    monkeypatch.delitem(sys.modules, "router.record.tracing", raising=False)
    with pytest.raises(ConfigError):
        await fleet.router(tracing=TracingConfig())
    assert "request log" not in {each.name for each in threading.enumerate()}
