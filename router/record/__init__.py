"""What is recorded of each request: answer headers, log lines, metrics, traces."""

from router.record.metrics import CONTENT_TYPE, Metrics
from router.record.outlets import Outlets
from router.record.records import (
    Cause,
    FailedTry,
    Outcome,
    RecordReader,
    RecordReaders,
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
    "RecordReader",
    "RecordReaders",
    "RequestRecord",
    "answer_headers",
    "trace_context",
]
