"""Predicted seconds: what a request takes on a replica, and what is queued before it.

`Rates` predicts the parts of a time to first token (`Cost`) and learns from what was seen;
`ReplicaQueue` says when a replica begins with a request; `PredictionErrors` says how far off
predictions were, `RecentWork` how busy a replica has been.

Called by fleet, admission and record. Imports config; no I/O, no clock.
"""

from router.latency.kv_memory import NO_KV, KvNeed
from router.latency.prediction_errors import ErrorFigures, PredictionErrors, Quantiles
from router.latency.recent_work import RecentWork
from router.latency.replica_queue import ReplicaQueue
from router.latency.reserved_work import Promised
from router.latency.ttft_model import Rates
from router.latency.work import Cost, Part, Work

__all__ = [
    "NO_KV",
    "Cost",
    "ErrorFigures",
    "KvNeed",
    "Part",
    "PredictionErrors",
    "Promised",
    "Quantiles",
    "Rates",
    "RecentWork",
    "ReplicaQueue",
    "Work",
]
