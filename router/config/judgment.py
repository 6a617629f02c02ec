"""Every number that the decision weighs by: its value, its unit, its reason. One table.

Tuned on generated workloads (`bench.workloads`, seeds from 100 on) and reported on traces
and seeds that no tuning saw; `bench.proof` shows what each mechanism earns. What only
bounds the decision's own time or memory stands where it is used.
"""

from dataclasses import dataclass, field
from math import log
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """How rates are learned from observed times to first token; see `router.latency.ttft_model`."""

    base_s: float = 0.01
    """Seconds. Start of what every request takes whatever it holds; learned like the rest."""
    attention_tokens: float = 32_768.0
    """Tokens. Start of the context length at which attending to it doubles a token's cost:
    that of a model of 8 billion parameters, 4096 wide."""
    noise: float = 0.1
    """Variance of one observation's logarithm: TTFTs scatter by about 30%."""
    queue_noise: float = 1.0
    """Standard deviation of a queue's error, as a share of the predicted queue: a request
    that was queued for long tells little of what it takes itself."""
    tail: float = 4.0
    """Degrees of freedom of the noise; the fewer, the less an outlier moves."""
    drift: float = 0.002
    """Variance that a rate gains with each observation that concerns it: replicas change."""
    measured: float = 0.02
    """Variance of a rate that the engine itself measured."""
    kinship: float = 0.2
    """Variance between replicas of one fleet: most are alike, some are half as fast."""
    slight_slowdown: float = 1e-3
    """The decode slowdown that learning starts from where none is configured."""
    freedom: float = log(1e4)
    """Logarithm: how far a rate may be learned away from its start, or from what was measured."""
    other_work: float = 2.0
    """Times: a prefill so much longer than planned is another one, and teaches nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgment:
    """What the pick and the line of waiting requests go by."""

    least_behind: float = 0.02
    """Requests that wait behind one at the least: of equal times to first token the one that
    computes less is better."""
    most_behind: float = 32.0
    """Requests. How many are taken at most to wait behind one: a second of the replica's time
    counts at most so many times beside a second of waiting."""
    near_s: float = 0.02
    """Seconds. Scores within so much of the best are equal: predictions differ by noise."""
    least_copy_gain_s: float = 0.15
    """Seconds. A copy that saves less is not worth asking two agents for: that takes them
    time, too, which is not in the rates."""
    recent_s: float = 30.0
    """Seconds. Time constant of what counts as recent: long beside a turn, short beside a
    session."""
    spills_to_move: int = 2
    """Turns: after so many spilled in a row the session's KV is elsewhere; its home follows."""
    learns: bool = True
    """Whether rates are learned from answers; measured ones are taken over in any case."""
    learning: Learning = field(default_factory=Learning)


DEFAULT: Final = Judgment()
