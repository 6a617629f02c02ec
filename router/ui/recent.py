"""The last requests, and sums over the last 15 minutes. Pure: times come with the records.

Bounded: the last `KEPT` requests, of which the page shows the last `SHOWN`, and `SLICES` slices of
time with their sums. The sums of the whole window are kept up to date as requests end, so showing
them costs the same at any load.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from math import exp, log
from typing import Final

from router.fleet.decision import Reason
from router.index.prompt_keys import KvTier
from router.record.records import RequestRecord

_STEP: Final = 0.05
_LEAST_S: Final = 1e-4


class Durations:
    """Times in seconds, counted in steps of 5%: small, summable, good enough for quantiles."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._quantiles: dict[float, float] = {}
        """Computed quantiles, until the counts change, which most slices never do again."""
        self.count = 0

    def note(self, seconds: float) -> None:
        """Count a time."""
        self._add(round(log(max(seconds, _LEAST_S)) / _STEP), 1)

    def add(self, other: "Durations", sign: int = 1) -> None:
        """Add others, or with ``sign=-1`` subtract them."""
        for step, count in other._counts.items():
            self._add(step, sign * count)

    def quantile_s(self, share: float) -> float | None:
        """Return the quantile ``share`` (0 to 1); None without times."""
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
        return isinstance(other, Durations) and self._counts == other._counts

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"<Durations {self.count} p50={self.quantile_s(0.5)}>"


SHOWN: Final = 50
KEPT: Final = 1000
"""Requests that `Recent.find` finds: some MiB."""
KEPT_REFUSED: Final = 100
"""The same of requests that were not admitted: anybody can send many."""
KEPT_SPILLS: Final = 10
SLICE_S: Final = 10.0
SLICES: Final = 90
_RATE_SLICES: Final = 6
_WARM_SHARE: Final = 0.5
"""A request is warm if at least this share of its prompt was matched."""
_LEAST_TOKENS: Final = 64
"""Shorter prompts, such as a greeting, are neither warm nor cold: they have hardly a whole block
that could be matched, and computing them takes no time."""


@dataclass(slots=True)
class Tokens:
    """Prompt tokens: all, and those matched by tier."""

    prompt: int = 0
    matched: dict[KvTier, int] = field(default_factory=dict)

    def add(self, other: "Tokens", sign: int = 1) -> None:
        """Add others, or with ``sign=-1`` subtract them."""
        self.prompt += sign * other.prompt
        for tier, count in other.matched.items():
            left = self.matched.get(tier, 0) + sign * count
            self.matched[tier] = left
            if not left:
                del self.matched[tier]

    @property
    def warmth(self) -> float | None:
        """The share that was matched; None without tokens."""
        return sum(self.matched.values()) / self.prompt if self.prompt else None


