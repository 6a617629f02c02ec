"""What the real and the simulated replica took for the same requests, side by side."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.calibration.target import Asked

TOLERANCE: Final = 0.2
"""How far the simulated TTFT may be from the real one, as a share of it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of request: the answers of both replicas, round by round."""

    name: str
    real: Sequence[Asked]
    simulated: Sequence[Asked]

    @property
    def real_s(self) -> float:
        """Return the real replica's median TTFT."""
        return statistics.median(each.ttft_s for each in self.real)

    @property
    def simulated_s(self) -> float:
        """Return the simulated replica's median TTFT."""
        return statistics.median(each.ttft_s for each in self.simulated)

    @property
    def ratio(self) -> float:
        """Return the simulated TTFT as a share of the real one."""
        return self.simulated_s / self.real_s

    @property
    def is_close(self) -> bool:
        """Whether the TTFTs differ by no more than `TOLERANCE`."""
        return abs(self.ratio - 1) <= TOLERANCE

    @property
    def has_same_hits(self) -> bool:
        """Whether both found the same number of cached tokens, in every round."""
        return _hits(self.real) == _hits(self.simulated)


def rows(
    real: Sequence[Mapping[str, Asked]], simulated: Sequence[Mapping[str, Asked]]
) -> list[Row]:
    """Return a row for each name in the rounds of both replicas."""
    return [
        Row(
            name=name,
            real=[each[name] for each in real],
            simulated=[each[name] for each in simulated],
        )
        for name in real[0]
    ]


def table(found: Sequence[Row]) -> str:
    """Return the rows for a person, and what is not as it should be."""
    header = f"{'':<24}{'cached tokens':>22}{'TTFT s':>18}"
    lines = [
        header,
        f"{'':<24}{'real':>11}{'simulated':>11}{'real':>9}{'simulated':>11}{'ratio':>8}",
    ]
    for row in found:
        lines.append(
            f"{row.name:<24}{_shown(row.real):>11}{_shown(row.simulated):>11}"
            f"{row.real_s:>9.3f}{row.simulated_s:>11.3f}{row.ratio:>8.2f}{_verdict(row)}"
        )
    return "\n".join(lines)


def as_json(row: Row) -> dict[str, object]:
    """Return a row with every sample."""
    return {
        "kind": row.name,
        "cached_tokens": {"real": _hits(row.real), "simulated": _hits(row.simulated)},
        "ttft_s": {
            "real": [each.ttft_s for each in row.real],
            "simulated": [each.ttft_s for each in row.simulated],
        },
        "median_ttft_s": {"real": row.real_s, "simulated": row.simulated_s},
        "ratio": row.ratio,
        "same_hits": row.has_same_hits,
        "within_tolerance": row.is_close,
    }


def _hits(asked: Sequence[Asked]) -> list[int]:
    return [each.cached_tokens for each in asked]


def _shown(asked: Sequence[Asked]) -> str:
    return "/".join(str(each) for each in dict.fromkeys(_hits(asked)))


def _verdict(row: Row) -> str:
    wrong = [] if row.has_same_hits else ["other hits"]
    wrong += [] if row.is_close else [f"not within {TOLERANCE:.0%}"]
    return f"  {', '.join(wrong)}" if wrong else ""
