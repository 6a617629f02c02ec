"""Settings of what is told of requests: the request log, traces."""

from dataclasses import dataclass
from typing import Literal

from router.config.schema import setting


@dataclass(frozen=True, kw_only=True)
class RequestLogConfig:
    """One line for each request that has ended. None has any text of a prompt or an answer.

    Lines that cannot be written as fast as requests end are dropped, and counted by
    ``warmroute_records_dropped_total``.
    """

    format: Literal["text", "json"] = "text"
    """``json``: an object a line, each with all fields."""
    path: str | None = None
    """A file to append to (one that was moved away is made anew), or ``-`` for standard output.
    By default text goes to the router's log, as far as ``log_level`` lets it, and JSON to
    standard output."""


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """Traces of requests for OpenTelemetry; wants the extra ``otel``.

    Without the section a client's ``traceparent`` reaches the replica as it came.
    """

    endpoint: str = "http://127.0.0.1:4318"
    """Of a collector that takes OTLP over HTTP; ``/v1/traces`` is added where it has no path.
    ``OTEL_EXPORTER_OTLP_HEADERS`` and the other variables of the exporter hold as well."""
    service_name: str = "warmroute"
    """What traces say they come from."""
    sample_ratio: float = setting(1.0, at_least=0, at_most=1)
    """How many of the requests are traced that come without a ``traceparent``; others are if it
    says so."""
