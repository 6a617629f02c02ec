"""Samples of one contender in one case, and what they say together. Pure."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.overhead.load_generator import Outcome
from bench.ttft import percentile

MS = 1e3
KIB = 1 / 1024


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One contender, one case, one round. Times in seconds, memory in bytes."""

    round: int
    requests: int
    """That were answered well."""
    errors: int
    first_error: str | None
    elapsed_s: float
    cpu_s: float | None
    """User and system, of all its processes; None for a contender that is none."""
    stream_bytes: float | None
    """Memory that each open stream adds; None where too few were open."""
    load_cpu_s: float
    """CPU seconds of the load generator."""
    replicas_cpu_s: float
    """CPU seconds of the fake replicas."""
    first_p50_s: float | None
    """To the first byte of an answer's body; None without any."""
    first_p99_s: float | None
    whole_p50_s: float | None
    """To its last."""
    whole_p99_s: float | None
    late_p99_s: float | None
    """How much later than due the load generator took up a request; None where none was due."""
    place_s: float | None = None
    """Mean time of placing a request; None where none was placed, or that is not known."""


@dataclass(frozen=True, kw_only=True)
class Used:
    """What processes used while a sample was taken."""

    cpu_s: float | None
    stream_bytes: float | None
    replicas_cpu_s: float
    place_s: float | None = None


def sample(number: int, outcome: Outcome, used: Used) -> Sample:
    """Return a round's sample, from how the load generator fared and what its contender used."""
    return Sample(
        round=number,
        requests=len(outcome.whole_s),
        errors=outcome.errors,
        first_error=outcome.first_error,
        elapsed_s=outcome.elapsed_s,
        cpu_s=used.cpu_s,
        stream_bytes=used.stream_bytes,
        load_cpu_s=outcome.cpu_s,
        replicas_cpu_s=used.replicas_cpu_s,
        first_p50_s=_at(outcome.first_s, 0.5),
        first_p99_s=_at(outcome.first_s, 0.99),
        whole_p50_s=_at(outcome.whole_s, 0.5),
        whole_p99_s=_at(outcome.whole_s, 0.99),
        late_p99_s=_at(outcome.late_s, 0.99),
        place_s=used.place_s,
    )


def _at(values: Sequence[float], share: float) -> float | None:
    return percentile(values, share) if values else None


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Spread | None":
        """Return the spread of the values that there are; None without any."""
        known = [each for each in values if each is not None]
        if not known:
            return None
        return cls(median=statistics.median(known), low=min(known), high=max(known))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One contender in one case. An unknown figure is None."""

    contender: str
    rounds: int
    requests: int
    """In all rounds."""
    errors: int
    first_error: str | None
    cpu_ms: Spread | None
    """CPU milliseconds a request."""
    cpu_to_proxy: Spread | None
    """The same, in those of the bare proxy in the same round."""
    requests_per_s: Spread | None
    first_p50_ms: Spread | None
    """Milliseconds to the first byte; for all but `direct` what they add to it, round by round."""
    first_p99_ms: Spread | None
    whole_p50_ms: Spread | None
    whole_p99_ms: Spread | None
    stream_kib: Spread | None
    """KiB of memory for each open stream."""
    load_cpu_share: Spread | None
    """How busy the load generator was: 1 is a whole core."""
    replicas_cpu_share: Spread | None
    place_ms: Spread | None = None
    """Milliseconds that placing a request took."""


def figures(
    contender: str,
    samples: Sequence[Sample],
    *,
    direct: Sequence[Sample] = (),
    proxy: Sequence[Sample] = (),
) -> Figures:
    """Return what the rounds say, each compared with the same round of the two others.

    Without ``direct`` latencies are the contender's own.
    """
    return Figures(
        contender=contender,
        rounds=len(samples),
        requests=sum(each.requests for each in samples),
        errors=sum(each.errors for each in samples),
        first_error=next((each.first_error for each in samples if each.first_error), None),
        cpu_ms=Spread.of([_scaled(_cpu_s(each), MS) for each in samples]),
        cpu_to_proxy=Spread.of([_ratio(*pair) for pair in _pairs(samples, proxy)]),
        requests_per_s=Spread.of([each.requests / each.elapsed_s for each in samples]),
        first_p50_ms=_added_ms(samples, direct, "first_p50_s"),
        first_p99_ms=_added_ms(samples, direct, "first_p99_s"),
        whole_p50_ms=_added_ms(samples, direct, "whole_p50_s"),
        whole_p99_ms=_added_ms(samples, direct, "whole_p99_s"),
        stream_kib=Spread.of([_scaled(each.stream_bytes, KIB) for each in samples]),
        load_cpu_share=Spread.of([each.load_cpu_s / each.elapsed_s for each in samples]),
        replicas_cpu_share=Spread.of([each.replicas_cpu_s / each.elapsed_s for each in samples]),
        place_ms=Spread.of([_scaled(each.place_s, MS) for each in samples]),
    )


def _pairs(samples: Sequence[Sample], others: Sequence[Sample]) -> Iterator[tuple[Sample, Sample]]:
    """Yield each round's sample with the other's of that round, where both have one."""
    by_round = {each.round: each for each in others}
    for each in samples:
        if each.round in by_round:
            yield each, by_round[each.round]


def _cpu_s(each: Sample) -> float | None:
    """Return CPU seconds a request."""
    if each.cpu_s is None or not each.requests:
        return None
    return each.cpu_s / each.requests


def _ratio(mine: Sample, proxys: Sample) -> float | None:
    cpu_s, proxys_cpu_s = _cpu_s(mine), _cpu_s(proxys)
    return cpu_s / proxys_cpu_s if cpu_s is not None and proxys_cpu_s else None


def _added_ms(samples: Sequence[Sample], direct: Sequence[Sample], name: str) -> Spread | None:
    if not direct:
        return Spread.of([_scaled(getattr(each, name), MS) for each in samples])
    pairs = _pairs(samples, direct)
    both = [(getattr(mine, name), getattr(its, name)) for mine, its in pairs]
    return Spread.of([(mine - its) * MS for mine, its in both if None not in (mine, its)])


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
