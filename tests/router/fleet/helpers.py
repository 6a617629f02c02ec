"""Fleets, candidates and decisions for tests."""

from functools import lru_cache
from typing import Any

from router.config.settings import IndexConfig, PolicyName, RatesConfig, ReplicaConfig, RouterConfig
from router.fleet.breaker import Circuit
from router.fleet.cost_model import Cost, Work
from router.fleet.decision import Candidate, Decision, Reason
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.index.kv_events import BlocksStored, KvBatch
from router.index.prompt_keys import KvTier, PromptKeyCache, PromptKeys, PromptView, keys64
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler
from tests.router.prompt.prompts_given import GivenPrompt
from warmroute_common.agent_protocol import InstanceInfo, Snapshot, TierInfo, pack_keys
from warmroute_common.keys import DEFAULT_SEED, HashScheme, chunk_keys, key64

SCHEME = HashScheme()
BLOCK, CHUNK = 16, 64


def make_fleet(count: int = 2, *, agents: bool = True, policy: PolicyName = "ttft") -> Fleet:
    replicas = tuple(
        ReplicaConfig(
            url=f"http://host:{8000 + number}",
            instance_id=f"r{number}",
            agent_url=f"http://host:{9000 + number}" if agents else None,
        )
        for number in range(count)
    )
    config = RouterConfig(
        replicas=replicas,
        policy=policy,
        rates=RatesConfig(prefill_tokens_per_s=1000.0, kv_bytes_per_token=1000.0),
        index=IndexConfig(speculative_ttl_s=30.0, history_ttl_s=600.0),
    )
    fleet = Fleet(config)
    for name in list(fleet.replicas):
        fleet.up(name)
        if agents:
            fleet.apply_info(name, info(name))
            fleet.following_kv(name)
    return fleet


def info(name: str, **changes: Any) -> InstanceInfo:
    values: dict[str, Any] = {
        "instance_id": name,
        "incarnation": "one",
        "model": "m",
        "hash_algorithm": "sha256",
        "hash_seed": DEFAULT_SEED,
        "block_tokens": BLOCK,
        "chunk_tokens": CHUNK,
        "chunk_bytes": CHUNK * 1000,
        "tiers": {"disk": TierInfo(capacity_bytes=1, used_bytes=0)},
    }
    return InstanceInfo(**(values | changes))


@lru_cache(maxsize=8)
def scheduler_of(fleet: Fleet) -> RequestScheduler:
    """Return the scheduler of a fleet: one, so that its filter keeps what it found."""
    return RequestScheduler(fleet)


def place(fleet: Fleet, prompt: PromptView | None, now_s: float = 0.0, **more: Any) -> Decision:
    """Decide where a prompt goes; ``more`` are fields of `PlacementRequest`, or ``reserved``."""
    reserved = more.pop("reserved", None)
    request = PlacementRequest(keys=PromptKeyCache(prompt), **more)
    return scheduler_of(fleet).place(request, now_s, reserved)


def blocks(prompt: GivenPrompt) -> list[int]:
    return keys64(prompt.chain(SCHEME, BLOCK))


def chunks(prompt: GivenPrompt) -> list[bytes]:
    return chunk_keys(prompt.chain(SCHEME, BLOCK), CHUNK // BLOCK)


def stored(fleet: Fleet, name: str, tier: KvTier, keys: list[int]) -> None:
    fleet.apply_kv(name, KvBatch(0, 0.0, [BlocksStored(tier, keys)]), 0.0)


def snapshot(fleet: Fleet, name: str, **tiers: list[bytes]) -> None:
    packed = {tier: pack_keys(map(key64, keys)) for tier, keys in tiers.items()}
    fleet.apply_snapshot(name, Snapshot(incarnation="one", seq=0, tiers=packed))


def fail_at(fleet: Fleet, replica_id: str, now_s: float = 0.0) -> None:
    """Let requests fail at a replica until its breaker opens."""
    for _ in range(fleet.config.breaker.failures_in_a_row):
        ticket = fleet.start(place(fleet, None, now_s, among=(replica_id,)), now_s)
        changed = fleet.note_result(ticket, now_s, ok=False)
        ticket.finish(now_s, ok=False)
    assert changed
    assert fleet.replicas[replica_id].breaker.state is Circuit.OPEN


def in_cpu_ram(fleet: Fleet, prompt: GivenPrompt) -> None:
    """Let the one replica hold a prompt's KV in its CPU RAM, and nowhere else."""
    fleet.apply_info("r0", info("r0"))
    packed = {"cpu": pack_keys(map(key64, chunks(prompt)))}
    fleet.apply_snapshot("r0", Snapshot(incarnation="one", seq=0, tiers=packed))


def candidate(
    name: str,
    *,
    prefill_s: float = 1.0,
    fetch_s: float = 0.0,
    queue_s: float = 0.0,
    matched: int = 0,
    in_flight: int = 0,
    waiting: int = 0,
    decoding: int = 0,
    output_tokens: float = 0.0,
    busy_share: float = 0.0,
    chain: tuple[bytes, ...] = (),
    slot: int = 0,
) -> Candidate:
    """Return a candidate of a replica that is named after its place."""
    config = ReplicaConfig(url=f"http://{name}", instance_id=name)
    replica = Replica.new(slot, config, RatesConfig())
    replica.waiting = in_flight
    return Candidate(
        replica=replica,
        keys=PromptKeys(keys=[], block_tokens=16, blocks_per_chunk=4, chain=chain),
        matched_tokens={KvTier.GPU: matched} if matched else {},
        work=Work(new_tokens=1, decoding=decoding),
        cost=Cost(
            base_s=0.0,
            queue_s=queue_s,
            backlog_s=0.0,
            fetch_s=fetch_s,
            load_s=0.0,
            prefill_s=prefill_s,
        ),
        waiting=waiting,
        busy_share=busy_share,
        output_tokens=output_tokens,
    )


def decision(picked: Candidate, reason: Reason = Reason.LONGEST_MATCH, **more: Any) -> Decision:
    """Return a decision for a candidate."""
    return Decision(picked=picked, reason=reason, prompt_tokens=100, **more)
