"""Every number that weighs in a decision: its value, its unit, its reason. One table.

Tuned on generated workloads (`bench.workloads`, seeds from 100 on) and reported on traces and
seeds that no tuning saw; `bench.proof` measures what each mechanism earns. Users can change
`admission.dispatch_ahead_s` and `admission.ageing` in ``router.yaml``; the rest is set here.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWeights:
    """What the cost model, the scorer, the picker and the admission weigh."""

    base_s: float = 0.01
    """Seconds. What a request takes besides its work: the servers' own time."""
    attention_tokens: float = 32_768.0
    """Tokens. Start value of the context length at which attention doubles the cost of a token:
    that of a model with 8 billion parameters and a width of 4096."""
    least_behind: float = 0.03
    """Requests assumed to queue behind a request, at least: of two equal TTFTs the one that
    computes less is better."""
    most_behind: float = 32.0
    """Requests assumed to queue behind a request, at most: a second of the replica's time never
    counts more than 32 seconds of waiting."""
    first_token_weight: float = 6.0
    """How many seconds after the first token count as one before it; `RouterConfig` sets it."""
    output_tokens: float = 256.0
    """Tokens. Expected length of an answer of which nothing is known."""
    output_token_s: float = 0.01
    """Seconds. Start value of the time per output token of a replica that prefills nothing."""
    doubling_tokens: float = 200_000.0
    """Tokens. Context of all answers that run at a replica at which its steps take twice as long as
    without. A step reads the weights and that KV: of a model with 8 billion parameters and 128 KiB
    of KV a token, 122,000 tokens are as large as the weights, and a step has costs besides."""
    most_prefill_share: float = 0.9
    """Share of a replica's time that prefills take from its answers, at most: a burst of prefills
    passes, and a prediction without a bound would be infinite."""
    near_s: float = 0.02
    """Seconds. Scores that differ from the best by less are equal: predictions are noisy."""
    least_copy_gain_s: float = 0.15
    """Seconds. A copy that saves less is not made: the calls to two agents take time that the
    rates do not contain."""
    recent_s: float = 30.0
    """Seconds. Time constant of the recent load: longer than a turn, shorter than a session."""
    recent_requests: int = 50
    """Requests. Window of the averages of answer time and work per request."""
    spills_to_move: int = 2
    """Turns. After this many turns in a row elsewhere, the session's home moves there."""
    max_candidates: int = 16
    """Replicas whose cost is computed for one request, besides the session's home: bounds the time
    of a decision in a large fleet, and picks as well as if all were scored."""
    max_sources: int = 2
    """Replicas per kind that KV may be copied from: the ones with the longest matches."""
    max_prefillers: int = 3
    """Replicas that each candidate may have prefill the prompt: the cheapest ones. Bounds the pairs
    that are scored."""
    alike_share: float = 0.1
    """Share. Requests whose predicted work differs by less may have equal prompts."""
    least_telling_copy_tokens: int = 1024
    """Tokens. A smaller copy says nothing about the rate: its fixed cost dominates."""
    copy_pause_s: float = 5.0
    """Seconds without copies from or to a replica after one failed."""


DEFAULT_WEIGHTS: Final = CostWeights()
