"""Which replica gets a request: pure functions from candidates to a pick.

Equal candidates are told apart by rendezvous hashing of the prompt's beginning,
so that equal prompts meet where nothing else decides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import xxhash

from router.config import PolicyName
from router.costs import Work

_BUSY_WEIGHT: Final = 0.1
"""How much a second of the replica's own time counts beside a second of waiting.
Small, but it makes a burst of one prompt wait for the replica that computes it
rather than have every replica compute the same."""

_NEAR: Final = 0.1
"""Costs within this fraction of the best are equal: learned rates differ by noise."""


class Reason(StrEnum):
    """Why a replica was picked."""

    LONGEST_MATCH = "longest-match"
    SESSION_HOME = "session-home"
    SESSION_SPILL = "session-spill"
    LEAST_LOADED = "least-loaded"
    NO_INFORMATION = "no-information"
    ONLY_REPLICA = "only-replica"
    BOUND = "bound"
    ROUND_ROBIN = "round-robin"
    RETRY = "retry"


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCost:
    """What a replica would take to answer: ``ttft = base + max(queue, fetch) + load + prefill``."""

    replica_id: str
    matched_tokens: Mapping[str, int]
    """By `Tier`; plain strings, since this is shown as JSON."""
    in_flight: int
    ttft_s: float
    base_s: float
    queue_s: float
    fetch_s: float
    load_s: float
    prefill_s: float

    @property
    def matched(self) -> int:
        """Matched tokens in all tiers."""
        return sum(self.matched_tokens.values())

    @property
    def score_s(self) -> float:
        """What the pick minimizes."""
        return self.ttft_s + _BUSY_WEIGHT * (self.load_s + self.prefill_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a policy knows beside the candidates."""

    affinity: bytes
    """The prompt's beginning, or what else equal requests have in common."""
    home: str | None = None
    """Id of the session's home."""
    spill_margin_s: float = 0.0
    turn: int = 0
    """How many requests were sent before."""


Pick = tuple[CandidateCost, Reason]
Policy = Callable[[Sequence[CandidateCost], Question], Pick]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the fleet must remember of a decision to start it, and to learn from its end."""

    slot: int
    work: Work
    claim_keys: Sequence[int] = ()
    session: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes and why. Making it changes nothing; `Fleet.start` acts on it."""

    replica_id: str
    url: str
    reason: Reason
    prompt_tokens: int
    matched_tokens: Mapping[str, int]
    predicted_ttft_s: float
    prefetch_keys: tuple[bytes, ...] = field(default=(), repr=False)
    """Whole digests of the matched chunks that lie only on disk or remote, in order."""
    expected_gain_s: float = 0.0
    """What the prefetch saves over computing those chunks anew: waiting longer is a loss."""
    candidates: tuple[CandidateCost, ...] = ()
    plan: Plan = field(repr=False, compare=False)


def pick(policy: PolicyName, candidates: Sequence[CandidateCost], question: Question) -> Pick:
    """Return the candidate that a policy picks, and why; there must be one at least."""
    if len(candidates) == 1:
        return candidates[0], Reason.ONLY_REPLICA
    return POLICIES[policy](candidates, question)


def cheapest(candidates: Sequence[CandidateCost], question: Question) -> Pick:
    """Pick the soonest first token; keep a session at home while that costs little."""
    best = min(candidates, key=lambda each: each.score_s)
    spill = False
    if home := _home(candidates, question):
        soonest_s = min(each.ttft_s for each in candidates)
        if home.ttft_s <= soonest_s + question.spill_margin_s:
            return home, Reason.SESSION_HOME
        spill = True
    near = [each for each in candidates if each.score_s <= best.score_s * (1 + _NEAR)]
    picked = _preferred(near, question)
    return picked, Reason.SESSION_SPILL if spill else _why(picked, candidates)


def longest_prefix(candidates: Sequence[CandidateCost], question: Question) -> Pick:
    """Pick the longest match, whatever the load."""
    picked = _preferred(candidates, question)
    return picked, _why(picked, candidates)


def session_first(candidates: Sequence[CandidateCost], question: Question) -> Pick:
    """Keep a session at home always; place a new one by rendezvous hashing."""
    if home := _home(candidates, question):
        return home, Reason.SESSION_HOME
    return _rendezvous(candidates, question), Reason.NO_INFORMATION


def least_loaded(candidates: Sequence[CandidateCost], question: Question) -> Pick:
    """Pick the fewest requests under way; equals take turns."""
    fewest = min(each.in_flight for each in candidates)
    equals = [each for each in candidates if each.in_flight == fewest]
    return equals[question.turn % len(equals)], Reason.LEAST_LOADED


def round_robin(candidates: Sequence[CandidateCost], question: Question) -> Pick:
    """Pick one after another."""
    return candidates[question.turn % len(candidates)], Reason.ROUND_ROBIN


POLICIES: Final[Mapping[PolicyName, Policy]] = MappingProxyType(
    {
        "ttft": cheapest,
        "longest-prefix": longest_prefix,
        "session": session_first,
        "least-loaded": least_loaded,
        "round-robin": round_robin,
    }
)


def _home(candidates: Sequence[CandidateCost], question: Question) -> CandidateCost | None:
    return next((each for each in candidates if each.replica_id == question.home), None)


def _preferred(candidates: Sequence[CandidateCost], question: Question) -> CandidateCost:
    """Return the longest match, of those the least loaded, of those the rendezvous."""
    longest = max(each.matched for each in candidates)
    matching = [each for each in candidates if each.matched == longest]
    fewest = min(each.in_flight for each in matching)
    return _rendezvous([each for each in matching if each.in_flight == fewest], question)


def _rendezvous(candidates: Sequence[CandidateCost], question: Question) -> CandidateCost:
    if len(candidates) == 1:
        return candidates[0]
    return max(
        candidates,
        key=lambda each: xxhash.xxh3_64_intdigest(
            question.affinity + b"\0" + each.replica_id.encode()
        ),
    )


def _why(picked: CandidateCost, candidates: Sequence[CandidateCost]) -> Reason:
    longest = max(each.matched for each in candidates)
    if longest and picked.matched == longest:
        return Reason.LONGEST_MATCH
    if not longest and len({each.in_flight for each in candidates}) == 1:
        return Reason.NO_INFORMATION
    return Reason.LEAST_LOADED
