"""The replicas of a fleet: each one's state, tiers, load and rates, and which there are.

Called by the rest of the fleet. Imports config, failures, latency and residency.
"""

from router.fleet.replica.replica import SLOW_TIERS, Replica
from router.fleet.replica.replicas import Replicas
from router.fleet.replica.state import Signal, State

__all__ = ["SLOW_TIERS", "Replica", "Replicas", "Signal", "State"]