@dataclass(slots=True)
class Sums:
    """Sums over some time."""

    requests: int = 0
    turns: int = 0
    """Requests of sessions with a home."""
    spills: int = 0
    """Turns that went to another replica."""
    tokens: dict[str, Tokens] = field(default_factory=dict)
    """By replica."""
    cold: Durations = field(default_factory=Durations)
    warm: Durations = field(default_factory=Durations)
    tpot: Durations = field(default_factory=Durations)

    def note(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self.requests += 1
        if record.home is not None:
            self.turns += 1
            self.spills += _has_spilled(record)
        if record.replica_id is None or not record.prompt_tokens:
            return
        if (tokens := self.tokens.get(record.replica_id)) is None:
            tokens = self.tokens[record.replica_id] = Tokens()
        tokens.prompt += record.prompt_tokens
        sum_matched = 0
        for tier, count in record.matched_tokens.items():
            if count:
                tokens.matched[tier] = tokens.matched.get(tier, 0) + count
                sum_matched += count
        is_long = record.prompt_tokens >= _LEAST_TOKENS
        if is_long and record.streamed and record.ttft_s is not None:
            is_warm = sum_matched >= _WARM_SHARE * record.prompt_tokens
            (self.warm if is_warm else self.cold).note(record.ttft_s)
        if record.tpot_s is not None:
            self.tpot.note(record.tpot_s)

    def add(self, other: "Sums", sign: int = 1) -> None:
        """Add others, or with ``sign=-1`` subtract them."""
        self.requests += sign * other.requests
        self.turns += sign * other.turns
        self.spills += sign * other.spills
        self.cold.add(other.cold, sign)
        self.warm.add(other.warm, sign)
        self.tpot.add(other.tpot, sign)
        for replica_id, tokens in other.tokens.items():
            mine = self.tokens.setdefault(replica_id, Tokens())
            mine.add(tokens, sign)
            if not mine.prompt:
                del self.tokens[replica_id]

    @property
    def all_tokens(self) -> Tokens:
        """The tokens of all replicas."""
        total = Tokens()
        for each in self.tokens.values():
            total.add(each)
        return total


@dataclass(slots=True)
class TimeSlice:
    """The sums of `SLICE_S` seconds."""

    began_s: float
    sums: Sums = field(default_factory=Sums)


class Recent:
    """The last requests, and sums over the last `SLICES` slices of time, the current one too."""

    def __init__(self, now_s: float) -> None:
        self.began_s = now_s
        self.window = Sums()
        self.slices: deque[TimeSlice] = deque([TimeSlice(_beginning(now_s))])
        self.requests: deque[tuple[int, RequestRecord]] = deque(maxlen=SHOWN)
        """With their numbers, the newest last."""
        self.spills: deque[RequestRecord] = deque(maxlen=KEPT_SPILLS)
        self.count = 0
        self._by_id: OrderedDict[str, RequestRecord] = OrderedDict()
        self._refused: OrderedDict[str, RequestRecord] = OrderedDict()

    def __len__(self) -> int:
        """How many requests `find` finds."""
        return len(self._by_id) + len(self._refused)

    def find(self, request_id: str) -> RequestRecord | None:
        """Return the last request with this id; None if it has not ended, or is not kept."""
        return self._by_id.get(request_id) or self._refused.get(request_id)

    def observe(self, record: RequestRecord) -> None:
        """Take in a request that has ended."""
        if not record.is_admitted:
            _keep(self._refused, record, KEPT_REFUSED)
            return
        _keep(self._by_id, record, KEPT)
        self.pass_time(record.ended_s)
        self.count += 1
        self.requests.append((self.count, record))
        if record.home is not None and _has_spilled(record):
            self.spills.append(record)
        self.slices[-1].sums.note(record)
        self.window.note(record)

    def pass_time(self, now_s: float) -> None:
        """Begin the current slice, and drop slices that are too old."""
        began_s = _beginning(now_s)
        if began_s <= self.slices[-1].began_s:
            return
        self.slices.append(TimeSlice(began_s))
        while self.slices[0].began_s <= began_s - SLICES * SLICE_S:
            self.window.add(self.slices.popleft().sums, -1)

    def requests_per_s(self, now_s: float) -> float:
        """Return how many requests per second ended in about the last minute."""
        self.pass_time(now_s)
        oldest_s = _beginning(now_s) - _RATE_SLICES * SLICE_S
        recent = [each for each in self.slices if each.began_s >= oldest_s]
        seconds = max(1.0, now_s - max(oldest_s, self.began_s))
        return sum(each.sums.requests for each in recent) / seconds

    def check(self) -> None:
        """Raise AssertionError if the window is not the sum of its slices."""
        total = Sums()
        for each in self.slices:
            total.add(each.sums)
        assert total == self.window
        began = [each.began_s for each in self.slices]
        assert began == sorted(set(began)) and began[-1] - began[0] < SLICES * SLICE_S


def _keep(records: OrderedDict[str, RequestRecord], record: RequestRecord, most: int) -> None:
    """Add a record, which replaces one with the same id, and drop the oldest one of too many."""
    records[record.request_id] = record
    records.move_to_end(record.request_id)
    if len(records) > most:
        records.popitem(last=False)


def _beginning(now_s: float) -> float:
    return now_s // SLICE_S * SLICE_S


def _has_spilled(record: RequestRecord) -> bool:
    return record.reason == Reason.SESSION_SPILL
