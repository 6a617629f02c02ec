"""One real replica with its tiers, and before it a router for each way to prefetch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.replica.local import (
    REPLICA_READY_TIMEOUT_S,
    ROUTER_READY_TIMEOUT_S,
    find_platform,
    platform_arguments,
    replica_command,
    replica_environment,
    router_command,
    variant,
)
from bench.replica.model import SHAPES, make_model
from bench.replica.tiers import ReplicaTiers, call, wait_until
from cacheengine.launch.launch import free_ports
from router.launch.processes import ProcessGroup

VARIANTS: Final[Mapping[str, Mapping[str, object]]] = {
    "before forward": {"enabled": True},
    "none": {"enabled": False},
}
"""The routers by name: their ``prefetch`` settings."""
QUEUE_TOKENS: Final = 1_500
"""Of the prompt that is being computed where the request comes behind one: it and the request's
own new tokens fit into one step."""
CONTEXT_TOKENS: Final = 16_384

_ROUTER_CONFIG: Final = Path(__file__).resolve().parents[2] / "configs" / "router.yaml"
_NAME: Final = "replica"
_BLOCK_TOKENS: Final = 128
_CHUNK_TOKENS: Final = 256
_BATCHED_TOKENS: Final = 2_048
_OTHERS_TOKENS: Final = 4_000
"""What the requests beside take at most."""
_GB: Final = 1024**3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A replica's tiers, large enough for one prefix and the requests beside it."""

    prefix_tokens: int
    kv_bytes_per_token: int

    @property
    def prefix_bytes(self) -> int:
        """What the prefix's KV takes."""
        return self.prefix_tokens * self.kv_bytes_per_token

    @property
    def gpu_gb(self) -> int:
        """The GPU tier, in whole GB as the CPU platform wants it."""
        tokens = max(self.prefix_tokens, CONTEXT_TOKENS) + _OTHERS_TOKENS
        return max(1, math.ceil(tokens * self.kv_bytes_per_token / _GB))

    @property
    def cpu_gb(self) -> float:
        """CPU RAM: only half of it may be pinned by prefetches."""
        return max(1.0, (2.5 * self.prefix_bytes) / _GB)

    @property
    def disk_gb(self) -> float:
        """The disk tier: the prefix, used again and again, and the latest of the others'."""
        return max(1.0, 3 * self.prefix_bytes / _GB)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What runs."""

    model: str
    replica: ReplicaTiers
    routers: Mapping[str, str]
    """Their URLs by variant."""


def start(group: ProcessGroup, work: Path, sizes: Sizes) -> Stage:
    """Start the replica and the routers; return when they answer and know each other."""
    model = make_model(work / "model", SHAPES[sizes.kv_bytes_per_token])
    replica = _start_replica(group, work, str(model.resolve()), sizes)
    ports = free_ports(len(VARIANTS))
    routers = {
        name: _start_router(group, work, name, port, replica)
        for name, port in zip(VARIANTS, ports, strict=True)
    }
    return Stage(model=replica.model, replica=replica, routers=routers)


def explain(stage: Stage, router_url: str, content: str) -> dict[str, Any]:
    """Return what a router says of a chat prompt with one message of a user's."""
    body = {"model": stage.model, "messages": [{"role": "user", "content": content}]}
    answer: dict[str, Any] = call(f"{router_url}/explain", body)
    return answer


def _start_replica(group: ProcessGroup, work: Path, model: str, sizes: Sizes) -> ReplicaTiers:
    port, agent_port = free_ports(2)
    platform = find_platform()
    environment = replica_environment(platform, 0, of=2)  # the other core is for what surrounds it
    if platform == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(sizes.gpu_gb)
    vllm_args = [
        *platform_arguments(platform, of=1),
        *("--model", model, "--host", "127.0.0.1", "--port", str(port)),
        *("--block-size", str(_BLOCK_TOKENS), "--max-model-len", str(CONTEXT_TOKENS)),
        *("--max-num-batched-tokens", str(_BATCHED_TOKENS)),
    ]
    disk, config = work / "disk", work / "replica.yaml"
    config.write_text(json.dumps(_engine_settings(disk, agent_port, sizes)), encoding="utf-8")
    command = replica_command(config, vllm_args)
    group.start(_NAME, command, environment, work / "replica.log")
    url = f"http://127.0.0.1:{port}"
    group.wait_ready(_NAME, f"{url}/health", REPLICA_READY_TIMEOUT_S)
    agent_url = f"http://127.0.0.1:{agent_port}"
    return ReplicaTiers(name=_NAME, url=url, agent_url=agent_url, model=model, disk=disk)


def _engine_settings(disk: Path, agent_port: int, sizes: Sizes) -> dict[str, object]:
    return {
        "chunk_size": _CHUNK_TOKENS,
        "max_local_cpu_size": sizes.cpu_gb,
        "local_disk": str(disk),
        "max_local_disk_size": sizes.disk_gb,
        "lmcache_instance_id": _NAME,
        "lmcache_worker_port": agent_port,
    }


def _start_router(
    group: ProcessGroup, work: Path, name: str, port: int, replica: ReplicaTiers
) -> str:
    log_name = f"router-{name.replace(' ', '-')}"
    url = f"http://127.0.0.1:{port}"
    entry = {"url": replica.url, "agent_url": replica.agent_url, "instance_id": replica.name}
    config = variant(
        _ROUTER_CONFIG,
        work / f"{log_name}.yaml",
        port=port,
        replicas=[entry],
        prefetch=VARIANTS[name],
        controller=None,  # there is one replica: nothing is moved
    )
    group.start(log_name, router_command(config), None, work / f"{log_name}.log")
    group.wait_ready(log_name, f"{url}/health", ROUTER_READY_TIMEOUT_S)
    body = {"model": replica.model, "messages": [{"role": "user", "content": "Who is there?"}]}

    def knows_replica() -> bool:
        answer = call(f"{url}/explain", body)
        return bool(answer["exact_tokens"]) and len(answer["candidates"]) == 1

    wait_until(f"{log_name}: knows the replica", knows_replica)
    return url
