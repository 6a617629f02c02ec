"""How far predicted times to first token were from those observed, lately.

Pure: no clock, no I/O.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

KEPT: Final = 256
"""Answers that the figures are of; older ones are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Of absolute values: half of them are at most ``p50``, nine in ten at most ``p90``."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quantiles":
        """Return the quantiles of some values, each one of them (nearest rank)."""
        ranked = sorted(values)
        p50, p90, p99 = (ranked[ceil(q * len(ranked)) - 1] for q in (0.5, 0.9, 0.99))
        return cls(p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFigures:
    """What `PredictionErrors` found."""

    answers: int
    """How many the figures are of."""
    ratio: Quantiles
    """``|observed / predicted - 1|``: 0.12 is 12% off."""
    seconds: Quantiles
    """``|observed - predicted|``."""
    bias: float
    """Median of observed / predicted: above 1.0, answers come later than predicted."""


class PredictionErrors:
    """The last `KEPT` pairs of predicted and observed TTFT of one replica."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def note(self, predicted_s: float, observed_s: float) -> None:
        """Add a pair, in place of the oldest if need be (ignored unless both are positive)."""
        if predicted_s > 0 and observed_s > 0:
            self._pairs.append((predicted_s, observed_s))

    def figures(self) -> ErrorFigures | None:
        """Return what the pairs say; None while there are none."""
        if not self._pairs:
            return None
        ratios = [observed_s / predicted_s for predicted_s, observed_s in self._pairs]
        off_s = [abs(observed_s - predicted_s) for predicted_s, observed_s in self._pairs]
        return ErrorFigures(
            answers=len(ratios),
            ratio=Quantiles.of([abs(ratio - 1) for ratio in ratios]),
            seconds=Quantiles.of(off_s),
            bias=Quantiles.of(ratios).p50,
        )

    def __len__(self) -> int:
        return len(self._pairs)

    def __repr__(self) -> str:
        return f"<PredictionErrors {self.figures()}>"
