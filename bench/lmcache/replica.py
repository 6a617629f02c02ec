"""The replicas of the demo: vLLM with a stock LMCache server, and vLLM with our engine inside."""

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from bench.replica.local import (
    REPLICA_READY_TIMEOUT_S,
    platform_arguments,
    replica_command,
    replica_environment,
)
from bench.replica.tiers import ReplicaTiers, Vllm, call, forget_pages, wait_until
from cacheengine.launch.vllm_launch import free_ports
from router.index.lmcache_keys import lmcache_chain
from router.launch.processes import ProcessGroup

CHUNK_TOKENS: Final = 256
_SHARED_MEMORY: Final = Path("/dev/shm")
_SEGMENTS: Final = "lmcache_kv_"
_NOTICES_S: Final = 30.0
"""vLLM sees within two heartbeats of 10 s that a server has ended."""


class LmcacheReplica(Vllm):
    """A vLLM, and its LMCache server at ``server_url``, which has a disk too."""

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        *,
        python: Path,
        model: str,
        served_name: str,
        directory: Path,
        coordinator_url: str,
        index: int,
        of: int,
        max_model_tokens: int,
    ) -> None:
        """``python`` is the interpreter of LMCache's environment."""
        ports = free_ports(6)
        super().__init__(name=name, url=f"http://127.0.0.1:{ports[0]}", model=served_name)
        self.model_path = model
        self.server_url = f"http://127.0.0.1:{ports[1]}"
        self.disk = directory / f"disk-{name}"
        self._group = group
        self._directory = directory
        self._environment = {
            **replica_environment("cpu", index, of=of),
            "LMCACHE_TRACK_USAGE": "false",
        }
        self._server_name, self._server_pid = f"lmcache-{name}", 0
        self._segments: set[Path] = set()
        adapter = {"type": "fs_native", "base_path": str(self.disk)}
        self._server_command = [
            *(str(python.with_name("lmcache")), "server", "--instance-id", name),
            *("--host", "127.0.0.1", "--port", str(ports[2])),
            *("--http-port", str(ports[1]), "--prometheus-port", str(ports[3])),
            *("--chunk-size", str(CHUNK_TOKENS), "--l1-size-gb", "1", "--no-l1-use-lazy"),
            *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
            *("--l2-adapter", json.dumps(adapter)),
            *("--coordinator-url", coordinator_url, "--coordinator-event-reporting"),
            *("--coordinator-advertise-ip", "127.0.0.1"),
        ]
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": ports[2],
                # What "auto" picks on CPUs pickles every block.
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            },
        }
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports[4]}",
            "replay_endpoint": f"tcp://*:{ports[5]}",
        }
        self._vllm_command = [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", model, "--served-model-name", served_name),
            *("--host", "127.0.0.1", "--port", str(ports[0])),
            *("--max-model-len", str(max_model_tokens)),
            *platform_arguments("cpu", of=of),
            *("--kv-transfer-config", json.dumps(transfer)),
            *("--kv-events-config", json.dumps(events)),
        ]

    @property
    def entry(self) -> dict[str, str]:
        """The replica in a router's configuration."""
        return {"url": self.url, "instance_id": self.name, "lmcache": self.server_url}

    def start(self) -> None:
        """Start what does not run yet; `wait_ready` follows."""
        if not self._server_pid:
            self.start_server()
        log = self._directory / f"{self.name}.log"
        self._pid = self._group.start(self.name, self._vllm_command, self._environment, log)

    def start_server(self) -> None:
        """Start the LMCache server alone, and return when it answers."""
        self.disk.mkdir(parents=True, exist_ok=True)
        log = self._directory / f"{self._server_name}.log"
        self._server_pid = self._group.start(
            self._server_name, self._server_command, self._environment, log
        )
        url = f"{self.server_url}/healthcheck"
        self._group.wait_ready(self._server_name, url, REPLICA_READY_TIMEOUT_S)

    def wait_ready(self) -> None:
        """Return when vLLM answers."""
        self._group.wait_ready(self.name, f"{self.url}/health", REPLICA_READY_TIMEOUT_S)
        for path in _SHARED_MEMORY.glob(f"{_SEGMENTS}*"):
            pid = int(path.name.removeprefix(_SEGMENTS).partition("_")[0])
            with suppress(OSError):
                if os.getsid(pid) == self._pid:
                    self._segments.add(path)

    def stop(self, *, whole: bool) -> None:
        """End vLLM, and where ``whole`` its LMCache server too, whose files stay."""
        self._group.stop(self.name)
        self._forget_segments()
        if whole:
            self._group.stop(self._server_name)
            self._server_pid = 0
            forget_pages(self.disk)

    @contextmanager
    def stopped_vllm(self) -> Iterator[None]:
        """Have vLLM stand still, all of its processes, while its LMCache server runs."""
        os.killpg(self._pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._pid, signal.SIGCONT)

    def kill_server(self) -> None:
        """End the LMCache server as by ``kill -9``, and return at once."""
        os.kill(self._server_pid, signal.SIGKILL)
        self._group.stop(self._server_name, kill=True)
        self._server_pid = 0

    def wait_noticed(self) -> None:
        """Return when vLLM has seen its server come back, and registered there again."""
        contexts = "cache_context_meta"
        wait_until(
            f"{self.name}: registered with its LMCache",
            lambda: bool(call(f"{self.server_url}/status").get(contexts)),
            timeout_s=_NOTICES_S,
        )

    def empty_l1(self) -> None:
        """Empty the LMCache server's RAM; its disk stays."""
        call(f"{self.server_url}/cache/clear", {"tier": "l1", "force": False})

    def l1_objects(self) -> int:
        """Return how many chunks are in the LMCache server's RAM."""
        return int(self.storage()["l1_manager"]["total_object_count"])

    def storage(self) -> dict[str, Any]:
        """Return what the LMCache server says of its storage."""
        found: dict[str, Any] = call(f"{self.server_url}/status")["storage_manager"]
        return found

    def wait_stored(self, tokens: Sequence[int]) -> None:
        """Wait until every full chunk of a prompt is on the LMCache server's disk."""
        wanted = {each.hex() for each in lmcache_chain(tokens, CHUNK_TOKENS)}

        def all_there() -> bool:
            return wanted <= {_chunk_hash(each) for each in self.disk.glob("*.data")}

        wait_until(f"{self.name}: {len(wanted)} chunks on disk", all_there)

    def leave_on_disk(self, tokens: Sequence[int]) -> None:
        """Have a prompt's chunks on disk alone, and out of the page cache."""
        self.wait_stored(tokens)

        def emptied() -> bool:
            self.empty_l1()
            return self.l1_objects() == 0

        wait_until(f"{self.name}: L1 emptied", emptied)
        forget_pages(self.disk)

    def tidy(self) -> None:
        """Remove what vLLM leaves in shared memory when it ends (1 GiB), and the disk."""
        self._forget_segments()
        shutil.rmtree(self.disk, ignore_errors=True)

    def _forget_segments(self) -> None:
        for path in self._segments:
            path.unlink(missing_ok=True)
        self._segments.clear()


def _chunk_hash(path: Path) -> str:
    """Return the chunk that a file of LMCache's holds: MODEL@RANK@GROUP@HASH.data."""
    return path.stem.split("@")[3]


class Startable(Protocol):
    """A replica that is started in two steps."""

    def start(self) -> None:
        """Start it; `wait_ready` follows."""

    def wait_ready(self) -> None:
        """Return when it answers."""


def start_together(replicas: Sequence[Startable]) -> None:
    """Start replicas at once; return when all of them answer."""
    for each in replicas:
        each.start()
    for each in replicas:
        each.wait_ready()


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
