"""OpenTelemetry spans, made from requests' records and sent in batches. Needs the extra ``otel``.

One span for the request (SERVER). Below it one for each step in the router (``read``, ``wait``,
``stage``, ``retry``) and one for each try at a replica (CLIENT). Below the last try
``stream``: from the answer's first byte to its end.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from router.config.settings import TracingConfig
from router.record.records import FailedTry, Outcome, RequestRecord, TraceContext, Try, new_span_id
from warmroute_common.addresses import without_password

_Value = str | bool | int | float
_SCOPE: Final = InstrumentationScope("warmroute")
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""By endpoint, as in OpenTelemetry's conventions for generative AI."""
_NO_ROUTE: Final = "other"
_SERVER_ERROR: Final = 500
_CLIENT_ERROR: Final = 400
_LONGEST: Final = 1000
"""Most characters of a text that a client wrote."""
_WELL: Final = frozenset({Outcome.OK, Outcome.ENDED, Outcome.REFUSED})


class SpanMaker:
    """Makes the spans of records."""

    def __init__(self, resource: Resource) -> None:
        """``resource`` describes the router in each span."""
        self._resource = resource

    def spans(self, record: RequestRecord) -> Iterator[ReadableSpan]:
        """Yield the spans of a request that has ended and is sampled."""
        trace = record.trace
        if trace is None or trace.span_id is None:
            return
        # The record's times are of the monotonic clock.
        since_1970_s = time.time() - time.monotonic()

        def span(
            name: str,
            began_s: float,
            ended_s: float,
            *,
            parent: str | None = trace.span_id,
            span_id: str | None = None,
            kind: SpanKind = SpanKind.INTERNAL,
            attributes: Mapping[str, _Value] | None = None,
            error: str | None = None,
        ) -> ReadableSpan:
            return ReadableSpan(
                name,
                context=_context(trace, span_id or new_span_id()),
                parent=None if parent is None else _context(trace, parent, is_remote=True),
                resource=self._resource,
                attributes=attributes or {},
                kind=kind,
                status=Status() if error is None else Status(StatusCode.ERROR, error),
                start_time=int((began_s + since_1970_s) * 1e9),
                end_time=int((ended_s + since_1970_s) * 1e9),
                instrumentation_scope=_SCOPE,
            )

        yield span(
            _name(record),
            record.started_s,
            record.ended_s,
            parent=trace.parent_id,
            span_id=trace.span_id,
            kind=SpanKind.SERVER,
            attributes=_known(_of_request(record)),
            error=_error(record),
        )
        for step in record.steps:
            yield span(step.name, step.began_s, step.ended_s)
        failures = iter(record.failed_tries)
        for tried in record.tries:
            failed = next(failures, None) if tried.prefilled_s is None else None
            ended_s, error = tried.prefilled_s, None
            if ended_s is None:
                ended_s = record.ended_s if failed is None else failed.ended_s
                error = _error(record) if failed is None else failed.detail
            yield span(
                _name(record),
                tried.began_s,
                ended_s,
                span_id=tried.span_id,
                kind=SpanKind.CLIENT,
                attributes=_known(_of_try(record, tried, failed)),
                error=error,
            )
        if record.first_byte_s is not None and record.streamed:
            last = record.tries[-1].span_id if record.tries else trace.span_id
            yield span("stream", record.first_byte_s, record.ended_s, parent=last)


def _context(trace: TraceContext, span_id: str, *, is_remote: bool = False) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if trace.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(int(trace.trace_id, 16), int(span_id, 16), is_remote, flags)


def _name(record: RequestRecord) -> str:
    """Return the method and the route; paths would make too many names."""
    if record.endpoint == _NO_ROUTE:
        return record.method
    return f"{record.method} {record.endpoint}"


def _error(record: RequestRecord) -> str | None:
    """Return why a request failed; None if it did not, or if its client caused it."""
    if record.outcome not in _WELL:
        return record.error or str(record.outcome)
    if record.status is not None and record.status >= _SERVER_ERROR:
        return record.error or f"status {record.status}"
    return None


