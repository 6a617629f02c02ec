"""The cost of tokens that need not have been computed: sums by key and cause (`Waste`).

Bounded: two periods, each with at most `_MOST_KEYS` keys and `_MOST_CAUSES` causes. Further
ones are counted with others. Pure: times come with the records.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from router.record.records import RequestRecord
from router.record.uncached import AVOIDABLE, PromptPart, Uncached, UncachedCause

PERIOD_S: Final = 1800.0
"""The report covers the current period and the one before."""
_MOST_KEYS: Final = 256
_MOST_CAUSES: Final = 512
"""Causes, each with the field, tier or other detail that belongs to it."""
_OTHER_KEYS: Final = "(other keys)"
_SHOWN_KEYS: Final = 20
"""Keys in a report, the most wasteful first."""
_SHOWN_CAUSES: Final = 20


@dataclass(slots=True)
class Cost:
    """What some tokens cost."""

    tokens: int = 0
    seconds: float = 0.0
    """Of prefill, as predicted."""
    requests: int = 0

    def add(self, tokens: int, seconds: float, requests: int = 1) -> None:
        """Add tokens of some requests."""
        self.tokens += tokens
        self.seconds += seconds
        self.requests += requests

    def as_json(self, computed_tokens: int, window_s: float) -> dict[str, Any]:
        """Return it with its share of all computed tokens, and the replicas that it keeps busy."""
        return {
            "tokens": self.tokens,
            "share": self.tokens / computed_tokens if computed_tokens else 0.0,
            "seconds": self.seconds,
            "replicas": self.seconds / window_s,
            "requests": self.requests,
        }


@dataclass(slots=True)
class _KeySums:
    """The sums of one client's key."""

    requests: int = 0
    prompt_tokens: int = 0
    unreported_tokens: int = 0
    """Computed by what the router expected: the replica did not report what was cached."""
    causes: dict[UncachedCause, Cost] = field(default_factory=dict)

    @property
    def computed_tokens(self) -> int:
        return sum(each.tokens for each in self.causes.values())

    @property
    def avoidable_tokens(self) -> int:
        return sum(self.causes[each].tokens for each in AVOIDABLE if each in self.causes)

    def note(self, uncached: Uncached) -> None:
        self.requests += 1
        self.prompt_tokens += uncached.prompt_tokens
        if not uncached.is_reported:
            self.unreported_tokens += uncached.computed_tokens
        for cause, tokens in uncached.tokens().items():
            cost = self.causes.setdefault(cause, Cost())
            cost.add(tokens, tokens * uncached.s_per_token)

    def add(self, other: "_KeySums") -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.unreported_tokens += other.unreported_tokens
        for cause, cost in other.causes.items():
            mine = self.causes.setdefault(cause, Cost())
            mine.add(cost.tokens, cost.seconds, cost.requests)


_Name = tuple[UncachedCause, str]


@dataclass(slots=True)
class _Detailed:
    """One avoidable cause with its detail, by key."""

    words: str
    """With ``{who}`` for the keys."""
    keys: dict[str, Cost] = field(default_factory=dict)


@dataclass(slots=True)
class _Period:
    """The sums of one period."""

    began_s: float
    keys: dict[str, _KeySums] = field(default_factory=dict)
    causes: dict[_Name, _Detailed] = field(default_factory=dict)
    entries: int = 0
    """Entries of all `_Detailed.keys`."""

    def note(self, key: str, uncached: Uncached) -> None:
        if key not in self.keys and len(self.keys) >= _MOST_KEYS:
            key = _OTHER_KEYS
        self.keys.setdefault(key, _KeySums()).note(uncached)
        for part, tokens in uncached.computed():
            if part.cause in AVOIDABLE and part.detail is not None:
                self._note_cause(key, part, tokens, tokens * uncached.s_per_token)

    def _note_cause(self, key: str, part: PromptPart, tokens: int, seconds: float) -> None:
        assert part.detail is not None
        group, words = part.detail.group()
        found = self.causes.get((part.cause, group))
        if found is None or key not in found.keys:
            if self.entries >= _MOST_CAUSES:  # then only the sums by cause count them
                return
            self.entries += 1
            found = self.causes.setdefault((part.cause, group), _Detailed(words))
        found.keys.setdefault(key, Cost()).add(tokens, seconds)


