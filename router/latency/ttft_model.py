"""What a request costs at a replica, in seconds, and how the rates are learned.

Every part of a time to first token is an amount of `Work` times the seconds
that a unit of it takes there::

    ttft    = base + max(queue, backlog + fetch) + load + prefill
    fetch   = disk bytes x DISK + remote bytes x REMOTE + peer bytes x PEER
    load    = bytes beyond the GPU x LOAD
    prefill = new tokens x (PREFILL + context x ATTENTION + running decodes x DECODE)

with the mean context of the new tokens, ``matched + new / 2``. The seconds are
kept as a vector x of logarithms (so none can turn negative), with a covariance
matrix P that says how sure each is, and which of them could stand for each other.
With s the parts' shares of the predicted TTFT, and w the queue's, an observed one
corrects all parts at once, as an (extended) Kalman filter does::

    e  = log(observed / predicted)
    U  = s' P s                          how unsure the prediction was
    N  = noise + (queue_noise w)^2       how unsure the observation is
    N' = N (4 + e^2 / (U + N)) / 5       the noise, the greater the odder e is
    x += P s e / (U + N')
    P -= P s s' P / (U + N')

N' makes it robust: an outlier counts as noise (Student's t with 4 degrees of
freedom). The covariance is what tells a token's cost from its context's and its
neighbours': with variances alone that took hundreds of requests, and long prompts
were misjudged for as long.

The queue's share teaches nothing. A request that waits behind one slow prefill would teach
the same error once more, and so would every other that waits: tried in a model of
a replica, that drove the rates away without bound at 70% load. Nor is its error taken for
one of the other parts': the more of its time a request is queued, the more of what it shows
is noise. With queues longer than predicted, loading was learned as many times too slow.

Pure: no clock, no I/O.
"""

from math import exp, log, sqrt
from typing import Final

from router.config import DEFAULT, Learning, RatesConfig
from router.latency.work import Cost, Part, Work

_PARTS: Final = tuple(Part)


class Rates:
    """One replica's learned rates; starts from the configured ones."""

    def __init__(self, config: RatesConfig, learning: Learning = DEFAULT.learning) -> None:
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
        self._covariance = [[float(row == column) for column in Part] for row in Part]
        self._seconds = [exp(value) for value in self._log]
        self.observations = 0

    def per_second(self, part: Part) -> float:
        """Return a rate: units (tokens, bytes, ...) per second."""
        return 1 / self._seconds[part]

    def seconds(self, part: Part) -> float:
        """Return what a unit (token, byte, ...) takes."""
        return self._seconds[part]

    def knows(self, part: Part) -> bool:
        """Whether a rate was learned or measured, and is more than its start."""
        return self._covariance[part][part] < 0.5

    def learned(self) -> dict[Part, float]:
        """Return units per second of the rates that are more than their start."""
        return {part: self.per_second(part) for part in Part if self.knows(part)}

    def cost(self, work: Work) -> Cost:
        """Return the predicted cost of a request."""
        seconds = self._seconds
        fetch_s = (
            seconds[Part.DISK] * work.disk_bytes
            + seconds[Part.REMOTE] * work.remote_bytes
            + seconds[Part.PEER] * work.peer_bytes
        )
        load_s = seconds[Part.LOAD] * work.load_bytes
        if work.reads_late:
            fetch_s, load_s = 0.0, load_s + fetch_s
        return Cost(
            base_s=seconds[Part.BASE],
            queue_s=work.queue_s,
            backlog_s=work.backlog_s if fetch_s else 0.0,
            fetch_s=fetch_s,
            load_s=load_s,
            prefill_s=seconds[Part.PREFILL] * work.new_tokens
            + seconds[Part.ATTENTION] * work.attended
            + seconds[Part.DECODE] * work.new_tokens * work.decoding,
        )

    def observe(self, work: Work, ttft_s: float) -> None:
        """Learn from a request's real time to first token (ignored unless positive)."""
        if ttft_s <= 0:
            return
        cost = self.cost(work)
        queue_deviation = self._learning.queue_noise * cost.queued_s / cost.ttft_s
        noise = self._learning.noise + queue_deviation**2
        self._learn(self._shares(work, cost), log(ttft_s / cost.ttft_s), noise)
        self.observations += 1

    def observe_rate(self, part: Part, per_second: float) -> None:
        """Learn from one observation of a rate by itself (ignored unless positive)."""
        if per_second > 0:
            error = -log(per_second) - self._log[part]
            self._learn({part: 1.0}, error, self._learning.noise)

    def measured(self, part: Part, per_second: float) -> None:
        """Take over a rate that the engine measured (0.0: nothing was measured)."""
        if per_second > 0:
            self._start[part] = -log(per_second)
            self._restart(part, self._start[part], self._learning.measured)

    def take_over(self, other: "Rates") -> None:
        """Start from what another has learned, less surely; what was measured here stays."""
        for part in Part:
            if self._covariance[part][part] > self._learning.measured:
                variance = min(1.0, other._covariance[part][part] + self._learning.kinship)
                self._restart(part, other._log[part], variance)

    def _restart(self, part: Part, value: float, variance: float) -> None:
        """Set a part to what no other part could stand for."""
        self._set(part, value)
        for other in Part:
            self._covariance[part][other] = self._covariance[other][part] = 0.0
        self._covariance[part][part] = variance

    def _learn(self, shares: dict[Part, float], error: float, noise: float) -> None:
        """Correct the parts by the logarithm of observed over predicted; see the module."""
        covariance = self._covariance
        each_share = tuple(shares.items())
        with_shares = []
        # Plain loops: every streamed answer teaches, and a generator for each row took longer.
        for row in covariance:
            total = 0.0
            for part, share in each_share:
                total += row[part] * share
            with_shares.append(total)
        unsure = sum(with_shares[part] * share for part, share in shares.items())
        surprise = error**2 / (unsure + noise)
        spread = unsure + noise * (self._learning.tail + surprise) / (self._learning.tail + 1)
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

    def _drift(self, part: Part, share: float) -> None:
        """Make a part less sure, but never less than at the start."""
        row = self._covariance[part]
        row[part] += self._learning.drift * share
        if row[part] > 1.0:
            shrink = 1 / sqrt(row[part])
            for other in _PARTS:
                row[other] *= shrink
                self._covariance[other][part] = row[other]
            row[part] = 1.0

    def _shares(self, work: Work, cost: Cost) -> dict[Part, float]:
        """Return each part's share of the predicted TTFT; a part without one is left out.

        The queue's share belongs to no part.
        """
        seconds, total_s = self._seconds, cost.ttft_s
        amounts = {
            Part.BASE: 1.0,
            Part.PREFILL: work.new_tokens,
            Part.ATTENTION: work.attended,
            Part.DECODE: work.new_tokens * work.decoding,
            Part.LOAD: work.load_bytes,
        }
        if work.reads_late or cost.fetched_s > cost.queue_s:
            amounts |= {
                Part.DISK: work.disk_bytes,
                Part.REMOTE: work.remote_bytes,
                Part.PEER: work.peer_bytes,
            }
        return {
            part: seconds[part] * amount / total_s for part, amount in amounts.items() if amount
        }

    def _set(self, part: Part, value: float) -> None:
        start = self._start[part]
        value = min(start + self._learning.freedom, max(start - self._learning.freedom, value))
        self._log[part] = value
        self._seconds[part] = exp(value)

    def __repr__(self) -> str:
        rates = " ".join(f"{part.name.lower()}={self.per_second(part):.4g}" for part in Part)
        return f"<Rates {rates} after {self.observations}>"
