"""Speeds from the counters in a server's metrics, by their growth between two readings. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Final, NamedTuple

from router.fleet.cost_model import CostPart

_GB: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedCounters:
    """Two counters in Prometheus' text format whose quotient is a speed.

    Their series are added up: a server may have several engines.
    """

    part: CostPart
    """Whose rate this is."""
    amount: str
    """Name of the counter of bytes or tokens."""
    time: str
    """Name of the counter of the time that they took."""
    labels: str = ""
    """A regular expression that is found in the labels of the series that count."""
    unit: float = 1.0
    """To multiply the quotient by, for units per second of `CostPart`."""
    least: float = 0.0
    """A smaller growth of the amount says little about the speed."""
    is_mean: bool = False
    """Whether they are the sum and the count of a histogram of speeds: measured on the count."""
    adds_ranks: bool = False
    """Whether each series of ``time`` is a rank that does its own part at the same time."""

    @classmethod
    def of_histogram(cls, part: CostPart, name: str, labels: str) -> "SpeedCounters":
        """Return the counters of a histogram whose observations are speeds in GB/s."""
        total, count = f"{name}_sum", f"{name}_count"
        return cls(part=part, amount=total, time=count, labels=labels, unit=_GB, is_mean=True)


class Speed(NamedTuple):
    """A measured speed."""

    part: CostPart
    per_second: float
    measured_on: float
    """How much it was measured on since the server's start: bytes, tokens or loads."""


class Others(NamedTuple):
    """What two counters contain that says nothing about the speed, as totals."""

    amount: float
    time: float
    are_known: bool = True
    """If not, what came since the last reading gives no speed."""


_NO_OTHERS: Final = Others(0.0, 0.0)


class _Totals(NamedTuple):
    amount: float
    time: float
    ranks: int
    others: Others


class CounterSpeeds:
    """Follows one server's counters from reading to reading."""

    def __init__(self) -> None:
        self._before: dict[SpeedCounters, _Totals] = {}
        """As of the last reading that gave a speed, or the first one."""

    def read(
        self,
        metrics: str,
        counters: Sequence[SpeedCounters],
        others: Mapping[CostPart, Others] = MappingProxyType({}),
    ) -> list[Speed]:
        """Return the speeds since the last reading; none for the first one, or after a restart.

        What has grown too little for a speed counts in the next reading. Counters that were not
        read last time have their first reading now. Where most of the time was that of ``others``,
        what is left says nothing.
        """
        totals = _totals(metrics, counters, others)
        self._before = {each: self._before.get(each, now) for each, now in totals.items()}
        speeds = []
        for each, now in totals.items():
            before = self._before[each]
            others_time = now.others.time - before.others.time
            amount = now.amount - before.amount - (now.others.amount - before.others.amount)
            time = now.time - before.time - others_time
            if amount < 0 or time < others_time or not now.others.are_known:
                self._before[each] = now
            elif amount > 0 and amount >= each.least and time > 0:
                self._before[each] = now
                per_second = each.unit * amount / time * (now.ranks if each.adds_ranks else 1)
                speeds.append(
                    Speed(each.part, per_second, now.time if each.is_mean else now.amount)
                )
        return speeds


def series_of(metrics: str, names: Iterable[str]) -> dict[str, list[tuple[str, float]]]:
    """Return the series of some metrics in Prometheus' text format: their labels and values.

    A value that is not a finite number is left out.
    """
    named: dict[str, list[tuple[str, float]]] = {name: [] for name in names}
    # All of it takes a real parser many milliseconds of the event loop.
    for line in metrics.splitlines():
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        if name in named:
            with suppress(ValueError):
                if isfinite(number := float(value)):
                    named[name].append((labels, number))
    return named


def _totals(
    metrics: str, counters: Sequence[SpeedCounters], others: Mapping[CostPart, Others]
) -> dict[SpeedCounters, _Totals]:
    """Return the sums over the series of each counter; 0 for what is not there."""
    named = series_of(metrics, [name for each in counters for name in (each.amount, each.time)])

    def values(name: str, labels: str) -> list[float]:
        return [value for found, value in named[name] if re.search(labels, found)]

    return {
        each: _Totals(
            sum(values(each.amount, each.labels)),
            sum(times := values(each.time, each.labels)),
            len(times),
            others.get(each.part, _NO_OTHERS),
        )
        for each in counters
    }
