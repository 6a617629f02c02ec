"""Times to first token, counted in steps of 5%: small, summable, and good for quantiles."""

from math import exp, log
from typing import Final

_STEP: Final = 0.05
_LEAST_S: Final = 1e-4


class Ttfts:
    """How many times fell into each step."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._quantiles: dict[float, float] = {}
        """Those that were asked for, until the counts change: most slices never do again."""
        self.count = 0

    def note(self, ttft_s: float) -> None:
        """Count a time."""
        self._add(round(log(max(ttft_s, _LEAST_S)) / _STEP), 1)

    def add(self, other: "Ttfts", sign: int = 1) -> None:
        """Add others, or take them away again."""
        for step, count in other._counts.items():
            self._add(step, sign * count)

    def quantile_s(self, share: float) -> float | None:
        """Return the time that this share of them was no longer than; None of no times."""
        if not self.count:
            return None
        if share not in self._quantiles:
            self._quantiles[share] = exp(self._step_at(share * self.count) * _STEP)
        return self._quantiles[share]

    def _step_at(self, rank: float) -> int:
        step = 0
        for step in sorted(self._counts):
            rank -= self._counts[step]
            if rank <= 0:
                break
        return step

    def _add(self, step: int, count: int) -> None:
        self._quantiles.clear()
        self.count += count
        left = self._counts.get(step, 0) + count
        if left:
            self._counts[step] = left
        else:
            del self._counts[step]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ttfts) and self._counts == other._counts

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"<Ttfts {self.count} p50={self.quantile_s(0.5)}>"
