"""What a request costs at a replica, in seconds, and how the rates are learned.

Every part of a time to first token (TTFT) is an amount of `Work` times the seconds per unit that
`CostModel` holds for the replica::

    ttft    = base + max(queue, backlog + fetch) + load + prefill
    fetch   = disk bytes x DISK + remote bytes x REMOTE + peer bytes x PEER
    load    = bytes beyond the GPU x LOAD
    prefill = new tokens x (PREFILL + context x ATTENTION + running decodes x DECODE)

The context is the mean one of the new tokens, ``matched + new / 2``.

**Learning.** The seconds per unit are kept as a vector x of logarithms, so that none becomes
negative. A covariance matrix P says how uncertain each one is, and which of them can explain the
same observation. With s the parts' shares of the predicted TTFT, and w the share of the queue, one
observation corrects all parts at once, as an extended Kalman filter does::

    e  = log(observed / predicted)
    U  = s' P s                          variance of the prediction
    N  = noise + (queue_noise w)^2       variance of the observation
    N' = N (4 + e^2 / (U + N)) / 5       larger for an outlier
    x += P s e / (U + N')
    P -= P s s' P / (U + N')

N' makes the filter robust: an outlier counts as noise (Student's t with 4 degrees of freedom). The
covariance separates the cost of a token from the cost of its context and of concurrent decodes:
with variances alone that took hundreds of requests, and long prompts were predicted wrongly
until then.

The share of the queue corrects no rate. All requests that wait behind one slow prefill would
repeat the same error: in a model of a replica at 70% load that moved the rates without bound.
The error of the queue is not assigned to the other parts either: the larger the share of the queue,
the noisier the observation. Without that, queues longer than predicted made the learned load
several times too slow.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import ceil, exp, log, sqrt
from typing import Final

from router.config.cost_weights import DEFAULT_WEIGHTS, CostWeights, LearningWeights
from router.config.settings import RatesConfig


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
    queue_s: float = 0.0
    """Seconds until the replica begins with the request."""
    backlog_s: float = 0.0
    """Seconds until the replica has fetched what it was asked to fetch before."""
    decoding: int = 0
    """Decodes that run there: their steps lengthen a prefill."""
    reads_late: bool = False
    """Whether the replica accepts no prefetch and reads slow tiers when it begins with the request:
    then the reads take its time, like loading."""

    @property
    def attended(self) -> float:
        """New tokens times the mean context that each attends to."""
        return self.new_tokens * (self.matched_tokens + self.new_tokens / 2)

    def with_cached(self, cached_tokens: int, kv_bytes_per_token: float) -> "Work":
        """Return the real work, now that the number of cached tokens is known.

        Matched tokens that were not cached are missing from the end: first those to be copied, then
        those of the slowest tiers.
        """
        prompt_tokens = self.new_tokens + self.matched_tokens
        matched = min(cached_tokens, prompt_tokens - 1)
        lost_bytes = max(0, self.matched_tokens - matched) * kv_bytes_per_token
        left_to_lose = lost_bytes
        left: list[float] = []
        for nbytes in (self.peer_bytes, self.remote_bytes, self.disk_bytes):
            left.append(max(0.0, nbytes - left_to_lose))
            left_to_lose = max(0.0, left_to_lose - nbytes)
        peer_bytes, remote_bytes, disk_bytes = left
        return replace(
            self,
            new_tokens=prompt_tokens - matched,
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
        """The queue's part of the TTFT: 0 if a longer fetch hides it."""
        return 0.0 if self.fetched_s > self.queue_s else self.queue_s

    @property
    def ttft_s(self) -> float:
        """Predicted TTFT; the fetch overlaps the queue."""
        return self.base_s + max(self.queue_s, self.fetched_s) + self.busy_s


_PARTS: Final = tuple(CostPart)


