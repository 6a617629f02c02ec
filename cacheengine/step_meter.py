"""What a scheduler step of vLLM takes, fitted to the steps that ran.

A step computes prompt tokens of some requests, and one token for each request that decodes. Its
duration is nearly linear in these amounts::

    step = base + decode x sequences + prefill x tokens + attention x (tokens x their context)

`StepMeter` fits ``base`` and ``decode`` to the steps that only decode, and ``prefill`` and
``attention`` to what the other steps take longer, each by least squares. Recent steps count more,
and each counts with the inverse of its prompt tokens, since a long step may be off by more. No
coefficient is negative. The same code runs inside vLLM and inside simulated replicas.
"""

import threading
from math import inf
from statistics import median
from typing import Final

from warmroute_common.agent_protocol import ComputeRates

_KEPT: Final = 0.995
"""Weight of a step after the next one: about the last 200 steps count."""
_FEWEST_STEPS: Final = 24
"""Steps with prompt tokens before anything is reported. A model that has just started warms up, so
first steps whose time per token is much above the median are left out."""
_WARM_UP: Final = 2.0
"""Times the median of the first steps."""
_RIDGE: Final = 1e-3
"""Share of a weight that pulls a coefficient towards 0 if the steps do not tell it."""
_MOST_LATE: Final = 4.0
"""A step that takes longer than this many times the fit counts as if it took that. A halt of the
machine would weigh more than a hundred other steps; a slower model is still learned in a few."""


class _Fit:
    """The two coefficients of ``y = first x a + second x b``, neither of them negative."""

    def __init__(self) -> None:
        self._aa = self._ab = self._bb = self._ay = self._by = 0.0
        self.count = 0

    def add(self, a: float, b: float, y: float) -> None:
        weight = 1.0 / a
        self._aa = _KEPT * self._aa + weight * a * a
        self._ab = _KEPT * self._ab + weight * a * b
        self._bb = _KEPT * self._bb + weight * b * b
        self._ay = _KEPT * self._ay + weight * a * y
        self._by = _KEPT * self._by + weight * b * y
        self.count += 1

    def solved(self) -> tuple[float, float]:
        first = self._ay / self._aa if self._aa > 0.0 else 0.0
        second = self._by / self._bb if self._bb > 0.0 else 0.0
        aa, bb = self._aa * (1.0 + _RIDGE), self._bb * (1.0 + _RIDGE)
        if (determinant := aa * bb - self._ab * self._ab) <= 0.0:
            return first, 0.0
        both = (
            (bb * self._ay - self._ab * self._by) / determinant,
            (aa * self._by - self._ab * self._ay) / determinant,
        )
        if both[1] < 0.0:
            return first, 0.0
        return (0.0, second) if both[0] < 0.0 else both


class StepMeter:
    """Fits what steps take. Steps are added by one thread; any may read.

    ``step_tokens`` is how many tokens a step computes at most (``max_num_batched_tokens``).
    """

    def __init__(self, step_tokens: int = 2048) -> None:
        self.step_tokens = step_tokens
        self._lock = threading.Lock()
        self._decodes = _Fit()
        self._prefills = _Fit()
        self._tokens = 0
        self._first: list[tuple[int, float, float]] = []
        """The first steps: prompt tokens, attended tokens, seconds."""
        self._first_s = 0.0
        """Time of these steps, all that they did."""

    def add(
        self, step_s: float, *, prefill_tokens: int, attended: float, decoding: int, steps: int = 1
    ) -> None:
        """Add a step, or ``steps`` that were timed together, one of them with prompt tokens.

        ``attended`` is the sum over the prompt tokens of the tokens that each attends to;
        ``decoding`` is the number of sequences that got one token each.
        """
        with self._lock:
            base_s, decode_s = self._decodes.solved()
            if not prefill_tokens:
                if self._decodes.count >= _FEWEST_STEPS and base_s + decode_s:
                    step_s = min(step_s, _MOST_LATE * (base_s + decode_s * decoding))
                self._decodes.add(1.0, decoding, step_s)
                return
            longer_s = max(0.0, step_s - steps * base_s - decode_s * decoding)
            self._tokens += prefill_tokens
            if not self._prefills.count:
                self._first_s += step_s
                self._add_first(prefill_tokens, attended, longer_s)
                return
            prefill_s, attention_s = self._prefills.solved()
            if prefill_s + attention_s:
                most_s = _MOST_LATE * (prefill_s * prefill_tokens + attention_s * attended)
                longer_s = min(longer_s, most_s)
            self._prefills.add(prefill_tokens, attended, longer_s)

    def _add_first(self, prefill_tokens: int, attended: float, seconds: float) -> None:
        self._first.append((prefill_tokens, attended, seconds))
        if len(self._first) < _FEWEST_STEPS:
            return
        most_s = _WARM_UP * median(each_s / tokens for tokens, _, each_s in self._first)
        for tokens, each_attended, each_s in self._first:
            if each_s / tokens <= most_s:
                self._prefills.add(tokens, each_attended, each_s)
        self._first.clear()

    def prefill_s(self, tokens: int) -> float:
        """Return how long computing ``tokens`` takes; infinite before the first step.

        While few steps were seen, a token takes as long as in these, warming up included.
        """
        rates = self.rates()
        if rates is None:
            with self._lock:
                return tokens * self._first_s / self._tokens if self._tokens else inf
        return tokens * (rates.prefill_token_s + tokens / 2 * rates.attended_token_s)

    def rates(self) -> ComputeRates | None:
        """Return what a prompt token takes; None while too few steps were seen.

        A prompt is computed in steps of up to ``step_tokens`` tokens. So a token carries that share
        of each step's base and decodes.
        """
        with self._lock:
            if not self._prefills.count:
                return None
            base_s, decode_s = self._decodes.solved()
            prefill_s, attention_s = self._prefills.solved()
            return ComputeRates(
                step_s=base_s,
                prefill_token_s=prefill_s + base_s / self.step_tokens,
                attended_token_s=attention_s,
                decode_token_s=decode_s / self.step_tokens,
                steps=self._prefills.count,
                tokens=self._tokens,
            )

    def __repr__(self) -> str:
        return f"<StepMeter {self._prefills.count} prefills, {self._decodes.count} decodes>"
