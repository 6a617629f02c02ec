"""What a request costs at a replica, in seconds, by rates that are measured where the work happens.

Every part of a time to first token (TTFT) is an amount of `Work` times the seconds per unit that
`CostModel` holds for the replica::

    ttft    = base + max(queue, backlog + fetch, prefilled) + pull + load + prefill
    pull    = bytes from another GPU x PULL
    fetch   = disk bytes x DISK + remote bytes x REMOTE + peer bytes x PEER
    load    = bytes beyond the GPU x LOAD
    prefill = new tokens x (PREFILL + context x ATTENTION + running decodes x DECODE)

The context is the mean one of the new tokens, ``matched + new / 2``.

**Where rates come from.** Each rate starts at a configured value and is used from the first request
on. A replica's agent reports what its engine measures: the scheduler's steps, loads, reads from
disk and remote. Stock vLLM reports its prefills in its metrics, and LMCache its loads and reads. If
a server does not report its prefills, one number is fitted: how much longer than predicted a
prefill takes that no other one delays. No rate is inferred from a whole TTFT, because the sum does
not tell its parts apart.

**No belief cuts off its own evidence.** A rate that made the router stop using a tier or a replica
would never be measured again. So `CostModel.tick` returns to the start value of a rate that was not
measured for a minute (of computing: while the replica was idle), and the scorer uses a tier of
unknown speed.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import ceil, exp, inf
from statistics import median
from typing import Final

from router.config.cost_weights import DEFAULT_WEIGHTS, CostWeights
from router.config.settings import RatesConfig
from warmroute_common.agent_protocol import ComputeRates

_KNOWN_TICKS: Final = 60
"""Seconds after which a rate that was not measured again counts as not known."""
_COPY_KEPT: Final = 0.75
"""Weight of a copy after the next one."""
_ANSWER_KEPT: Final = 0.95
"""Weight of an answer after the next one."""
_ALONE_KEPT: Final = 9
"""Prefills of which the median is taken, for a server that reports no rates."""
_LEAST_ALONE_TOKENS: Final = 256
"""A shorter prefill says little about the time of a token."""
_MOST_CORRECTION: Final = 1000.0
"""Factor by which the fitted time of a token differs from its start value at most."""


class CostPart(IntEnum):
    """A part of the cost that has its own rate, and its unit."""

    BASE = 0
    """A request."""
    PREFILL = 1
    """A token to prefill."""
    ATTENTION = 2
    """A token to prefill, times a token of its context."""
    DECODE = 3
    """A token to prefill, times a decode that runs at the same time."""
    LOAD = 4
    """A byte, from CPU RAM to the GPU."""
    DISK = 5
    """A byte, from disk to CPU RAM."""
    REMOTE = 6
    """A byte, from a remote store to CPU RAM."""
    PEER = 7
    """A byte, from another replica to CPU RAM."""
    OUTPUT_TOKEN = 8
    """A token of an answer after its first one (TPOT), if nothing else runs at the replica."""
    PULL = 9
    """A byte, from another replica's GPU to the GPU."""


_COMPUTING: Final = (CostPart.PREFILL, CostPart.ATTENTION, CostPart.DECODE)


