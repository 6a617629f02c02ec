"""A vLLM with this project's engine inside, as a process of this machine, like `replica`'s."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.replica.local import (
    REPLICA_READY_TIMEOUT_S,
    platform_arguments,
    replica_command,
    replica_environment,
)
from bench.replica.tiers import ReplicaTiers, forget_pages
from cacheengine.launch.vllm_launch import free_ports
from router.launch.processes import ProcessGroup

_CHUNK_TOKENS: Final = 256
"""LMCache's default; the sizes below equal the ones in `replica`."""
_CPU_GB: Final = 1.0
_DISK_GB: Final = 8.0


class OurReplica(ReplicaTiers):
    """One process group on free ports, which can be ended and started again on the same disk."""

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        *,
        model: str,
        served_name: str,
        directory: Path,
        index: int,
        of: int,
        max_model_tokens: int,
    ) -> None:
        port, agent_port = free_ports(2)
        super().__init__(
            name=name,
            url=f"http://127.0.0.1:{port}",
            agent_url=f"http://127.0.0.1:{agent_port}",
            model=served_name,
            disk=directory / f"disk-{name}",
        )
        self._group = group
        self._log = directory / f"{name}.log"
        self._environment = replica_environment("cpu", index, of=of)
        settings = {
            "chunk_size": _CHUNK_TOKENS,
            "max_local_cpu_size": _CPU_GB,
            "local_disk": str(self.disk),
            "max_local_disk_size": _DISK_GB,
            "lmcache_instance_id": name,
            "lmcache_worker_port": agent_port,
        }
        config = directory / f"{name}.yaml"
        config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
        vllm_args = [
            *("--model", model, "--served-model-name", served_name),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", str(max_model_tokens)),
            *platform_arguments("cpu", of=of),
        ]
        self._command = replica_command(config, vllm_args)

    @property
    def entry(self) -> dict[str, str]:
        """The replica in a router's configuration."""
        return {"url": self.url, "instance_id": self.name, "agent_url": self.agent_url}

    def start(self) -> None:
        """Start it; `wait_ready` follows."""
        self._group.start(self.name, self._command, self._environment, self._log)

    def wait_ready(self) -> None:
        """Return when vLLM answers."""
        self._group.wait_ready(self.name, f"{self.url}/health", REPLICA_READY_TIMEOUT_S)

    def stop(self, *, whole: bool) -> None:
        """End it; its files stay. ``whole`` as of a machine: the page cache is gone, too."""
        self._group.stop(self.name)
        if whole:
            forget_pages(self.disk)

    def wait_stored(
        self, tokens: Sequence[int], tier: str = "cpu", *, timeout_s: float = 60.0
    ) -> None:
        """Wait until every full chunk of a prompt is in ``tier`` and in no faster one."""
        super().wait_stored(tokens, tier, timeout_s=timeout_s)

    def tidy(self) -> None:
        """Remove its disk."""
        shutil.rmtree(self.disk, ignore_errors=True)
