"""What lately was, of the requests that have ended. Pure: times come with the records.

Bounded however many requests there are: the last `KEPT` of them, and `SLICES` slices of time, each
with its sums. What is asked for over the whole window is summed up as requests end, so that to
show it costs the same at any load.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from router.fleet import Reason
from router.index import Tier
from router.record import RequestRecord
from router.ui.ttfts import Ttfts

KEPT: Final = 50
KEPT_SPILLS: Final = 10
SLICE_S: Final = 10.0
SLICES: Final = 90
_RATE_SLICES: Final = 6
_WARM_SHARE: Final = 0.5
"""A request is warm if so much of its prompt was matched."""


@dataclass(slots=True)
class Tokens:
    """Prompt tokens: all, and those matched by tier."""

    prompt: int = 0
    matched: dict[Tier, int] = field(default_factory=dict)

    def add(self, other: "Tokens", sign: int = 1) -> None:
        """Add others, or take them away again."""
        self.prompt += sign * other.prompt
        for tier, count in other.matched.items():
            left = self.matched.get(tier, 0) + sign * count
            self.matched[tier] = left
            if not left:
                del self.matched[tier]

    @property
    def warmth(self) -> float | None:
        """The share that was matched; None of no tokens."""
        return sum(self.matched.values()) / self.prompt if self.prompt else None


@dataclass(slots=True)
class Sums:
    """Sums over some time."""

    requests: int = 0
    turns: int = 0
    """Requests of sessions that had a home."""
    spills: int = 0
    """Those of them that went elsewhere."""
    tokens: dict[str, Tokens] = field(default_factory=dict)
    """By replica."""
    cold: Ttfts = field(default_factory=Ttfts)
    warm: Ttfts = field(default_factory=Ttfts)

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
        if record.streamed and record.ttft_s is not None:
            is_warm = sum_matched >= _WARM_SHARE * record.prompt_tokens
            (self.warm if is_warm else self.cold).note(record.ttft_s)

    def add(self, other: "Sums", sign: int = 1) -> None:
        """Add others, or take them away again."""
        self.requests += sign * other.requests
        self.turns += sign * other.turns
        self.spills += sign * other.spills
        self.cold.add(other.cold, sign)
        self.warm.add(other.warm, sign)
        for replica_id, tokens in other.tokens.items():
            mine = self.tokens.setdefault(replica_id, Tokens())
            mine.add(tokens, sign)
            if not mine.prompt:
                del self.tokens[replica_id]

    @property
    def all_tokens(self) -> Tokens:
        """Those of all replicas."""
        total = Tokens()
        for each in self.tokens.values():
            total.add(each)
        return total


@dataclass(slots=True)
class Slice:
    """The sums of `SLICE_S` seconds."""

    began_s: float
    sums: Sums = field(default_factory=Sums)


class Recent:
    """The last requests, and sums over the last `SLICES` slices of time, the current one too."""

    def __init__(self, now_s: float) -> None:
        self.began_s = now_s
        self.window = Sums()
        self.slices: deque[Slice] = deque([Slice(_beginning(now_s))])
        self.requests: deque[tuple[int, RequestRecord]] = deque(maxlen=KEPT)
        """With their numbers, the last one last."""
        self.spills: deque[RequestRecord] = deque(maxlen=KEPT_SPILLS)
        self.count = 0

    def observe(self, record: RequestRecord) -> None:
        """Take in a request that has ended."""
        self.pass_time(record.ended_s)
        self.count += 1
        self.requests.append((self.count, record))
        if record.home is not None and _has_spilled(record):
            self.spills.append(record)
        self.slices[-1].sums.note(record)
        self.window.note(record)

    def pass_time(self, now_s: float) -> None:
        """Begin the slice of now, and drop those that are too old."""
        began_s = _beginning(now_s)
        if began_s <= self.slices[-1].began_s:
            return
        self.slices.append(Slice(began_s))
        while self.slices[0].began_s <= began_s - SLICES * SLICE_S:
            self.window.add(self.slices.popleft().sums, -1)

    def requests_per_s(self, now_s: float) -> float:
        """Return how many requests have ended per second in the last minute or so."""
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


def _beginning(now_s: float) -> float:
    return now_s // SLICE_S * SLICE_S


def _has_spilled(record: RequestRecord) -> bool:
    return record.reason == Reason.SESSION_SPILL
