"""How sure a figure is: intervals by drawing the samples again and again. Pure."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

_DRAWS: Final = 2_000
_SEED: Final = 1
_LOW: Final = 0.025
"""What lies below, and as much above: an interval of 95%."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure of some samples and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def interval(figure: Callable[..., float], *groups: Sequence[Any], draws: int = _DRAWS) -> Interval:
    """Return ``figure(*groups)`` with its interval (percentile bootstrap).

    Each group is drawn from by itself: give pairs as one group of pairs, and what belongs
    together (the requests of a session) as one sample. The same samples give the same
    interval. Raises ValueError for a group without samples.
    """
    if not all(groups):
        raise ValueError("a group has no samples")
    chooser = random.Random(_SEED)
    drawn = sorted(
        figure(*(chooser.choices(group, k=len(group)) for group in groups)) for _ in range(draws)
    )
    return Interval(
        value=figure(*groups),
        low=drawn[round(_LOW * (draws - 1))],
        high=drawn[round((1 - _LOW) * (draws - 1))],
    )
