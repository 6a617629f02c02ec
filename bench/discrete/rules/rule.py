"""What a rule is asked and told. Pure: no clock, no I/O; randomness is given at the start."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.index.prompt_keys import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request to be placed. Blocks are numbers: equal numbers, equal text up to their end."""

    id: int
    blocks: Sequence[int]
    """Keys of the prompt's full blocks, first to last; each stands for all before it, too."""
    block_tokens: int
    prompt_tokens: int
    session: str | None
    """What the client sends as its session's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMetrics:
    """What a replica's own `/metrics` says, as of its last scrape."""

    waiting: int = 0
    """Requests in its queue."""
    running: int = 0
    kv_used: float = 0.0
    """Share of the GPU's KV cache that requests hold, from 0 to 1."""


class Rule(Protocol):
    """One router's rule over a fleet of replicas numbered from 0; healthy ones only are offered."""

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Return the replica that gets a request, and count it as sent there."""

    def first_token(self, request_id: int, now_s: float) -> None:
        """Note the first token of an answer that is streamed; of others there is none."""

    def finished(self, request_id: int, now_s: float) -> None:
        """Note the end of an answer, be it whole or not."""

    def stored(self, replica: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Note that a replica's KV events say that a tier holds these blocks now."""

    def removed(self, replica: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Note that a replica's KV events say that a tier does not hold these blocks any more."""

    def cleared(self, replica: int) -> None:
        """Note that a replica has restarted, and holds nothing."""

    def scraped(self, replica: int, metrics: ReplicaMetrics, now_s: float) -> None:
        """Note what a replica's metrics say."""
