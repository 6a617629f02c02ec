"""The replicas that are compared: real ones, and simulated ones in their shape."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.calibration.rates import FittedRates
from bench.replica.local import (
    REPLICA_READY_TIMEOUT_S,
    find_platform,
    platform_arguments,
    replica_command,
    replica_environment,
)
from bench.replica.model import SMALL, VOCAB_SIZE, make_model
from bench.replica.tiers import ReplicaTiers, wait_until
from cacheengine.launch.launch import free_ports
from router.launch.processes import ProcessGroup
from simulator.cli import simulate
from simulator.model.machine import Machine
from simulator.model.rates import Shape

_MODEL: Final = "sim"
_CONTEXT_TOKENS: Final = 16_384
_READY_S: Final = 60.0
_POOL_TOKENS: Final = 131_072
"""What 1 GiB holds, the GPU tier's size and the CPU tier's: 8 KiB a token."""
_GB: Final = 1024**3

SHAPE: Final = Shape(
    gpu_tokens=_POOL_TOKENS,
    block_tokens=128,
    chunk_tokens=256,
    max_batched_tokens=2048,
    max_sequences=8,
)
MACHINE: Final = Machine(shape=SHAPE, cpu_tokens=_POOL_TOKENS, disk_tokens=4 * _POOL_TOKENS)
"""Of which only the sizes count here: the rates are measured."""
TOKENS: Final = range(16, VOCAB_SIZE)
"""Ids that prompts are made of: no special ones, and all known to both."""

_SHARES: Final = 2
"""The model gets one of so many shares of the cores. On all of them each step after a prompt's
first would compete with the storing of the one before, and with the server: of equal prompts of
several steps some took twice as long as others. A GPU has nothing of that."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Replicas that serve."""

    replicas: Sequence[ReplicaTiers]
    kv_bytes_per_token: float
    """As they tell it."""
    control_url: str | None = None
    """Of a simulated fleet."""


def start_real(group: ProcessGroup, work: Path) -> ReplicaTiers:
    """Start a replica with all its tiers on this machine; return it when it serves."""
    (replica,) = start_real_fleet(group, work, MACHINE, names=("real",)).replicas
    return replica


def start_real_fleet(
    group: ProcessGroup, work: Path, machine: Machine, *, names: Sequence[str]
) -> Fleet:
    """Start replicas of these sizes, each with one share of the cores; return when all serve."""
    model = str(make_model(work / "model"))
    replicas = [
        _launch_real(group, work, machine, name=name, index=index, model=model)
        for index, name in enumerate(names)
    ]
    for each in replicas:
        group.wait_ready(each.name, f"{each.url}/health", REPLICA_READY_TIMEOUT_S)
    return Fleet(replicas=replicas, kv_bytes_per_token=SMALL.kv_bytes_per_token)


def _launch_real(
    group: ProcessGroup, work: Path, machine: Machine, *, name: str, index: int, model: str
) -> ReplicaTiers:
    port, agent_port, transfer_port = free_ports(3)
    config, disk = work / f"{name}.yaml", work / f"{name}-disk"
    gb_per_token = SMALL.kv_bytes_per_token / _GB
    settings = {
        "chunk_size": machine.shape.chunk_tokens,
        "max_local_cpu_size": machine.cpu_tokens * gb_per_token,
        "local_disk": str(disk),
        "max_local_disk_size": machine.disk_tokens * gb_per_token,
        "lmcache_instance_id": name,
        "lmcache_worker_port": agent_port,
        "distributed_url": f"localhost:{transfer_port}",
    }
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    platform = find_platform()
    vllm_args = [
        *platform_arguments(platform, of=_SHARES),
        *("--model", model, "--served-model-name", _MODEL),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--block-size", str(machine.shape.block_tokens)),
        *("--max-model-len", str(min(_CONTEXT_TOKENS, machine.shape.gpu_tokens))),
        *("--max-num-batched-tokens", str(machine.shape.max_batched_tokens)),
        # One block is vLLM's own, for places where there is none.
        *("--num-gpu-blocks-override", str(machine.shape.gpu_blocks + 1)),
    ]
    environment = replica_environment(platform, index, of=_SHARES)
    # vLLM leaves its sockets where temporary files go: they are to go with the rest.
    environment |= {"TMPDIR": str(work)}
    command = replica_command(config, vllm_args)
    group.start(name, command, environment, work / f"{name}.log")
    return ReplicaTiers(
        name=name,
        url=f"http://127.0.0.1:{port}",
        agent_url=f"http://127.0.0.1:{agent_port}",
        model=_MODEL,
        disk=disk,
    )


def start_simulated(group: ProcessGroup, work: Path, rates: FittedRates) -> ReplicaTiers:
    """Start a fleet of one with these rates, of the real one's shape; return it when it serves."""
    fleet = start_simulated_fleet(group, work, MACHINE, dataclasses.asdict(rates), replicas=1)
    return fleet.replicas[0]


def start_simulated_fleet(
    group: ProcessGroup, work: Path, machine: Machine, rates: dict[str, float], *, replicas: int
) -> Fleet:
    """Start replicas of these sizes with these rates; return when all serve.

    Rates that the simulator's command has no option for keep its defaults.
    """
    given = dataclasses.asdict(machine.shape) | {"model": _MODEL, "replicas": replicas}
    given |= {"cpu_tokens": machine.cpu_tokens, "disk_tokens": machine.disk_tokens}
    options = {each.name for each in simulate.params}
    given |= {name: value for name, value in rates.items() if name in options}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    log, directory = work / "simulated.log", work / "simulated"
    command = [sys.executable, "-m", "simulator", "--json", f"--directory={directory}"]
    group.start("simulated", [*command, *arguments], None, log)

    def told() -> dict[str, Any] | None:
        group.check()
        for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                where: dict[str, Any] = json.loads(line)
                return where
        return None

    wait_until("simulated: says where it is", lambda: told() is not None, timeout_s=_READY_S)
    where = told()
    assert where is not None
    found = [
        ReplicaTiers(
            name=each["instance_id"] if replicas > 1 else "simulated",
            url=each["url"],
            agent_url=each["agent_url"],
            model=_MODEL,
            disk=directory,
        )
        for each in where["replicas"]
    ]
    return Fleet(
        replicas=found,
        kv_bytes_per_token=where["router_rates"]["kv_bytes_per_token"],
        control_url=where["control_url"],
    )
