"""What is told of each request: headers of its answer, one log line, metrics for Prometheus.

`RequestRecord` is filled in while a request is under way, once for each value; `answer_headers`,
`log_record` and `Metrics` are made of it.

Called by proxy, feeds and the application. Imports residency, fleet and staging.
"""

from router.record.metrics import CONTENT_TYPE, Metrics
from router.record.records import (
    Cause,
    FailedTry,
    Outcome,
    RequestRecord,
    answer_headers,
    log_record,
)

__all__ = [
    "CONTENT_TYPE",
    "Cause",
    "FailedTry",
    "Metrics",
    "Outcome",
    "RequestRecord",
    "answer_headers",
    "log_record",
]
