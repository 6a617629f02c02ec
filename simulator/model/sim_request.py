"""One request inside the model of a replica. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class CachedTokens:
    """Where the KV that a request did not compute came from, in tokens."""

    gpu: int = 0
    cpu: int = 0
    """Found in CPU RAM, by whomever it was brought there."""
    disk: int = 0
    """Read from disk while this request waited for it."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.gpu + self.cpu + self.disk


@dataclass(slots=True, eq=False, kw_only=True)
class SimRequest:
    """What is asked for, and how far it has come. Times in model seconds."""

    id: str
    prompt_tokens: int
    output_tokens: int
    """At least 1; the model gives exactly this many."""
    block_keys: Sequence[bytes]
    """Keys of the full blocks of prompt and output, first to last."""
    chunk_keys: Sequence[bytes] = ()
    """Keys of the full chunks of prompt and output, first to last."""
    lends: bool = False
    """Its blocks stay held after its end, for another replica to pull, until
    `ReplicaModel.end_loan`."""
    pull_tokens: int = 0
    """Leading tokens whose KV another replica lends; what the GPU lacks of them is pulled."""
    emit_every: int = 0
    """The caller hears of the first token, then of every n-th; 0: of the end only."""

    arrived_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    cached: CachedTokens = field(default_factory=CachedTokens)

    prefill_end: int = 0
    """Tokens to compute before the next one is given: the prompt's; after a preemption
    those given before it, too."""
    preemptions: int = 0
    computed: int = 0
    """Tokens, from the first on, whose KV is on the GPU."""
    generated: int = 0
    held: list[bytes] = field(default_factory=list)
    """Keys of the blocks it holds, in prompt order."""
    unkeyed: int = 0
    """Blocks it holds that have no key (yet)."""
    num_blocks: int = 0
    """Blocks it holds."""
    published: int = 0
    """Number of its full blocks that have their keys."""
    stored_chunks: int = 0
    """Chunks that were offered to the tiers below the GPU."""
    is_looked_up: bool = False
    """Whether the tiers below the GPU were asked for it since it began to wait."""
    is_over: bool = False
    """Finished or cancelled."""

    def __post_init__(self) -> None:
        self.prefill_end = self.prompt_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens whose KV it will have computed at its end: the last one given is never run."""
        return self.prompt_tokens + self.output_tokens - 1

    @property
    def is_prefilling(self) -> bool:
        """Whether what comes before its next token is not computed yet."""
        return self.computed < self.prefill_end

    @property
    def remaining_prefill(self) -> int:
        """Tokens left to compute before the next output token."""
        return self.prefill_end - self.computed

    def steps_to_progress(self) -> int:
        """Return after how many decode steps the caller hears of it, its end being one such."""
        left = self.output_tokens - self.generated
        if not self.emit_every:
            return left
        return min(left, self.emit_every - (self.generated - 1) % self.emit_every)
