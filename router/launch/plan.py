"""The processes of a fleet on one machine, before any is started."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

WARMROUTE: Final = (sys.executable, "-m", "router")
"""How a command line of ours begins."""


@dataclass(frozen=True, kw_only=True)
class PlannedProcess:
    """One process of the fleet."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """What is added to this process's environment."""
    url: str
    """Its base URL; ``/health`` under it says when it is ready."""
    log_path: Path


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """What `run` starts."""

    replicas: tuple[PlannedProcess, ...]
    router: PlannedProcess
    router_settings: dict[str, Any]
    log_dir: Path
    ready_timeout_s: float
    gateway: PlannedProcess | None = None
    """Envoy, where clients' requests go to it: the router then is its picker."""
    gateway_settings: dict[str, Any] | None = None

    @property
    def processes(self) -> tuple[PlannedProcess, ...]:
        """All processes, in the order in which they are started."""
        gateway = () if self.gateway is None else (self.gateway,)
        return (*self.replicas, self.router, *gateway)

    @property
    def url(self) -> str:
        """Where clients' requests go."""
        return (self.gateway or self.router).url
