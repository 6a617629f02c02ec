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

from router.config import DEFAULT, Judgment, PolicyName
from router.latency import Work

_MIX: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1


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


@dataclass(slots=True, kw_only=True)  # not frozen: many are made for each decision
class CandidateCost:
    """What a replica would take to answer: ``ttft = base + max(queue, fetch) + load + prefill``."""

    replica_id: str
    matched_tokens: Mapping[str, int]
    """By `Tier`; plain strings, since this is shown as JSON."""
    copied_tokens: int = 0
    """To be copied from another replica first; not in ``matched_tokens``."""
    copied_from: str | None = None
    in_flight: int
    ttft_s: float
    base_s: float
    queue_s: float
    fetch_s: float
    load_s: float
    prefill_s: float
    waiting: int = 0
    """Requests there, or promised to it, that have no first token yet."""
    busy_share: float = 0.0
    """Share of its time that recent requests took, half of it the replica's own and half the
    fleet's: an idle replica's time is worth something where others are busy. Above 1 it falls
    behind."""

    @property
    def matched(self) -> int:
        """Matched tokens in all tiers."""
        return sum(self.matched_tokens.values())

    @property
    def busy_s(self) -> float:
        """The replica's time that the request takes from those behind it."""
        return self.load_s + self.prefill_s

    def score_s(self, judgment: Judgment) -> float:
        """Return what the pick minimizes."""
        return with_taken_s(
            self.ttft_s,
            busy_s=self.busy_s,
            fetch_s=self.fetch_s,
            waiting=self.waiting,
            busy_share=self.busy_share,
            judgment=judgment,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a policy knows beside the candidates."""

    affinity: int
    """64-bit hash of what requests that should meet have in common."""
    home: str | None = None
    """Id of the session's home."""
    spill_margin_s: float = 0.0
    turn: int = 0
    """How many requests were sent before."""
    judgment: Judgment = DEFAULT


Pick = tuple[CandidateCost, Reason]
Policy = Callable[[Sequence[CandidateCost], Question], Pick]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the fleet must remember of a decision to start it, and to learn from its end."""

    slot: int
    work: Work
    claim_keys: Sequence[int] = ()
    chain: Sequence[bytes] = field(default=(), repr=False)
    """Whole digests of the prompt's blocks; empty where they are not known."""
    session: str | None = None
    streamed: bool = True
    """Whether the answer's first token will be seen, since it is streamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCopy:
    """KV that the picked replica should get from another before it is asked."""

    source_id: str
    keys: tuple[bytes, ...] = field(repr=False)
    """Whole digests of the chunks that the source holds, in any tier, and the picked one lacks."""
    nbytes: int
    expected_gain_s: float
    """What the copy saves over computing those chunks anew."""


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
    copy: KvCopy | None = None
    candidates: tuple[CandidateCost, ...] = ()
    home: str | None = None
    """Id of the session's home when this was decided, if it could take the request."""
    plan: Plan = field(repr=False, compare=False)

    @property
    def is_staged(self) -> bool:
        """Whether KV is to be brought to the replica's CPU RAM before the request is sent."""
        return bool(self.prefetch_keys) or self.copy is not None


def left_behind(busy_share: float, judgment: Judgment) -> float:
    """Return how many requests wait behind one, when so much of a replica's time is taken.

    The mean number in an M/M/1 queue of that utilization r, ``r / (1 - r)``, bounded by
    `Judgment.least_behind` and `Judgment.most_behind`: each of them waits longer by what the
    replica spends on this one.
    """
    most = judgment.most_behind
    if busy_share * (1.0 + most) >= most:
        return most
    return max(judgment.least_behind, busy_share / (1.0 - busy_share))


def with_taken_s(
    ttft_s: float,
    *,
    busy_s: float,
    fetch_s: float,
    waiting: int,
    busy_share: float,
    judgment: Judgment,
) -> float:
    """Return a TTFT and, weighed, the time of the replica, for which so many wait already.

    That time, and a part of its transfers', is taken from requests that come behind. Their
    expected number is the larger of what the share of time that was taken of late
    (``busy_share``) gives, and the queue's length. At a replica that was idle, all waiting
    requests but the first are a burst, and ``more_of_a_burst`` more are taken to come for
    each: to open a replica too many costs nothing there, and to open it late helps few.
    """
    if not judgment.weighs_busy:
        return ttft_s
    burst = max(0.0, 1.0 - busy_share) * max(0, waiting - 1)
    to_come = waiting + judgment.more_of_a_burst * burst
    taken_s = busy_s + judgment.fetch_weight * fetch_s
    return ttft_s + max(left_behind(busy_share, judgment), to_come) * taken_s


def salt_of(replica_id: str) -> int:
    """Return the 64-bit hash of a replica that `rendezvous_score` takes."""
    return xxhash.xxh3_64_intdigest(replica_id.encode())


def rendezvous_score(affinity: int, salt: int) -> int:
    """Return how high a replica (a 64-bit hash of its id) ranks for an affinity.

    The highest wins, so every router that knows the replica picks it, and one
    that leaves takes only its own requests with it (rendezvous hashing).
    """
    mixed = ((affinity ^ salt) * _MIX) & _WORD
    return ((mixed ^ mixed >> 32) * _MIX) & _WORD


def pick(policy: PolicyName, candidates: Sequence[CandidateCost], question: Question) -> Pick:
    """Return the candidate that a policy picks, and why; there must be one at least."""
    if len(candidates) == 1:
        return candidates[0], Reason.ONLY_REPLICA
    return POLICIES[policy](candidates, question)


def cheapest(candidates: Sequence[CandidateCost], question: Question) -> Pick:
    """Pick the soonest first token; keep a session at home while that costs little."""
    judgment = question.judgment
    best_s = min(each.score_s(judgment) for each in candidates)
    home = _home(candidates, question)
    if home:
        soonest_s = min(each.ttft_s for each in candidates)
        if home.ttft_s <= soonest_s + question.spill_margin_s:
            return home, Reason.SESSION_HOME
    near_s = min(judgment.near_most_s, max(judgment.near_least_s, judgment.near * best_s))
    near = [each for each in candidates if each.score_s(judgment) <= best_s + near_s]
    picked = _preferred(near, question)
    if home is None:
        return picked, _why(picked, candidates)
    return picked, Reason.SESSION_HOME if picked is home else Reason.SESSION_SPILL


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
        key=lambda each: rendezvous_score(question.affinity, salt_of(each.replica_id)),
    )


def _why(picked: CandidateCost, candidates: Sequence[CandidateCost]) -> Reason:
    longest = max(each.matched for each in candidates)
    if longest and picked.matched == longest:
        return Reason.LONGEST_MATCH
    if not longest and len({each.in_flight for each in candidates}) == 1:
        return Reason.NO_INFORMATION
    return Reason.LEAST_LOADED
