"""Which candidate gets a request: the policies, pure functions from candidates to a pick.

Equal candidates are told apart by rendezvous hashing of the prompt's beginning,
so that equal prompts meet where nothing else decides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import xxhash

from router.config import DEFAULT, Judgment, PolicyName
from router.fleet.candidate import Candidate
from router.fleet.decision import Reason

_MIX: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a policy knows beside the candidates."""

    affinity: int
    """64-bit hash of what requests that should meet have in common."""
    home: str | None = None
    """Id of the session's home."""
    turn: int = 0
    """How many requests were sent before."""
    judgment: Judgment = DEFAULT


Pick = tuple[Candidate, Reason]
Policy = Callable[[Sequence[Candidate], Question], Pick]


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


def pick(policy: PolicyName, candidates: Sequence[Candidate], question: Question) -> Pick:
    """Return the candidate that a policy picks, and why; there must be one at least."""
    if len(candidates) == 1:
        return candidates[0], Reason.ONLY_REPLICA
    return POLICIES[policy](candidates, question)


def cheapest(candidates: Sequence[Candidate], question: Question) -> Pick:
    """Pick the least score; of equals a session's home, then the longest match."""
    judgment = question.judgment
    scores_s = [each.score_s(judgment) for each in candidates]
    most_s = min(scores_s) + judgment.near_s
    equals = [each for each, score_s in zip(candidates, scores_s, strict=True) if score_s <= most_s]
    home = _home(candidates, question)
    picked = home if home in equals else _preferred(equals, question)
    picked = _idle_instead(picked, candidates, judgment)
    if home is None:
        return picked, _why(picked, candidates)
    return picked, Reason.SESSION_HOME if picked is home else Reason.SESSION_SPILL


def _idle_instead(
    picked: Candidate, candidates: Sequence[Candidate], judgment: Judgment
) -> Candidate:
    """Return an idle replica that answers before the pick with no more work, or the pick.

    Where the pick was only better for having been less busy of late, nothing is worth waiting for.
    """
    idle = [
        each
        for each in candidates
        if each.cost.queue_s == 0.0 and not each.waiting
        if each.ttft_s < picked.ttft_s - judgment.near_s
        if each.cost.busy_s <= picked.cost.busy_s + judgment.near_s
    ]
    return min(idle, key=lambda each: each.ttft_s, default=picked)


def longest_prefix(candidates: Sequence[Candidate], question: Question) -> Pick:
    """Pick the longest match, whatever the load."""
    picked = _preferred(candidates, question)
    return picked, _why(picked, candidates)


def session_first(candidates: Sequence[Candidate], question: Question) -> Pick:
    """Keep a session at home always; place a new one by rendezvous hashing."""
    if home := _home(candidates, question):
        return home, Reason.SESSION_HOME
    return _rendezvous(candidates, question), Reason.NO_INFORMATION


def least_loaded(candidates: Sequence[Candidate], question: Question) -> Pick:
    """Pick the fewest requests under way; equals take turns."""
    fewest = min(each.in_flight for each in candidates)
    equals = [each for each in candidates if each.in_flight == fewest]
    return equals[question.turn % len(equals)], Reason.LEAST_LOADED


def round_robin(candidates: Sequence[Candidate], question: Question) -> Pick:
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


def _home(candidates: Sequence[Candidate], question: Question) -> Candidate | None:
    return next((each for each in candidates if each.replica_id == question.home), None)


def _preferred(candidates: Sequence[Candidate], question: Question) -> Candidate:
    """Return the longest match, of those the least loaded, of those the rendezvous."""
    longest = max(each.matched for each in candidates)
    matching = [each for each in candidates if each.matched == longest]
    fewest = min(each.in_flight for each in matching)
    return _rendezvous([each for each in matching if each.in_flight == fewest], question)


def _rendezvous(candidates: Sequence[Candidate], question: Question) -> Candidate:
    if len(candidates) == 1:
        return candidates[0]
    return max(
        candidates,
        key=lambda each: rendezvous_score(question.affinity, salt_of(each.replica_id)),
    )


def _why(picked: Candidate, candidates: Sequence[Candidate]) -> Reason:
    longest = max(each.matched for each in candidates)
    if longest and picked.matched == longest:
        return Reason.LONGEST_MATCH
    if not longest and len({each.in_flight for each in candidates}) == 1:
        return Reason.NO_INFORMATION
    return Reason.LEAST_LOADED
