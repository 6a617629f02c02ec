"""What AIPerf is set before: replicas that serve; the router comes when it is wanted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.calibration.under_load.stage import empty
from bench.replica.tiers import ReplicaTiers
from router.launch.processes import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Replicas that serve, and how a router in front of them is started."""

    group: ProcessGroup
    model: str
    tokenizer: Path
    replicas: Sequence[ReplicaTiers]
    start_router: Callable[[], str]
    """Returns its URL once it knows the replicas."""
    router: str
    """Its name in the group."""

    def empty(self) -> None:
        """Have every replica forget all KV, in all tiers."""
        for replica in self.replicas:
            empty(replica)
