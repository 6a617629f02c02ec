"""Sending records as spans to a collector, by OpenTelemetry's own batches. Needs ``otel``.

The queue holds records. Their spans are made by the thread that sends them.
"""

import threading
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from router.config import TracingConfig
from router.record.records import RequestRecord
from router.record.spans import SpanMaker

_EXPORT_S: Final = 5.0
"""How long a batch may take to be sent, tries after the first included."""
_LAST_SPANS_S: Final = 5.0
"""How long the router's end waits for what is still to be sent."""
_SAMPLED: Final = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
_NO_RESOURCE: Final = Resource.get_empty()


class _Ended(ReadableSpan):
    """Stands for all spans of a record while it waits."""

    def __init__(self, record: RequestRecord) -> None:
        # The processor looks at the flag alone. Without a resource one would be found out anew.
        super().__init__("request", context=_SAMPLED, resource=_NO_RESOURCE)
        self.record = record


class _Exporter(SpanExporter):
    """Makes the spans of records, and has them sent."""

    def __init__(self, maker: SpanMaker, sender: SpanExporter) -> None:
        self._maker = maker
        self._sender = sender

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send the spans of some records."""
        records = [each.record for each in spans if isinstance(each, _Ended)]
        made = [span for record in records for span in self._maker.spans(record)]
        return self._sender.export(made)

    def shutdown(self) -> None:
        """End sending."""
        self._sender.shutdown()


class Traces:
    """Takes records until `stop`."""

    def __init__(self, config: TracingConfig) -> None:
        resource = Resource.create(
            {"service.name": config.service_name, "service.version": version("warmroute")}
        )
        sender = OTLPSpanExporter(endpoint=config.endpoint, timeout=_EXPORT_S)
        self._processor = BatchSpanProcessor(_Exporter(SpanMaker(resource), sender))

    def take(self, record: RequestRecord) -> None:
        """Have a request's spans sent if it is sampled; does not wait.

        Where more wait than may, the oldest are dropped; OpenTelemetry's log says so.
        """
        trace = record.trace
        if trace is not None and trace.is_sampled and trace.span_id is not None:
            self._processor.on_end(_Ended(record))

    def stop(self) -> None:
        """Send what waits, for `_LAST_SPANS_S` at most."""
        # A collector that does not answer would hold up the router's end for its own time.
        ending = threading.Thread(target=self._processor.shutdown, daemon=True)
        ending.start()
        ending.join(_LAST_SPANS_S)
