"""What replicas tell of themselves: what they hold, whether they live, which models they serve.

`Feeds` follows the agents' event streams and vLLM's KV events, each from where it was left,
with a snapshot where something was missed; `HealthMonitor` asks every replica at intervals.

Started by the application; the doctor follows events itself. Imports config, prompt,
residency, fleet, staging, record and tasks.
"""

from router.feeds.health import HealthMonitor
from router.feeds.kv_feed import KvFeed
from router.feeds.kv_subscriber import KvEndpoints, KvSubscriber
from router.feeds.questions import authorization, fetch_models, model_entries, served_models
from router.feeds.replica_feed import Feeds

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