class Waste:
    """Counts records by key and cause, for a report of the last 30 to 60 minutes."""

    def __init__(self, now_s: float) -> None:
        self._periods = [_Period(now_s)]

    def __len__(self) -> int:
        """Return how many keys and causes there are in both periods."""
        return sum(len(each.keys) + each.entries for each in self._periods)

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        if record.uncached is not None:
            self._pass_time(record.ended_s)
            self._periods[-1].note(record.key or "", record.uncached)

    def _pass_time(self, now_s: float) -> None:
        current = self._periods[-1]
        if now_s - current.began_s < PERIOD_S:
            return
        is_next = now_s - current.began_s < 2 * PERIOD_S
        began_s = current.began_s + (now_s - current.began_s) // PERIOD_S * PERIOD_S
        self._periods = [*([current] if is_next else []), _Period(began_s)]

    def report(self, now_s: float) -> dict[str, Any]:
        """Return the sums as JSON values, the most wasteful first.

        Shares are those of all computed tokens. Seconds are predicted seconds of prefill, and
        ``replicas`` how many replicas are busy with that all the time. Keys are named as in the
        configuration; ``""`` stands for clients without one.
        """
        self._pass_time(now_s)
        window_s = max(1.0, now_s - self._periods[0].began_s)
        keys: dict[str, _KeySums] = {}
        for period in self._periods:
            for key, sums in period.keys.items():
                keys.setdefault(key, _KeySums()).add(sums)
        total = _KeySums()
        for sums in keys.values():
            total.add(sums)
        computed = total.computed_tokens
        avoidable = Cost()
        for cause in AVOIDABLE:
            cost = total.causes.get(cause, Cost())
            avoidable.add(cost.tokens, cost.seconds, cost.requests)
        worst = sorted(keys.items(), key=lambda each: each[1].avoidable_tokens, reverse=True)
        causes = sorted(self._merged().items(), key=lambda each: -_sum(each[1].keys).tokens)
        return {
            "window_s": window_s,
            "requests": total.requests,
            "prompt_tokens": total.prompt_tokens,
            "computed_tokens": computed,
            "unreported_tokens": total.unreported_tokens,
            "avoidable": avoidable.as_json(computed, window_s),
            "causes": _costs(total.causes, computed, window_s),
            "worst": [
                {
                    "cause": str(cause),
                    "words": each.words.format(who=_who(each.keys)),
                    "keys": list(each.keys),
                    **_sum(each.keys).as_json(computed, window_s),
                }
                for (cause, _), each in causes[:_SHOWN_CAUSES]
            ],
            "keys": [
                {
                    "key": key,
                    "requests": sums.requests,
                    "prompt_tokens": sums.prompt_tokens,
                    "computed_tokens": sums.computed_tokens,
                    "avoidable_tokens": sums.avoidable_tokens,
                    "causes": _costs(sums.causes, sums.computed_tokens, window_s),
                }
                for key, sums in worst[:_SHOWN_KEYS]
            ],
            "left_out": {
                "keys": max(0, len(worst) - _SHOWN_KEYS),
                "causes": max(0, len(causes) - _SHOWN_CAUSES),
            },
        }

    def _merged(self) -> dict[_Name, _Detailed]:
        merged: dict[_Name, _Detailed] = {}
        for period in self._periods:
            for name, each in period.causes.items():
                mine = merged.setdefault(name, _Detailed(each.words))
                for key, cost in each.keys.items():
                    known = mine.keys.setdefault(key, Cost())
                    known.add(cost.tokens, cost.seconds, cost.requests)
        return merged

    def check(self) -> None:
        """Raise AssertionError if a bound is not kept."""
        assert len(self._periods) <= 2
        for each in self._periods:
            assert len(each.keys) <= _MOST_KEYS + 1
            assert each.entries == sum(len(cause.keys) for cause in each.causes.values())
            assert each.entries <= _MOST_CAUSES


def _costs(
    causes: Mapping[UncachedCause, Cost], computed: int, window_s: float
) -> dict[str, dict[str, Any]]:
    return {
        str(cause): causes[cause].as_json(computed, window_s)
        for cause in sorted(causes, key=lambda each: -causes[each].tokens)
    }


def _sum(costs: Mapping[str, Cost]) -> Cost:
    total = Cost()
    for each in sorted(costs.values(), key=attrgetter("tokens")):
        total.add(each.tokens, each.seconds, each.requests)
    return total


def _who(keys: Iterable[str]) -> str:
    names = list(keys)
    if len(names) > 1:
        return f"{len(names)} keys send"
    return f"the key '{names[0]}' sends" if names[0] else "clients send"
