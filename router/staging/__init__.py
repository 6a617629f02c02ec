"""KV to where it will be needed, before a request is forwarded.

`Stager` has the chunks on disk or remote promoted by the replica's agent or its LMCache
(`prefetch`), and those of other replicas copied (`peer_copy`); a request is held back at most
as long as that gains. `AgentClient` speaks to the agents.

Called by proxy, feeds and lmcache. Imports config, fleet and tasks.
"""

from router.agent_client import (
    AgentClient,
    AgentError,
    AgentRefusedError,
    AgentTimeoutError,
    HistoryGoneError,
)
from router.staging.stager import PrefetchError, Stager, StagingResult, transfer_address

__all__ = [
    "AgentClient",
    "AgentError",
    "AgentRefusedError",
    "AgentTimeoutError",
    "HistoryGoneError",
    "PrefetchError",
    "Stager",
    "StagingResult",
    "transfer_address",
]
