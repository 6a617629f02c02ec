"""The record of one request: what its client saw, then what the fleet knows."""

from dataclasses import dataclass, field

TIERS = ("gpu", "cpu", "disk")


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. All times are in model seconds."""

    number: int
    """Number in the workload: the same for every contender."""
    session: str | None
    turn: int
    prompt_tokens: int
    due_s: float
    """Since the replay's start, when it was to be sent."""
    sent_s: float = 0.0
    ttft_s: float | None = None
    """From sending it to the first bytes of the answer's stream; None: there were none.

    For an answer that is not streamed: to its first token.
    """
    total_s: float | None = None
    streamed: bool = True
    output_tokens: int = 0
    """Tokens of the answer that was asked for."""
    error: str | None = None
    status: int | None = None
    """Status of the answer; None if the connection failed."""
    answer_id: str | None = None
    """The ``id`` that the replica gave its answer."""
    headers: dict[str, str] = field(default_factory=dict)
    """The router's ``x-warmroute-*``, without that prefix."""
    predicted_ttft_s: float | None = None
    instance_id: str | None = None
    """The replica that served it."""
    cached_tokens: dict[str, int] = field(default_factory=dict)
    """By tier, as the replica says; empty where it says nothing."""
    arrived_s: float | None = None
    """The three by the fleet's clock, which is not the replay's."""
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def per_token_s(self) -> float | None:
        """Mean time between two tokens of a whole answer; None where it has but one."""
        if not self.ok or self.ttft_s is None or self.total_s is None or self.output_tokens < 2:
            return None
        return (self.total_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def ok(self) -> bool:
        """Whether it was answered whole."""
        return self.error is None and self.ttft_s is not None

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not found in any tier."""
        return self.prompt_tokens - sum(self.cached_tokens.values())

    @property
    def replica_ttft_s(self) -> float | None:
        """From the request's arrival at its replica to its first token."""
        if self.arrived_s is None or self.first_token_s is None:
            return None
        return self.first_token_s - self.arrived_s