@dataclass(slots=True, kw_only=True)  # not frozen: many are made for each decision
class Work:
    """What a request requires of one replica."""

    new_tokens: int
    """To prefill."""
    matched_tokens: int = 0
    """Their context: already cached in some tier."""
    load_bytes: float = 0.0
    """Matched beyond the GPU."""
    disk_bytes: float = 0.0
    remote_bytes: float = 0.0
    peer_bytes: float = 0.0
    """To copy from another replica."""
    pull_bytes: float = 0.0
    """To pull from the replica that has prefilled the prompt."""
    prefilled_s: float = 0.0
    """Seconds until that replica has prefilled it."""
    queue_s: float = 0.0
    """Seconds until the replica begins with the request."""
    backlog_s: float = 0.0
    """Seconds until the replica has fetched what it was asked to fetch before."""
    decoding: int = 0
    """Decodes that run there: their steps lengthen a prefill."""
    context_tokens: int = 0
    """Tokens whose KV these decodes read in each step."""
    reads_late: bool = False
    """Whether the replica accepts no prefetch and reads slow tiers when it begins with the request:
    then the reads take its time, like loading."""

    @property
    def prompt_tokens(self) -> int:
        """All tokens of the prompt."""
        return self.new_tokens + self.matched_tokens

    @property
    def attended(self) -> float:
        """New tokens times the mean context that each attends to."""
        return self.new_tokens * (self.matched_tokens + self.new_tokens / 2)

    def with_cached(self, cached_tokens: int, kv_bytes_per_token: float) -> "Work":
        """Return the real work, now that the number of cached tokens is known.

        Matched tokens that were not cached are missing from the end: first those to be copied, then
        those of the slowest tiers.
        """
        matched = min(cached_tokens, self.prompt_tokens - 1)
        lost_bytes = max(0, self.matched_tokens - matched) * kv_bytes_per_token
        left_to_lose = lost_bytes
        left: list[float] = []
        for nbytes in (self.peer_bytes, self.remote_bytes, self.disk_bytes):
            left.append(max(0.0, nbytes - left_to_lose))
            left_to_lose = max(0.0, left_to_lose - nbytes)
        peer_bytes, remote_bytes, disk_bytes = left
        return replace(
            self,
            new_tokens=self.prompt_tokens - matched,
            matched_tokens=matched,
            load_bytes=max(0.0, self.load_bytes - lost_bytes),
            disk_bytes=disk_bytes,
            remote_bytes=remote_bytes,
            peer_bytes=peer_bytes,
        )


@dataclass(slots=True, kw_only=True)  # not frozen: many are made for each decision
class Cost:
    """The predicted parts of a TTFT, in seconds."""

    base_s: float
    queue_s: float
    backlog_s: float
    """Before the fetch; 0 if there is nothing to fetch."""
    fetch_s: float
    load_s: float
    prefill_s: float
    prefilled_s: float = 0.0
    """Until another replica has prefilled the prompt."""
    pull_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """The replica's time that the request takes from those behind it."""
        return self.load_s + self.prefill_s

    @property
    def fetched_s(self) -> float:
        """Until all KV is in CPU RAM."""
        return self.backlog_s + self.fetch_s

    @property
    def queued_s(self) -> float:
        """The queue's part of the TTFT: 0 if a longer fetch or remote prefill hides it."""
        return 0.0 if max(self.fetched_s, self.prefilled_s) > self.queue_s else self.queue_s

    @property
    def ttft_s(self) -> float:
        """Predicted TTFT; the fetch and a remote prefill overlap the queue."""
        ready_s = max(self.queue_s, self.fetched_s, self.prefilled_s)
        return self.base_s + ready_s + self.pull_s + self.busy_s


def _prefill_s(seconds: Sequence[float], work: Work) -> float:
    """Return how long computing takes, at these seconds per unit of each `CostPart`."""
    return (
        seconds[CostPart.PREFILL] * work.new_tokens
        + seconds[CostPart.ATTENTION] * work.attended
        + seconds[CostPart.DECODE] * work.new_tokens * work.decoding
    )


