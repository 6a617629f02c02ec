"""What replicas tell of themselves: what they hold, whether they live, which models they serve.

`Feeds` follows the agents' event streams and vLLM's KV events, each from where it was left,
with a snapshot where something was missed; `HealthMonitor` asks every replica at intervals.

Started by the application; the doctor follows events itself. Imports config, prompt,
residency, fleet, staging, record and tasks.
"""

from router.feeds.feeds import Feeds, KvFeed
from router.feeds.health_monitor import (
    HealthMonitor,
    authorization,
    fetch_models,
    model_entries,
    served_models,
)
from router.feeds.kv_subscriber import KvEndpoints, KvSubscriber

__all__ = [
    "Feeds",
    "HealthMonitor",
    "KvEndpoints",
    "KvFeed",
    "KvSubscriber",
    "authorization",
    "fetch_models",
    "model_entries",
    "served_models",
]
