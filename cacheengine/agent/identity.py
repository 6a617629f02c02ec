"""Who a replica is."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AgentIdentity:
    """What ``/info`` says of the replica beside its tiers."""

    instance_id: str
    model: str
    hash_algorithm: str
    hash_seed: str
    block_tokens: int
    chunk_tokens: int
    chunk_bytes: int
    kv_events_port: int | None = None
    kv_replay_port: int | None = None
    transfer_port: int | None = None
    """Where other replicas fetch chunks from this one, if they can."""
