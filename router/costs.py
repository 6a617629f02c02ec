"""What a request costs at a replica, in seconds, and how the rates are learned.

``ttft = base + max(queue, fetch) + load + prefill``. Every rate is kept as the
logarithm of the seconds that a unit takes (so none can turn negative) with a
variance that says how sure it is. An observed TTFT corrects each rate by the
share that its part had in the prediction: a small Kalman filter with the error
clipped, so that an outlier moves little.

Pure: no clock, no I/O.
"""

from dataclasses import dataclass
from enum import IntEnum
from math import exp, log
from typing import Final

from router.config import RatesConfig

_BASE_S: Final = 0.01
"""Start of what every request takes whatever it holds; learned like the rest."""
_ATTENTION_TOKENS: Final = 32_768.0
"""Start of the context length at which attending to it doubles a token's cost
(that of an 8B model of 4096 wide); learned like the rest."""

_NOISE: Final = 0.1
"""Variance of one observation's logarithm: TTFTs scatter by about 30%."""
_DRIFT: Final = 0.002
"""Variance that a rate gains with each observation that concerns it: replicas change."""
_MEASURED: Final = 0.02
"""Variance of a rate that the engine itself measured."""
_CLIP: Final = 1.0
"""The largest error believed at once: a factor of e."""
_FREEDOM: Final = log(1e4)
"""How far a rate may be learned away from its start."""


class Part(IntEnum):
    """What has a rate of its own."""

    BASE = 0
    PREFILL = 1
    ATTENTION = 2
    LOAD = 3
    DISK = 4
    REMOTE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a request asks of one replica."""

    new_tokens: int
    """To prefill."""
    matched_tokens: int = 0
    """Their context: already cached in some tier."""
    load_bytes: float = 0.0
    """Matched beyond the GPU."""
    disk_bytes: float = 0.0
    remote_bytes: float = 0.0
    queue_s: float = 0.0
    """Until the replica gets to it."""
    stretch: float = 1.0
    """How much longer a prefill takes beside the running decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The predicted parts of a time to first token."""

    base_s: float
    queue_s: float
    fetch_s: float
    load_s: float
    prefill_s: float

    @property
    def busy_s(self) -> float:
        """The replica's time that the request takes from those behind it."""
        return self.load_s + self.prefill_s

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token; the fetch overlaps the queue."""
        return self.base_s + max(self.queue_s, self.fetch_s) + self.busy_s


class Rates:
    """One replica's learned rates; starts from the configured ones."""

    def __init__(self, config: RatesConfig) -> None:
        self.decode_slowdown = config.decode_slowdown
        per_token_s = 1 / config.prefill_tokens_per_s
        self._start = (
            log(_BASE_S),
            log(per_token_s),
            log(per_token_s / _ATTENTION_TOKENS),
            -log(config.cpu_load_bytes_per_s),
            -log(config.disk_bytes_per_s),
            -log(config.remote_bytes_per_s),
        )
        self._log = list(self._start)
        self._variance = [1.0] * len(Part)
        self._seconds = [exp(value) for value in self._log]
        self.observations = 0

    def per_second(self, part: Part) -> float:
        """Return a rate: units (tokens, bytes, ...) per second."""
        return 1 / self._seconds[part]

    def knows(self, part: Part) -> bool:
        """Whether a rate was learned or measured, and is more than its start."""
        return self._variance[part] < 0.5

    def stretch(self, decoding: int) -> float:
        """Return how much running decodes stretch a prefill beside them."""
        return 1 + self.decode_slowdown * decoding

    def cost(self, work: Work) -> Cost:
        """Return the predicted cost of a request."""
        seconds = self._seconds
        attended = work.new_tokens * (work.matched_tokens + work.new_tokens / 2)
        return Cost(
            base_s=seconds[Part.BASE],
            queue_s=work.queue_s,
            fetch_s=seconds[Part.DISK] * work.disk_bytes + seconds[Part.REMOTE] * work.remote_bytes,
            load_s=seconds[Part.LOAD] * work.load_bytes,
            prefill_s=work.stretch
            * (seconds[Part.PREFILL] * work.new_tokens + seconds[Part.ATTENTION] * attended),
        )

    def observe(self, work: Work, ttft_s: float) -> None:
        """Learn from a request's real time to first token (ignored unless positive)."""
        if ttft_s <= 0:
            return
        cost = self.cost(work)
        error = min(_CLIP, max(-_CLIP, log(ttft_s / cost.ttft_s)))
        shares = self._shares(work, cost)
        spread = sum(self._variance[part] * share**2 for part, share in shares.items()) + _NOISE
        for part, share in shares.items():
            gain = self._variance[part] * share / spread
            kept = self._variance[part] * (1 - gain * share) + _DRIFT * share
            self._set(part, self._log[part] + gain * error, min(1.0, kept))
        self.observations += 1

    def measured(self, part: Part, per_second: float) -> None:
        """Take over a rate that the engine measured (0.0: nothing was measured)."""
        if per_second > 0:
            self._set(part, -log(per_second), _MEASURED)

    def _shares(self, work: Work, cost: Cost) -> dict[Part, float]:
        """Return each part's share of the predicted TTFT; the queue's is nobody's."""
        seconds, total_s = self._seconds, cost.ttft_s
        attended = work.new_tokens * (work.matched_tokens + work.new_tokens / 2)
        amounts = {
            Part.BASE: 1.0,
            Part.PREFILL: work.stretch * work.new_tokens,
            Part.ATTENTION: work.stretch * attended,
            Part.LOAD: work.load_bytes,
        }
        if cost.fetch_s > cost.queue_s:
            amounts |= {Part.DISK: work.disk_bytes, Part.REMOTE: work.remote_bytes}
        return {part: seconds[part] * amount / total_s for part, amount in amounts.items()}

    def _set(self, part: Part, value: float, variance: float) -> None:
        start = self._start[part]
        value = min(start + _FREEDOM, max(start - _FREEDOM, value))
        self._log[part], self._variance[part] = value, variance
        self._seconds[part] = exp(value)

    def __repr__(self) -> str:
        rates = " ".join(f"{part.name.lower()}={self.per_second(part):.4g}" for part in Part)
        return f"<Rates {rates} after {self.observations}>"


class PrefillLine:
    """When a replica will be done with the prefills it was given.

    Prefills are taken one after another: an estimate, corrected as they end.
    """

    __slots__ = ("_free_at_s", "_shift_s", "_waiting")

    def __init__(self) -> None:
        self._free_at_s = 0.0
        self._shift_s = 0.0
        self._waiting = 0

    def queue_s(self, now_s: float) -> float:
        """Return how long a request that comes now would wait."""
        return max(0.0, self._free_at_s - now_s)

    def join(self, work_s: float, now_s: float) -> float:
        """Add a prefill; return the token with which it must `leave`."""
        self._waiting += 1
        self._free_at_s = max(self._free_at_s, now_s) + work_s
        return self._free_at_s + self._shift_s

    def leave(self, token: float, now_s: float) -> None:
        """Note that a prefill has ended, or is given up; sooner means sooner for those behind."""
        self._waiting -= 1
        if self._waiting == 0:
            self._free_at_s = now_s
            return
        early_s = token - self._shift_s - now_s
        if early_s > 0:
            # Tokens given out before now speak of the old schedule: the shift
            # keeps the same early seconds from being taken off twice.
            moved_s = min(early_s, self.queue_s(now_s))
            self._free_at_s -= moved_s
            self._shift_s += moved_s