def _of_request(record: RequestRecord) -> dict[str, _Value | None]:
    return {
        "http.request.method": record.method,
        "http.route": None if record.endpoint == _NO_ROUTE else record.endpoint,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "error.type": _error_type(record),
        **_of_generation(record),
        "warmroute.request_id": record.request_id,
        "warmroute.client_key": record.key,
        "warmroute.priority": record.priority,
        "warmroute.outcome": str(record.outcome),
        "warmroute.replica": record.replica_id,
        "warmroute.reason": record.reason,
        "warmroute.failed_tries": len(record.failed_tries),
        "warmroute.streamed": record.streamed,
        "warmroute.response_bytes": record.response_bytes,
        "warmroute.held_s": record.held_s,
        "warmroute.staged_s": record.prepared.waited_s,
        "warmroute.predicted_ttft_s": record.predicted_ttft_s,
        "warmroute.ttft_s": record.ttft_s,
        **{f"warmroute.matched_tokens.{tier}": n for tier, n in record.matched_tokens.items()},
    }


def _of_generation(record: RequestRecord) -> dict[str, _Value | None]:
    return {
        "gen_ai.operation.name": _OPERATIONS.get(record.endpoint),
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
    }


def _of_try(
    record: RequestRecord, tried: Try, failed: FailedTry | None
) -> dict[str, _Value | None]:
    parts = urlsplit(tried.url)
    known: dict[str, _Value | None] = {
        "http.request.method": record.method,
        "server.address": parts.hostname,
        "server.port": parts.port or {"http": 80, "https": 443}.get(parts.scheme),
        "url.full": without_password(tried.url) + record.path,
        "warmroute.replica": tried.replica_id,
    }
    if failed is not None:
        return {**known, "error.type": str(failed.cause)}
    if tried.prefilled_s is not None:
        return {**known, "warmroute.is_prefill": True}
    status = None if record.first_byte_s is None else record.status
    return {**known, "http.response.status_code": status, **_of_generation(record)}


def _error_type(record: RequestRecord) -> str | None:
    if _error(record) is None:
        return None
    return str(record.status if record.outcome in _WELL else record.outcome)


def _known(attributes: Mapping[str, _Value | None]) -> dict[str, _Value]:
    """Return the known attributes, with text shortened and valid as UTF-8."""
    return {
        name: _short(value) if isinstance(value, str) else value
        for name, value in attributes.items()
        if value is not None
    }


def _short(text: str) -> str:
    return text[:_LONGEST].encode(errors="replace").decode()


_EXPORT_S: Final = 5.0
"""How long sending a batch may take, with its retries."""
_LAST_SPANS_S: Final = 5.0
"""How long `Traces.stop` waits for the last spans."""
_ABORT_S: Final = 1.0
"""How long `Traces.stop` then waits for the exporter's thread to end."""
_SAMPLED: Final = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
_NO_RESOURCE: Final = Resource.get_empty()


class _Ended(ReadableSpan):
    """A record in OpenTelemetry's queue: its spans are made by the thread that sends them."""

    def __init__(self, record: RequestRecord) -> None:
        # The processor reads only the flag. Without a resource it would detect one each time.
        super().__init__("request", context=_SAMPLED, resource=_NO_RESOURCE)
        self.record = record


class _Exporter(SpanExporter):
    """Makes the spans of queued records and sends them."""

    def __init__(self, maker: SpanMaker, sender: SpanExporter) -> None:
        self._maker = maker
        self._sender = sender
        self._is_shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send the spans of some records."""
        records = [each.record for each in spans if isinstance(each, _Ended)]
        made = [span for record in records for span in self._maker.spans(record)]
        return self._sender.export(made)

    def shutdown(self) -> None:
        """Stop sending, and end the pause between two retries. Idempotent."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._sender.shutdown()


class Traces:
    """Takes records until `stop`."""

    def __init__(self, config: TracingConfig) -> None:
        resource = Resource.create(
            {"service.name": config.service_name, "service.version": version("warmroute")}
        )
        sender = OTLPSpanExporter(endpoint=config.endpoint, timeout=_EXPORT_S)
        self._exporter = _Exporter(SpanMaker(resource), sender)
        self._processor = BatchSpanProcessor(self._exporter)

    def take(self, record: RequestRecord) -> None:
        """Queue a request's spans if it is sampled; does not wait.

        When the queue is full, the oldest are dropped, and OpenTelemetry logs that.
        """
        trace = record.trace
        if trace is not None and trace.is_sampled and trace.span_id is not None:
            self._processor.on_end(_Ended(record))

    def stop(self) -> None:
        """Send the queued spans, for `_LAST_SPANS_S` at most, and end the exporter's threads."""
        # In a thread, since a collector that does not answer would delay the router's stop.
        ending = threading.Thread(target=self._processor.shutdown, daemon=True)
        ending.start()
        ending.join(_LAST_SPANS_S)
        # Otherwise its thread would continue to retry.
        self._exporter.shutdown()
        ending.join(_ABORT_S)
