"""What is told of each request: headers of its answer, a log line, metrics, traces.

`RequestRecord` is filled in while a request is under way, once for each value, and handed out at
its end. `answer_headers` are made of it; `Metrics` are for Prometheus. `Outlets` has it written
as a line (`request_log`: `text_line`, `json_line`) by a thread, and sent as spans.

Called by proxy, picker, feeds and the application. Imports config, failures, residency, fleet and
staging.
"""

from router.record.metrics import CONTENT_TYPE, Metrics
from router.record.outlets import Outlets
from router.record.records import (
    Cause,
    FailedTry,
    Outcome,
    RequestRecord,
    answer_headers,
    trace_context,
)

__all__ = [
    "CONTENT_TYPE",
    "Cause",
    "FailedTry",
    "Metrics",
    "Outcome",
    "Outlets",
    "RequestRecord",
    "answer_headers",
    "trace_context",
]
