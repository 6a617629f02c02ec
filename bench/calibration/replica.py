"""The two replicas: a real one, and one simulated in its shape."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Final

from bench.calibration.rates import FittedRates
from bench.replica.local import (
    REPLICA_READY_TIMEOUT_S,
    find_platform,
    platform_arguments,
    replica_command,
    replica_environment,
)
from bench.replica.model import VOCAB_SIZE, make_model
from bench.replica.tiers import ReplicaTiers, wait_until
from bench.simulator.model.rates import Shape
from cacheengine.launch import free_ports
from router.processes import ProcessGroup

_MODEL: Final = "sim"
_CONTEXT_TOKENS: Final = 16_384
_READY_S: Final = 60.0
_POOL_TOKENS: Final = 131_072
"""What 1 GiB holds, the GPU tier's size and the CPU tier's: 8 KiB a token."""

SHAPE: Final = Shape(
    gpu_tokens=_POOL_TOKENS,
    block_tokens=128,
    chunk_tokens=256,
    max_batched_tokens=2048,
    max_sequences=8,
)
TOKENS: Final = range(16, VOCAB_SIZE)
"""Ids that prompts are made of: no special ones, and all known to both."""

_SHARES: Final = 2
"""The model gets one of so many shares of the cores. On all of them each step after a prompt's
first would compete with the storing of the one before, and with the server: of equal prompts of
several steps some took twice as long as others. A GPU has nothing of that."""


def start_real(group: ProcessGroup, work: Path) -> ReplicaTiers:
    """Start a replica with all its tiers on this machine; return it when it serves."""
    port, agent_port = free_ports(2)
    config, disk = work / "replica.yaml", work / "disk"
    settings = {
        "chunk_size": SHAPE.chunk_tokens,
        "max_local_cpu_size": 1.0,
        "local_disk": str(disk),
        "max_local_disk_size": 4.0,
        "lmcache_instance_id": "real",
        "lmcache_worker_port": agent_port,
    }
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    platform = find_platform()
    vllm_args = [
        *platform_arguments(platform, of=1),
        *("--model", str(make_model(work / "model")), "--served-model-name", _MODEL),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--block-size", str(SHAPE.block_tokens), "--max-model-len", str(_CONTEXT_TOKENS)),
        *("--max-num-batched-tokens", str(SHAPE.max_batched_tokens)),
    ]
    url = f"http://127.0.0.1:{port}"
    group.start(
        "real",
        replica_command(config, vllm_args),
        replica_environment(platform, 0, of=_SHARES),
        work / "replica.log",
    )
    group.wait_ready("real", f"{url}/health", REPLICA_READY_TIMEOUT_S)
    agent_url = f"http://127.0.0.1:{agent_port}"
    return ReplicaTiers(name="real", url=url, agent_url=agent_url, model=_MODEL, disk=disk)


def start_simulated(group: ProcessGroup, work: Path, rates: FittedRates) -> ReplicaTiers:
    """Start a fleet of one with these rates, of the real one's shape; return it when it serves."""
    given = {**dataclasses.asdict(SHAPE), **dataclasses.asdict(rates), "model": _MODEL}
    given |= {"replicas": 1, "cpu_tokens": _POOL_TOKENS, "disk_tokens": 4 * _POOL_TOKENS}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    log, directory = work / "simulated.log", work / "simulated"
    command = [sys.executable, "-m", "bench.simulator", "--json", f"--directory={directory}"]
    group.start("simulated", [*command, *options], None, log)

    def replicas() -> list[dict[str, str]]:
        group.check()
        for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                told: list[dict[str, str]] = json.loads(line)["replicas"]
                return told
        return []

    wait_until("simulated: says where it is", lambda: bool(replicas()), timeout_s=_READY_S)
    (where,) = replicas()
    return ReplicaTiers(
        name="simulated",
        url=where["url"],
        agent_url=where["agent_url"],
        model=_MODEL,
        disk=directory,
    )
