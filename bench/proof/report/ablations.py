"""What each mechanism of the judgment earns, and whether it stays. Pure.

The rule: a mechanism stays where it earns more than the interval on some workload that
people have, and costs nowhere more than 5%. It earns where p90 or mean TTFT without it is
above that with it, beyond the interval; it costs where either is more than 5% below, and
below beyond the interval. The same is asked of a mechanism that ours is without
(``ours-with-NAME``): "keep" then says that it deserves a place. Other variants are told as
their time over ours, without a word.

A mechanism that does nothing still passes one such comparison in forty by chance, so the
number of regimes in which it earns is to be read beside the word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from bench.proof.case import OURS, adds, is_variant, mechanism
from bench.proof.kept.result import Result
from bench.proof.report.compare import MEAN, P90, time_ratio
from bench.proof.statistics import Estimate

PEOPLE_HAVE: Final = ("agents", "conversation", "rounds", "burst", "mixture")
"""Prompts that share nothing are a bound, not a workload."""
MOST_COST: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One mechanism in one case: a time without it over that with it; above 1 it earns."""

    case: str
    workload: str
    p90: Estimate | None
    mean: Estimate | None

    @property
    def earns(self) -> bool:
        """Whether it does, beyond the interval, on a workload that people have."""
        known = [each for each in (self.p90, self.mean) if each is not None]
        return self.workload in PEOPLE_HAVE and any(each.low > 1 for each in known)

    @property
    def costs(self) -> bool:
        """Whether it costs more than it may, and not by chance."""
        known = [each for each in (self.p90, self.mean) if each is not None]
        return any(each.value < 1 / (1 + MOST_COST) and each.high < 1 for each in known)


@dataclass(frozen=True, kw_only=True)
class Earned:
    """One mechanism everywhere."""

    name: str
    """Of the mechanism; of the variant, where that is something else than without or with one."""
    is_mechanism: bool
    effects: tuple[Effect, ...]

    @property
    def earns_in(self) -> int:
        """In how many cases it earns."""
        return sum(each.earns for each in self.effects)

    @property
    def costs_in(self) -> int:
        """In how many cases it costs."""
        return sum(each.costs for each in self.effects)

    @property
    def verdict(self) -> Literal["keep", "lose", ""]:
        """Whether it keeps its place, or would deserve one; of what is no mechanism nothing."""
        if not self.is_mechanism:
            return ""
        return "keep" if self.earns_in > 0 and self.costs_in == 0 else "lose"


def earned(results: Sequence[Result]) -> list[Earned]:
    """Return what each mechanism earns, from the results of the ablations."""
    names = [name for each in results for name in each.case.contenders if is_variant(name)]
    return [
        Earned(
            name=mechanism(name) or name,
            is_mechanism=mechanism(name) is not None,
            effects=tuple(_effect(each, name) for each in results if name in each.case.contenders),
        )
        for name in dict.fromkeys(names)
    ]


def _effect(result: Result, variant: str) -> Effect:
    without, with_it = (OURS, variant) if adds(variant) else (variant, OURS)
    return Effect(
        case=result.case.name,
        workload=result.case.workload,
        p90=time_ratio(result, without, with_it, P90),
        mean=time_ratio(result, without, with_it, MEAN),
    )
