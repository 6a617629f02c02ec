"""How many replicas a model needs: its load, what binds, and one replica more or less.

`Scaling.loads` reads the fleet and the requests that the router holds. It changes nothing. Replicas
that serve the same models form a pool, which is named after the first of these models; LoRA
adapters count as their base model.

Load is counted in replicas: how many of them it would keep busy without a pause. Of each resource
only this router's own requests count, so the loads of several routers can be added up.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from statistics import median
from typing import Any, Final, NamedTuple, Protocol

from router.fleet.cost_model import CostPart
from router.fleet.fleet import Fleet
from router.fleet.replica import UNKNOWN_POOL, Replica, ReplicaState
from router.index.prompt_keys import KvTier

OTHER_MODELS: Final = "other"
"""Stands for the models, beyond the first ones, that requests without a replica ask for."""
_MOST_NAMED: Final = 20
"""Such models that are named: clients choose these names."""


class Resource(StrEnum):
    """What a replica may run out of."""

    PREFILL = "prefill"
    """Time for prefills, loads of KV included."""
    KV_MEMORY = "kv_memory"
    """KV memory of the GPU. The tokens of answers are not counted."""
    DECODE = "decode"
    """Answers at once; known only with ``scaling.decode_slots``."""


class HeldWork(NamedTuple):
    """A request that the router holds."""

    replica: Replica
    """Where it would go."""
    work_s: float
    """Predicted time that it takes of the replica; 0 if another one with its prompt waits."""
    kv_tokens: int


class HeldRequests(Protocol):
    """The requests that the router holds (`router.scheduling.admission.AdmissionController`)."""

    def held(self) -> Iterable[HeldWork]:
        """Return the requests that wait for a busy replica."""

    def without_replica(self) -> Mapping[str | None, int]:
        """Return by model how many wait because no replica is up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """What is predicted for a number of replicas. Their caches' hit rates are taken as they are."""

    replicas: int
    utilization: float
    """How much of the resource that binds is used: 1.0 is all of it."""
    usual_wait_s: float
    """Mean time in the replica's queue under this load; infinite if work comes faster than it is
    done."""
    drain_s: float
    """Time until the work that waits now is done; infinite if more comes meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """The load of the replicas that serve a model."""

    model: str
    replicas: int
    """That are up."""
    held: int
    """Requests that the router holds until a replica can soon begin with them."""
    without_replica: int
    """Requests that wait because no replica is up."""
    predicted_wait_s: float
    """How long the next request would wait; infinite if no replica is up."""
    demand: Mapping[Resource, float]
    """By resource, the load in replicas."""
    sizes: Sequence[PoolSize]
    """One replica fewer (if there are two), as many as are up, and one more."""

    @property
    def binds(self) -> Resource:
        """The resource of which the most is used."""
        return max(self.demand, key=self.demand.__getitem__)


class Scaling:
    """Reads the load of each pool."""

    def __init__(self, fleet: Fleet, held: HeldRequests, decode_slots: int | None = None) -> None:
        """``decode_slots``: answers that a replica writes at once; None: no limit is known."""
        self._fleet = fleet
        self._held = held
        self._decode_slots = decode_slots

    def loads(self, now_s: float) -> list[PoolLoad]:
        """Return the load of each pool, by name; also of models that have no replica now."""
        pools: dict[str, list[Replica]] = {}
        for each in self._fleet.replicas.values():
            pools.setdefault(each.pool, []).append(each)
        held: dict[str, list[HeldWork]] = {}
        for work in self._held.held():
            held.setdefault(work.replica.pool, []).append(work)
        lacking = self._lacking()
        return [
            self._load(name, pools.get(name, []), held.get(name, []), lacking[name], now_s)
            for name in sorted({*pools, *held, *lacking})
        ]

    def machine(self, model: str) -> dict[str, Any]:
        """Return the median replica of a pool, for ``warmroute replay``; empty if none is up.

        Tokens and tokens per second. The names are those of the simulator's machine. What is not
        known is left out; rates that were not measured have the configuration's start values.
        """
        up = [
            each
            for each in self._fleet.replicas.values()
            if each.pool == model and each.state is ReplicaState.UP
        ]
        if not up:
            return {}

        def usual(value: Callable[[Replica], float]) -> float:
            return median(map(value, up))

        def speed(part: CostPart) -> float:
            return usual(lambda each: each.rates.per_second(part) / each.kv_bytes_per_token)

        def seconds(part: CostPart) -> float:
            return usual(lambda each: each.rates.seconds(part))

        def held(tier: KvTier) -> int:
            tokens = usual(lambda each: each.capacity_bytes.get(tier, 0) / each.kv_bytes_per_token)
            return round(tokens)

        prefill_s, attended_s = seconds(CostPart.PREFILL), seconds(CostPart.ATTENTION)
        output_s = seconds(CostPart.OUTPUT_TOKEN)
        shape: dict[str, int] = {}
        if (gpu_tokens := usual(lambda each: each.queue.capacity_tokens)) < inf:
            shape["gpu_tokens"] = round(gpu_tokens)
        if self._decode_slots is not None:
            shape["max_sequences"] = self._decode_slots
        return {
            "shape": shape,
            "rates": {
                "prefill_tokens_per_s": 1.0 / prefill_s,
                "attention_tokens": prefill_s / attended_s if attended_s else 0.0,
                "step_s": output_s,
                "decode_s_per_context_token": output_s / self._fleet.weights.doubling_tokens,
                "load_tokens_per_s": speed(CostPart.LOAD),
                "store_tokens_per_s": speed(CostPart.LOAD),
                "disk_tokens_per_s": speed(CostPart.DISK),
                "disk_write_tokens_per_s": speed(CostPart.DISK),
                "peer_tokens_per_s": speed(CostPart.PEER),
                "receive_tokens_per_s": speed(CostPart.PEER),
            },
            "cpu_tokens": held(KvTier.CPU),
            "disk_tokens": held(KvTier.DISK),
        }

    def _lacking(self) -> Counter[str]:
        """Return by pool how many requests wait because no replica is up."""
        by_pool: Counter[str] = Counter()
        for model, count in self._held.without_replica().items():
            by_pool[self._fleet.pools.get(model or "", model or UNKNOWN_POOL)] += count
        named = Counter(dict(by_pool.most_common(_MOST_NAMED)))
        if beyond := by_pool.total() - named.total():
            named[OTHER_MODELS] += beyond
        return named

    def _load(
        self,
        model: str,
        replicas: Sequence[Replica],
        held: Sequence[HeldWork],
        without_replica: int,
        now_s: float,
    ) -> PoolLoad:
        up = [each for each in replicas if each.state is ReplicaState.UP]
        held_s = sum(each.work_s for each in held)
        sent = sum(each.recent.share(now_s) for each in replicas)
        demand = {
            # What waits counts as if it should be done within the time that the share is of.
            Resource.PREFILL: sent + held_s / self._fleet.weights.recent_s,
            Resource.KV_MEMORY: _kv_demand(replicas, held),
        }
        if self._decode_slots is not None:
            answers = sum(each.decoding for each in replicas)
            demand[Resource.DECODE] = answers / self._decode_slots
        held_at = dict.fromkeys((each.slot for each in replicas), 0.0)
        for each in held:
            held_at[each.replica.slot] = held_at.get(each.replica.slot, 0.0) + each.work_s
        waits = {each.slot: each.queue.wait_s(now_s) for each in up}
        work = [each.work_s for each in replicas if each.started]
        mean_s = sum(work) / len(work) if work else 0.0
        waiting_s = held_s + sum(waits.values())
        sizes = range(max(1, len(up) - 1), len(up) + 2)
        return PoolLoad(
            model=model,
            replicas=len(up),
            held=len(held),
            without_replica=without_replica,
            predicted_wait_s=min((waits[slot] + held_at[slot] for slot in waits), default=inf),
            demand=demand,
            sizes=[
                PoolSize(
                    replicas=size,
                    utilization=max(demand.values()) / size,
                    usual_wait_s=_usual_wait_s(mean_s, max(demand.values()) / size),
                    drain_s=waiting_s / (size - sent) if sent < size else inf,
                )
                for size in sizes
            ],
        )


def _kv_demand(replicas: Sequence[Replica], held: Sequence[HeldWork]) -> float:
    limited = {each.slot: each for each in replicas if each.queue.capacity_tokens < inf}
    demand = sum(each.queue.held_tokens / each.queue.capacity_tokens for each in limited.values())
    for work in held:
        if work.replica.slot in limited:
            demand += work.kv_tokens / work.replica.queue.capacity_tokens
    return demand


def _usual_wait_s(mean_s: float, share: float) -> float:
    """Return the cost model's `usual` queue at this utilization, of requests with the mean work."""
    return mean_s * share / (1.0 - share) if share < 1.0 else inf
