"""Candidates and decisions that tests put together."""

from typing import Any

from router.config.settings import RatesConfig, ReplicaConfig
from router.fleet.candidate import Candidate
from router.fleet.decision import Decision, Reason
from router.fleet.replica import Replica
from router.index.prompt_keys import PromptKeys, Tier
from router.latency.work import Cost, Work


def candidate(
    name: str,
    *,
    prefill_s: float = 1.0,
    queue_s: float = 0.0,
    matched: int = 0,
    in_flight: int = 0,
    waiting: int = 0,
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
        matched_tokens={Tier.GPU: matched} if matched else {},
        work=Work(new_tokens=1),
        cost=Cost(
            base_s=0.0,
            queue_s=queue_s,
            backlog_s=0.0,
            fetch_s=0.0,
            load_s=0.0,
            prefill_s=prefill_s,
        ),
        waiting=waiting,
        busy_share=busy_share,
    )


def decision(picked: Candidate, reason: Reason = Reason.LONGEST_MATCH, **more: Any) -> Decision:
    """Return a decision for a candidate."""
    return Decision(picked=picked, reason=reason, prompt_tokens=100, **more)
