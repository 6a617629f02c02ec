"""A published case: one workload in one regime, for some contenders and seeds. Pure.

It is a complete description: what is run follows from it, a seed and a contender.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from simulator.model.replica_machine import Machine, Shape

Disk = Literal["fast", "slow"]
Decode = Literal["flat", "by-context"]
Fault = Literal["slow-replica", "dies-and-returns"]

DISK_TOKENS_PER_S: Final[dict[Disk, float]] = {"fast": 20_000.0, "slow": 4_000.0}
"""Reading from disk: faster than prefill, or slower than it."""
REPLICAS: Final = 8
MACHINE: Final = Machine(
    shape=Shape(gpu_tokens=600_000, block_tokens=512, chunk_tokens=512, max_batched_tokens=1024)
)
"""A replica's, but for its RAM and disk, which are the case's.

Its KV cache is that of an 8-billion-parameter model (128 KiB a token) on a GPU of 141 GB.
With less, agents' running requests need more KV memory than there is before prefill is
scarce. Blocks are the traces' own.
"""
KV_BYTES_PER_TOKEN: Final = 131_072
DECODE_RATES: Final[dict[Decode, dict[str, float]]] = {
    "flat": {},
    "by-context": {
        "decode_s_per_sequence": (7.3e-3 - 6.6e-3) / 15,
        "decode_s_per_context_token": KV_BYTES_PER_TOKEN / 4.8e12,
    },
}
"""What a decoding sequence adds to a step.

By context: a step reads the KV of all its sequences. That takes its bytes, 128 KiB a token of an
8-billion-parameter model, over the GPU's memory bandwidth: 4.8 TB/s (NVIDIA's data sheet of the
H200, the GPU of 141 GB above). The rest is what an H100 was measured to take with short contexts:
6.6 ms with one sequence, 7.3 ms with 16 (docs/benchmarks.md). Flat: 0.2 ms, whatever the context.
"""
ALSO_BOUNDS_S: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
"""Shares of requests that meet these are kept too, besides that of goodput."""
LABEL_TOLERANCE: Final = 0.03
"""How far a measured load may lie from the one that a case is called by, as a share of it."""

OURS: Final = "ours"
SHARED_CACHE: Final = "shared-infinite-cache"
BOUNDS: Final = (SHARED_CACHE, "no-queue")
"""Contenders that no router could be. What is neither one of these nor ours is a peer."""
_WITHOUT: Final = f"{OURS}-without-"
_WITH: Final = f"{OURS}-with-"


@dataclass(frozen=True, kw_only=True)
class Search:
    """Between which loads goodput is looked for, and how finely."""

    low: float = 0.2
    high: float = 1.4
    tolerance: float = 0.04

    @property
    def most_plays(self) -> int:
        """How often a workload is played to find it."""
        return max(0, math.ceil(math.log2((self.high - self.low) / self.tolerance)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run. Its name is that of its files."""

    name: str
    set: str
    workload: str
    load: float | None
    """Real load; None where it is searched for."""
    search: Search | None = None
    ram: float
    """CPU RAM of a replica, in sizes of its GPU cache."""
    disk: Disk = "fast"
    pause_scale: float = 1.0
    """On the pauses inside sessions: longer ones make the working set larger."""
    replicas: int = REPLICAS
    requests: int
    """Reported ones, after the warm-up, in each run."""
    seeds: tuple[int, ...]
    contenders: tuple[str, ...]
    bound_s: float
    """Of TTFT, for goodput."""
    tpot_bound_s: float = 0.05
    """Longest time per output token of a request that meets both bounds."""
    decode: Decode = "flat"
    network_gbit_s: float | None = None
    """Over which replicas pull KV from each other's GPUs; None: the model's default."""
    fault: Fault | None = None
    all_streamed: bool = False
    """Whether every answer is streamed, whatever the workload says."""

    @property
    def machine(self) -> Machine:
        """Size and speed of each replica."""
        pull = {}
        if self.network_gbit_s is not None:
            pull["pull_tokens_per_s"] = self.network_gbit_s * 1e9 / 8 / KV_BYTES_PER_TOKEN
        return replace(
            MACHINE,
            rates=replace(
                MACHINE.rates,
                **pull,
                disk_tokens_per_s=DISK_TOKENS_PER_S[self.disk],
                **DECODE_RATES[self.decode],
            ),
            cpu_tokens=round(self.ram * MACHINE.shape.gpu_tokens),
        )

    @property
    def plays(self) -> int:
        """How often a workload is played in all."""
        each = 1 if self.search is None else self.search.most_plays
        return each * len(self.seeds) * len(self.contenders)

    @property
    def fleet_tokens_per_s(self) -> float:
        """Tokens that all replicas together prefill in a second: a load of 1."""
        return self.replicas * self.machine.rates.prefill_tokens_per_s

    @property
    def bounds_s(self) -> tuple[float, ...]:
        """Every TTFT bound of which the share is told."""
        return tuple(sorted({self.bound_s, *ALSO_BOUNDS_S}))

    @property
    def regime(self) -> tuple[str, float, Disk, float, float | None]:
        """What two cases of different sizes may have in common; its last is the load."""
        return self.workload, self.ram, self.disk, self.pause_scale, self.load


ANSWERS: Final = ("ours-without-answer-seconds", "ours-with-remote-prefill")
"""Variants of ours that are compared by whole answers."""


def is_split(contender: str) -> bool:
    """Whether a contender has fixed roles: a number of replicas prefill, the others decode."""
    return "+" in contender


def is_peer(contender: str) -> bool:
    """Whether a contender is another router's rule."""
    return contender not in BOUNDS and contender != OURS and not is_variant(contender)


def is_variant(contender: str) -> bool:
    """Whether a contender is ours with one thing changed."""
    return contender.startswith(f"{OURS}-")


def adds(variant: str) -> bool:
    """Whether a variant has a mechanism that ours is without."""
    return variant.startswith(_WITH)


def mechanism(variant: str) -> str | None:
    """Return what a variant is without, or adds; None where it is something else."""
    for prefix in (_WITHOUT, _WITH):
        if variant.startswith(prefix):
            return variant.removeprefix(prefix)
    return None
