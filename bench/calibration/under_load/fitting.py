"""Rates of the model replicas that make one seed's TTFTs those of the real ones. Pure.

Times taken of one replica miss what shares the cores with it under load: stores, the
router, the client. At 80% of the load a few percent of a rate change the median TTFT
twofold, so that no time taken alone is good enough. How much slower a replica computes
and steps under load is therefore read off one seed's real TTFTs; the other seeds tell
whether it holds.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import log
from typing import Final

PREFILL: Final = "prefill_tokens_per_s"
STEP: Final = "step_s"
SLOWDOWNS: Final = tuple(1 + 0.025 * number for number in range(15))
"""Times: how much slower than alone a replica computes under load."""
LONGER_STEPS: Final = (1.0, 1.5, 2.0, 3.0)
"""Times: how much longer than alone what a step takes whatever is in it."""
FITTED: Final = ("p50", "p75", "p90")

Quantiles = Mapping[str, float]
"""Seconds of TTFT, by name."""


def candidates(rates: Mapping[str, float]) -> Iterator[dict[str, float]]:
    """Return the rates to be tried, the measured ones first."""
    for longer, slower in product(LONGER_STEPS, SLOWDOWNS):
        yield {**rates, PREFILL: rates[PREFILL] / slower, STEP: rates[STEP] * longer}


def misfit(played: Quantiles, real: Quantiles) -> float:
    """Return how far quantiles are off: the sum of their squared logarithmic ratios."""
    return sum(log(played[name] / real[name]) ** 2 for name in FITTED)


def fitted(
    rates: Mapping[str, float],
    real: Quantiles,
    play: Callable[[Mapping[str, float]], Quantiles],
) -> dict[str, float]:
    """Return the rates with which ``play`` comes nearest to the real quantiles."""
    return min(candidates(rates), key=lambda each: misfit(play(each), real))
