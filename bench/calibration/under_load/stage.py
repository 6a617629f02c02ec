"""Running a workload before a fleet: the router, empty caches, what was counted meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.calibration.replica import Fleet
from bench.calibration.under_load.client import send
from bench.calibration.under_load.counts import Counts, GpuEvictions, read_counts
from bench.calibration.under_load.workload import Offered
from bench.record import Record
from bench.replica.local import ROUTER_READY_TIMEOUT_S, router_command, variant
from bench.replica.tiers import ReplicaTiers, call, metric, wait_until
from cacheengine.launch.launch import free_ports
from router.launch.processes import ProcessGroup

_ROUTER_CONFIG: Final = Path(__file__).resolve().parents[3] / "configs" / "router.yaml"
_LEARN_TOKENS: Final = 300
_PART_OF_RATE: Final = {"peer_tokens_per_s": "peer", "disk_tokens_per_s": "disk"}


@dataclass(frozen=True, kw_only=True)
class Played:
    """What became of a workload at a fleet."""

    records: Sequence[Record]
    counts: Counts
    gpu_evicted_blocks: int | None
    """None: nobody counted."""
    idle_share: float | None
    """Of the machine's cores meanwhile; None where no time passed."""


def start_router(
    group: ProcessGroup, work: Path, name: str, fleet: Fleet, rates: Mapping[str, float] | None
) -> str:
    """Start a router that knows a fleet's rates from the start; return its URL when it serves.

    None: it knows what any router does.
    """
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    entries = [
        {"url": each.url, "agent_url": each.agent_url, "instance_id": each.name}
        for each in fleet.replicas
    ]
    config = variant(
        _ROUTER_CONFIG,
        work / f"{name}.yaml",
        port=port,
        replicas=entries,
        rates=router_rates(rates, fleet.kv_bytes_per_token) if rates else None,
        controller=None,
    )
    group.start(name, router_command(config), None, work / f"{name}.log")
    group.wait_ready(name, f"{url}/health", ROUTER_READY_TIMEOUT_S)
    body = {"model": fleet.replicas[0].model, "prompt": list(range(16, 16 + _LEARN_TOKENS))}

    def knows_replicas() -> bool:
        answer = call(f"{url}/explain", body)
        return bool(answer["exact_tokens"]) and len(answer["candidates"]) == len(fleet.replicas)

    wait_until(f"{name}: knows its replicas", knows_replicas)
    return url


def router_rates(rates: Mapping[str, float], kv_bytes_per_token: float) -> dict[str, float]:
    """Return the router's ``rates`` for replicas with these: the same whatever a token's bytes."""
    return {
        "prefill_tokens_per_s": rates["prefill_tokens_per_s"],
        "cpu_load_bytes_per_s": rates["load_tokens_per_s"] * kv_bytes_per_token,
        "disk_bytes_per_s": rates["disk_tokens_per_s"] * kv_bytes_per_token,
        "kv_bytes_per_token": kv_bytes_per_token,
    }


def play(fleet: Fleet, router_url: str, offered: Offered, *, seed: int) -> Played:
    """Send a workload to empty replicas through their router; return what became of it."""
    for replica in fleet.replicas:
        empty(replica)
    before, cpu_before = read_counts(fleet), _cpu_ticks()
    with GpuEvictions(fleet) as evictions:
        records = send(router_url, fleet.replicas[0].model, offered.sessions, seed=seed)
        for replica in fleet.replicas:
            replica.wait_idle()
    idle, every = (now - then for now, then in zip(_cpu_ticks(), cpu_before, strict=True))
    return Played(
        records=records,
        counts=read_counts(fleet).since(before),
        gpu_evicted_blocks=evictions.blocks,
        idle_share=idle / max(1, every),
    )


def empty(replica: ReplicaTiers) -> None:
    """Empty all tiers of an idle replica."""
    replica.wait_idle()
    replica.empty_gpu()

    def holds_nothing() -> bool:
        # What is still being stored comes after the first call.
        dropped: dict[str, int] = call(f"{replica.agent_url}/clear", {"tiers": ["cpu", "disk"]})[
            "dropped"
        ]
        return not any(dropped.values())

    wait_until(f"{replica.name}: empty", holds_nothing)


def moved_rates(fleet: Fleet, router_url: str) -> dict[str, float]:
    """Return the rates at which real replicas moved KV under load, in tokens a second.

    Stores by vLLM's own clock, copies between replicas as the router has learned them.
    """

    def all_of(name: str) -> float:
        return sum(metric(each.url, f"vllm:{name}_total") for each in fleet.replicas)

    stored_s = all_of("kv_offload_store_time")
    found = {"store_tokens_per_s": all_of("kv_offload_store_bytes") / stored_s} if stored_s else {}
    for name, part in _PART_OF_RATE.items():
        told = [
            metric(router_url, "warmroute_learned_rate", part=part, replica=each.name)
            for each in fleet.replicas
        ]
        if all(told):
            found[name] = sum(told) / len(told)
    return {name: value / fleet.kv_bytes_per_token for name, value in found.items()}


def _cpu_ticks() -> tuple[int, int]:
    """Return the idle ticks and all ticks of the machine's cores."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    ticks = [int(each) for each in fields]
    return ticks[3] + ticks[4], sum(ticks[:8])
