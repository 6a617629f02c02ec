"""What replicas tell of themselves: what they hold, whether they live, which models they serve.

`Feeds` follows the agents' event streams and vLLM's KV events, each from where it was left,
with a snapshot where something was missed; `HealthMonitor` asks every replica at intervals.

Started by the application. Imports config, prompt, residency, fleet, staging,
record and tasks.
"""

from router.feeds.health import HealthMonitor, authorization, fetch_models
from router.feeds.replica_feed import Feeds

__all__ = ["Feeds", "HealthMonitor", "authorization", "fetch_models"]