class CostModel:
    """One replica's seconds per unit of work: measured ones, and start values for the others."""

    def __init__(self, config: RatesConfig, weights: CostWeights = DEFAULT_WEIGHTS) -> None:
        per_token_s = 1 / config.prefill_tokens_per_s
        self._start = (
            weights.base_s,
            per_token_s,
            per_token_s / weights.attention_tokens,
            per_token_s * config.decode_slowdown,
            1 / config.cpu_load_bytes_per_s,
            1 / config.disk_bytes_per_s,
            1 / config.remote_bytes_per_s,
            1 / config.peer_bytes_per_s,
            weights.output_token_s,
            1 / config.pull_bytes_per_s,
        )
        self._seconds = list(self._start)
        self._measured_on: dict[CostPart, float] = {}
        """By part, how much it was measured on: bytes, tokens or requests, a number that grows."""
        self._age: dict[CostPart, int] = {}
        """How many ticks ago that grew last; without an entry the rate is a start value."""
        self._copied = (0.0, 0.0)
        """Bytes and seconds of the last copies."""
        self._pulled = (0.0, 0.0)
        """Bytes and seconds of the last pulls."""
        self._answered = (0.0, 0.0)
        """Tokens and seconds of the last answers."""
        self._reports_compute = False
        self._alone: deque[float] = deque(maxlen=_ALONE_KEPT)

    def per_second(self, part: CostPart) -> float:
        """Return a rate: units (tokens, bytes, ...) per second, infinite for a unit of no time."""
        seconds = self._seconds[part]
        return 1 / seconds if seconds else inf

    def seconds(self, part: CostPart) -> float:
        """Return the seconds that a unit (token, byte, ...) takes."""
        return self._seconds[part]

    def knows(self, part: CostPart) -> bool:
        """Whether a rate was measured, and is more than its start value."""
        return part in self._age

    def measured(self) -> dict[CostPart, float]:
        """Return the units per second of the rates that `knows` confirms."""
        return {
            part: self.per_second(part)
            for part in CostPart
            if self.knows(part) and self._seconds[part]
        }

    def measured_on(self, part: CostPart) -> float:
        """Return how much a rate was measured on: bytes, tokens or requests."""
        return self._measured_on.get(part, 0.0)

    def cost(self, work: Work) -> Cost:
        """Return the predicted cost of a request."""
        seconds = self._seconds
        fetch_s = (
            seconds[CostPart.DISK] * work.disk_bytes
            + seconds[CostPart.REMOTE] * work.remote_bytes
            + seconds[CostPart.PEER] * work.peer_bytes
        )
        load_s = seconds[CostPart.LOAD] * work.load_bytes
        if work.reads_late:
            fetch_s, load_s = 0.0, load_s + fetch_s
        return Cost(
            base_s=seconds[CostPart.BASE],
            queue_s=work.queue_s,
            backlog_s=work.backlog_s if fetch_s else 0.0,
            fetch_s=fetch_s,
            load_s=load_s,
            prefill_s=_prefill_s(seconds, work),
            prefilled_s=work.prefilled_s,
            pull_s=seconds[CostPart.PULL] * work.pull_bytes,
        )

    def report(self, part: CostPart, per_second: float, measured_on: float) -> None:
        """Set a rate that was measured where the work happens; 0: nothing was measured yet.

        ``measured_on`` is how much it was measured on since the start. If it has not grown, this is
        an old measurement.
        """
        if 0 < per_second < inf and measured_on != self._measured_on.get(part):
            self._seconds[part] = 1 / per_second
            self._measured_on[part] = measured_on
            self._age[part] = 0

    def report_compute(self, rates: ComputeRates) -> None:
        """Set the rates of computing, as an engine measured them on its scheduler's steps."""
        self._reports_compute = True
        for part, seconds in (
            (CostPart.PREFILL, rates.prefill_token_s),
            (CostPart.ATTENTION, rates.attended_token_s),
            (CostPart.DECODE, rates.decode_token_s),
        ):
            self._seconds[part] = seconds
            self._measured_on[part] = rates.tokens
            self._age[part] = 0
        self._seconds[CostPart.BASE] = self._start[CostPart.BASE] + rates.step_s

    def report_prefill(self, tokens_per_s: float, tokens: float) -> None:
        """Set the rate at which a server without an engine of ours says that it prefills.

        ``tokens`` is how many it has computed since its start.
        """
        if 0 < tokens_per_s < inf:
            self._reports_compute = True
            self._scale_compute(1 / tokens_per_s / self._start[CostPart.PREFILL], tokens)

    def _scale_compute(self, factor: float, measured_on: float) -> None:
        """Multiply the start values of computing by ``factor``."""
        for part in _COMPUTING:
            self._seconds[part] = factor * self._start[part]
            self._measured_on[part] = measured_on
            self._age[part] = 0

    def note_alone(self, work: Work, ttft_s: float) -> bool:
        """Fit the time of a token to a prefill that no other one delayed; return if it was used.

        Only for a replica that reports nothing about computing. A prefill with loads or fetches
        says nothing: their own time is not known well enough.
        """
        is_plain = not (work.load_bytes or work.disk_bytes or work.remote_bytes or work.peer_bytes)
        if self._reports_compute or not is_plain or work.new_tokens < _LEAST_ALONE_TOKENS:
            return False
        computed_s = max(0.0, ttft_s - self._start[CostPart.BASE])
        self._alone.append(computed_s / _prefill_s(self._start, work))
        factor = min(_MOST_CORRECTION, max(1 / _MOST_CORRECTION, median(self._alone)))
        self._scale_compute(factor, self.measured_on(CostPart.PREFILL) + 1)
        return True

    def note_copy(self, nbytes: int, seconds: float) -> None:
        """Measure the rate of copies from other replicas; later copies count more."""
        self._copied = self._average(CostPart.PEER, self._copied, _COPY_KEPT, nbytes, seconds)

    def note_pull(self, nbytes: int, seconds: float) -> None:
        """Measure the rate of pulls from other replicas' GPUs; later pulls count more."""
        self._pulled = self._average(CostPart.PULL, self._pulled, _COPY_KEPT, nbytes, seconds)

    def note_output_tokens(self, tokens: int, seconds: float) -> None:
        """Measure how fast answers are written; later ones count more."""
        self._answered = self._average(
            CostPart.OUTPUT_TOKEN, self._answered, _ANSWER_KEPT, tokens, seconds
        )

    def _average(
        self, part: CostPart, before: tuple[float, float], kept: float, amount: int, seconds: float
    ) -> tuple[float, float]:
        """Set the rate of a part to the weighted mean of all observations; return their sums."""
        sums = kept * before[0] + amount, kept * before[1] + seconds
        self.report(part, sums[0] / sums[1], self.measured_on(part) + amount)
        return sums

    def tick(self, *, is_idle: bool = True) -> None:
        """Forget a speed that was not measured for a minute; to be called once a second.

        The start value counts again then. Speeds of computing are kept while the replica is not
        idle: a server may show them only in prefills that no other one delays.
        """
        for part in list(self._age):
            if part in _COMPUTING and not is_idle:
                continue
            self._age[part] += 1
            if self._age[part] > _KNOWN_TICKS:
                del self._age[part]
                self._seconds[part] = self._start[part]
                if part is CostPart.PEER:
                    self._copied = (0.0, 0.0)
                elif part is CostPart.PULL:
                    self._pulled = (0.0, 0.0)
                elif part is CostPart.OUTPUT_TOKEN:
                    self._answered = (0.0, 0.0)
                elif part is CostPart.PREFILL:
                    self._alone.clear()

    def take_over(self, known: "Mapping[CostPart, CostModel]") -> None:
        """Use other replicas' measurements for the rates that were not measured here."""
        for part, other in known.items():
            if part not in self._age:
                self._seconds[part] = other._seconds[part]

    def __repr__(self) -> str:
        rates = " ".join(f"{part.name.lower()}={self.per_second(part):.4g}" for part in CostPart)
        return f"<CostModel {rates}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Quantiles of absolute values."""

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
    """How far predictions were from observations."""

    answers: int
    """Number of answers that the figures are computed from."""
    ratio: Quantiles
    """``|observed / predicted - 1|``: 0.12 means 12%."""
    seconds: Quantiles
    """``|observed - predicted|``."""
    bias: float
    """Median of observed / predicted: above 1.0, answers come later than predicted."""


