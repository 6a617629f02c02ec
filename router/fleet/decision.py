"""Where a request goes and why. Pure values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from router.fleet.candidate import Candidate
from router.index import Tier


class Reason(StrEnum):
    """Why a replica was picked."""

    LONGEST_MATCH = "longest-match"
    SESSION_HOME = "session-home"
    SESSION_SPILL = "session-spill"
    LEAST_LOADED = "least-loaded"
    NO_INFORMATION = "no-information"
    ONLY_REPLICA = "only-replica"
    BOUND = "bound"
    ROUND_ROBIN = "round-robin"
    RETRY = "retry"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCopy:
    """KV that the picked replica should get from another before it is asked."""

    source_id: str
    keys: tuple[bytes, ...] = field(repr=False)
    """Whole digests of the chunks that the source holds, in any tier, and the picked one lacks."""
    nbytes: int
    expected_gain_s: float
    """What the copy saves over computing those chunks anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes and why. Making it changes nothing; `Fleet.start` acts on it."""

    picked: Candidate
    reason: Reason
    prompt_tokens: int
    candidates: tuple[Candidate, ...] = field(default=(), repr=False)
    """All that were weighed, the picked one among them."""
    prefetch_keys: tuple[bytes, ...] = field(default=(), repr=False)
    """Whole digests of the matched chunks that lie only on disk or remote, in order."""
    copy: KvCopy | None = None
    home: str | None = None
    """Id of the session's home when this was decided, if it could take the request."""
    session: str | None = None
    streamed: bool = True
    """Whether the answer's first token will be seen, since it is streamed."""

    @property
    def replica_id(self) -> str:
        """Id of the picked replica."""
        return self.picked.replica.id

    @property
    def url(self) -> str:
        """Where the picked replica serves."""
        return self.picked.replica.config.url

    @property
    def matched_tokens(self) -> Mapping[Tier, int]:
        """What the picked replica holds of the prompt, by tier."""
        return self.picked.matched_tokens

    @property
    def predicted_ttft_s(self) -> float:
        """Seconds."""
        return self.picked.ttft_s

    @property
    def expected_gain_s(self) -> float:
        """What the prefetch saves over computing those chunks anew: waiting longer is a loss."""
        return self.picked.prefetch_gain_s if self.prefetch_keys else 0.0

    @property
    def is_staged(self) -> bool:
        """Whether KV is to be brought to the replica's CPU RAM before the request is sent."""
        return bool(self.prefetch_keys) or self.copy is not None
