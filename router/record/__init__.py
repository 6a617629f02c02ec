"""What is told of each request: one log line, and metrics for Prometheus.

`Exchange` gathers what happened to a request; `RequestRecord` is what of it is logged and
counted. `Metrics` renders the figures of all.

Called by proxy, feeds and the application. Imports latency.
"""

from router.record.metrics import CONTENT_TYPE, Metrics, ReplicaGauges
from router.record.records import Cause, Exchange, FailedTry, Outcome, RequestRecord, log_record

__all__ = [
    "CONTENT_TYPE",
    "Cause",
    "Exchange",
    "FailedTry",
    "Metrics",
    "Outcome",
    "ReplicaGauges",
    "RequestRecord",
    "log_record",
]