class PredictionErrors:
    """The last `KEPT` pairs of predicted and observed TTFT of one replica."""

    KEPT: Final = 256

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=self.KEPT)

    def note(self, predicted_s: float, observed_s: float) -> None:
        """Add a pair (ignored unless both are positive); of more than `KEPT` the oldest goes."""
        if predicted_s > 0 and observed_s > 0:
            self._pairs.append((predicted_s, observed_s))

    def figures(self) -> ErrorFigures | None:
        """Return the figures of the kept pairs, or None if there are none."""
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


class RecentWork:
    """How busy a fleet was over about the last `CostWeights.recent_s`."""

    def __init__(self, weights: CostWeights = DEFAULT_WEIGHTS) -> None:
        self._recent_s = weights.recent_s
        self._busy_s = 0.0
        self._as_of_s = 0.0

    def note(self, busy_s: float, now_s: float) -> None:
        """Add a request that keeps a replica busy for ``busy_s``."""
        self._busy_s = self._busy_s * self._kept(now_s) + busy_s
        self._as_of_s = now_s

    def share(self, now_s: float) -> float:
        """Return the seconds of work per second."""
        return self._busy_s * self._kept(now_s) / self._recent_s

    def _kept(self, now_s: float) -> float:
        return exp(min(0.0, self._as_of_s - now_s) / self._recent_s)

    def __repr__(self) -> str:
        return f"<RecentWork {self._busy_s:.3f} s as of {self._as_of_s:.3f}>"