class CostModel:
    """One replica's rates: predicts the cost of a request; starts from the configured rates."""

    def __init__(
        self, config: RatesConfig, learning: LearningWeights = DEFAULT_WEIGHTS.learning
    ) -> None:
        self._learning = learning
        per_token_s = 1 / config.prefill_tokens_per_s
        self._start = [
            log(self._learning.base_s),
            log(per_token_s),
            log(per_token_s / self._learning.attention_tokens),
            log(per_token_s * max(config.decode_slowdown, self._learning.slight_slowdown)),
            -log(config.cpu_load_bytes_per_s),
            -log(config.disk_bytes_per_s),
            -log(config.remote_bytes_per_s),
            -log(config.peer_bytes_per_s),
        ]
        self._log = list(self._start)
        self._covariance = [[float(row == column) for column in CostPart] for row in CostPart]
        self._seconds = [exp(value) for value in self._log]
        self.observations = 0

    def per_second(self, part: CostPart) -> float:
        """Return a rate: units (tokens, bytes, ...) per second."""
        return 1 / self._seconds[part]

    def seconds(self, part: CostPart) -> float:
        """Return the seconds that a unit (token, byte, ...) takes."""
        return self._seconds[part]

    def knows(self, part: CostPart) -> bool:
        """Whether a rate was learned or measured, and is more than its initial value."""
        return self._covariance[part][part] < 0.5

    def learned(self) -> dict[CostPart, float]:
        """Return the units per second of the rates that `knows` confirms."""
        return {part: self.per_second(part) for part in CostPart if self.knows(part)}

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
            prefill_s=seconds[CostPart.PREFILL] * work.new_tokens
            + seconds[CostPart.ATTENTION] * work.attended
            + seconds[CostPart.DECODE] * work.new_tokens * work.decoding,
        )

    def observe(self, work: Work, ttft_s: float) -> None:
        """Learn from the observed TTFT of a request (ignored unless positive)."""
        if ttft_s <= 0:
            return
        cost = self.cost(work)
        queue_deviation = self._learning.queue_noise * cost.queued_s / cost.ttft_s
        noise = self._learning.noise + queue_deviation**2
        self._learn(self._shares(work, cost), log(ttft_s / cost.ttft_s), noise)
        self.observations += 1

    def observe_rate(self, part: CostPart, per_second: float) -> None:
        """Learn from one direct observation of a rate (ignored unless positive)."""
        if per_second > 0:
            error = -log(per_second) - self._log[part]
            self._learn({part: 1.0}, error, self._learning.noise)

    def measured(self, part: CostPart, per_second: float) -> None:
        """Set a rate that the engine measured (0.0: nothing was measured)."""
        if per_second > 0:
            self._start[part] = -log(per_second)
            self._restart(part, self._start[part], self._learning.measured)

    def take_over(self, other: "CostModel") -> None:
        """Start from the rates of another model, with more variance; rates measured here stay."""
        for part in CostPart:
            if self._covariance[part][part] > self._learning.measured:
                variance = min(1.0, other._covariance[part][part] + self._learning.kinship)
                self._restart(part, other._log[part], variance)

    def _restart(self, part: CostPart, value: float, variance: float) -> None:
        """Set a rate, and make it independent of the others."""
        self._set(part, value)
        for other in CostPart:
            self._covariance[part][other] = self._covariance[other][part] = 0.0
        self._covariance[part][part] = variance

    def _learn(self, shares: dict[CostPart, float], error: float, noise: float) -> None:
        """Correct the rates by the logarithm of observed / predicted; see the module."""
        covariance = self._covariance
        each_share = tuple(shares.items())
        with_shares = []
        # Plain loops: this runs for every streamed answer, and a generator per row was slower.
        for row in covariance:
            total = 0.0
            for part, share in each_share:
                total += row[part] * share
            with_shares.append(total)
        uncertain = sum(with_shares[part] * share for part, share in shares.items())
        surprise = error**2 / (uncertain + noise)
        spread = uncertain + noise * (self._learning.tail + surprise) / (self._learning.tail + 1)
        for part, moved in zip(_PARTS, with_shares, strict=True):
            if moved:
                self._set(part, self._log[part] + moved * error / spread)
                gain = moved / spread
                row = covariance[part]
                covariance[part] = [
                    each - gain * other for each, other in zip(row, with_shares, strict=True)
                ]
        for part, share in shares.items():
            self._drift(part, share)

    def _drift(self, part: CostPart, share: float) -> None:
        """Increase the variance of a rate, up to the initial one."""
        row = self._covariance[part]
        row[part] += self._learning.drift * share
        if row[part] > 1.0:
            shrink = 1 / sqrt(row[part])
            for other in _PARTS:
                row[other] *= shrink
                self._covariance[other][part] = row[other]
            row[part] = 1.0

    def _shares(self, work: Work, cost: Cost) -> dict[CostPart, float]:
        """Return the share of the predicted TTFT of each part; the queue is not a part."""
        seconds, total_s = self._seconds, cost.ttft_s
        amounts = {
            CostPart.BASE: 1.0,
            CostPart.PREFILL: work.new_tokens,
            CostPart.ATTENTION: work.attended,
            CostPart.DECODE: work.new_tokens * work.decoding,
            CostPart.LOAD: work.load_bytes,
        }
        if work.reads_late or cost.fetched_s > cost.queue_s:
            amounts |= {
                CostPart.DISK: work.disk_bytes,
                CostPart.REMOTE: work.remote_bytes,
                CostPart.PEER: work.peer_bytes,
            }
        return {
            part: seconds[part] * amount / total_s for part, amount in amounts.items() if amount
        }

    def _set(self, part: CostPart, value: float) -> None:
        start = self._start[part]
        value = min(start + self._learning.freedom, max(start - self._learning.freedom, value))
        self._log[part] = value
        self._seconds[part] = exp(value)

    def __repr__(self) -> str:
        rates = " ".join(f"{part.name.lower()}={self.per_second(part):.4g}" for part in CostPart)
        return f"<CostModel {rates} after {self.observations}>"


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
    """How busy a replica, or a fleet, was over about the last `CostWeights.recent_s`."""

    def __init__(self, weights: CostWeights = DEFAULT_WEIGHTS) -> None:
        self._recent_s = weights.recent_s
        self._busy_s = 0.0
        self._as_of_s = 0.0

    def note(self, busy_s: float, now_s: float) -> None:
        """Add a request that keeps the replica busy for ``busy_s``."""
        self._busy_s = self._busy_s * self._kept(now_s) + busy_s
        self._as_of_s = now_s

    def share(self, now_s: float) -> float:
        """Return the seconds of work per second."""
        return self._busy_s * self._kept(now_s) / self._recent_s

    def _kept(self, now_s: float) -> float:
        return exp(min(0.0, self._as_of_s - now_s) / self._recent_s)

    def __repr__(self) -> str:
        return f"<RecentWork {self._busy_s:.3f} s as of {self._as_of_s:.3f}>"
