"""The state of the fleet: replicas, what each holds, its load, rates and sessions. Pure."""

from router.fleet.cost_model import (
    Cost,
    CostModel,
    CostPart,
    ErrorFigures,
    PredictionErrors,
    Quantiles,
    RecentWork,
    Work,
)
from router.fleet.decision import Candidate, Decision, KvCopy, Reason
from router.fleet.fleet import Fleet
from router.fleet.in_flight import Ticket
from router.fleet.replica import Replica, ReplicaState

__all__ = [
    "Candidate",
    "Cost",
    "CostModel",
    "CostPart",
    "Decision",
    "ErrorFigures",
    "Fleet",
    "KvCopy",
    "PredictionErrors",
    "Quantiles",
    "Reason",
    "RecentWork",
    "Replica",
    "ReplicaState",
    "Ticket",
    "Work",
]
