"""Which candidate gets a request: the policies, as functions from candidates to a pick.

Rendezvous hashing of the prompt's beginning separates equal candidates, so that equal prompts
meet at one replica when nothing else decides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import xxhash

from router.config.cost_weights import DEFAULT_WEIGHTS, CostWeights
from router.config.settings import PolicyName
from router.fleet.decision import Candidate, Reason

_MIX: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PickContext:
    """What a policy knows besides the candidates."""

    affinity: int
    """64-bit hash of what requests that should meet have in common."""
    home: str | None = None
    """Id of the session's home."""
    turn: int = 0
    """How many requests were sent before."""
    weights: CostWeights = DEFAULT_WEIGHTS


Pick = tuple[Candidate, Reason]
Policy = Callable[[Sequence[Candidate], PickContext], Pick]


def salt_of(replica_id: str) -> int:
    """Return the 64-bit hash of a replica's id, for `rendezvous_score`."""
    return xxhash.xxh3_64_intdigest(replica_id.encode())


def rendezvous_score(affinity: int, salt: int) -> int:
    """Return how high a replica (by the hash of its id) ranks for an affinity.

    The highest wins (rendezvous hashing): every router that knows the replica picks it, and a
    replica that leaves moves only its own requests.
    """
    mixed = ((affinity ^ salt) * _MIX) & _WORD
    return ((mixed ^ mixed >> 32) * _MIX) & _WORD


def pick(policy: PolicyName, candidates: Sequence[Candidate], context: PickContext) -> Pick:
    """Return the candidate that a policy picks, and why; there must be one at least."""
    if len(candidates) == 1:
        return candidates[0], Reason.ONLY_REPLICA
    return POLICIES[policy](candidates, context)


def cheapest(candidates: Sequence[Candidate], context: PickContext) -> Pick:
    """Pick the lowest score; of equals a session's home, then the longest match."""
    weights = context.weights
    scores_s = [each.score_s(weights) for each in candidates]
    most_s = min(scores_s) + weights.near_s
    equals = [each for each, score_s in zip(candidates, scores_s, strict=True) if score_s <= most_s]
    home = _home(candidates, context)
    picked = home if home in equals else _preferred(equals, context)
    picked = _idle_instead(picked, candidates, weights)
    if home is None:
        return picked, _why(picked, candidates)
    return picked, Reason.SESSION_HOME if picked is home else Reason.SESSION_SPILL


def _idle_instead(
    picked: Candidate, candidates: Sequence[Candidate], weights: CostWeights
) -> Candidate:
    """Return an idle replica that answers before the pick without more work, else the pick.

    If the pick was better only because it was less busy recently, waiting for it gains nothing.
    """
    idle = [
        each
        for each in candidates
        if each.cost.queue_s == 0.0 and not each.waiting
        if each.ttft_s < picked.ttft_s - weights.near_s
        if each.cost.busy_s <= picked.cost.busy_s + weights.near_s
    ]
    return min(idle, key=lambda each: each.ttft_s, default=picked)


def longest_prefix(candidates: Sequence[Candidate], context: PickContext) -> Pick:
    """Pick the longest match, whatever the load."""
    picked = _preferred(candidates, context)
    return picked, _why(picked, candidates)


def session_first(candidates: Sequence[Candidate], context: PickContext) -> Pick:
    """Keep a session at home always; place a new one by rendezvous hashing."""
    if home := _home(candidates, context):
        return home, Reason.SESSION_HOME
    return _rendezvous(candidates, context), Reason.NO_INFORMATION


def least_loaded(candidates: Sequence[Candidate], context: PickContext) -> Pick:
    """Pick the fewest requests in flight; equals take turns."""
    fewest = min(each.in_flight for each in candidates)
    equals = [each for each in candidates if each.in_flight == fewest]
    return equals[context.turn % len(equals)], Reason.LEAST_LOADED


def round_robin(candidates: Sequence[Candidate], context: PickContext) -> Pick:
    """Pick one after another."""
    return candidates[context.turn % len(candidates)], Reason.ROUND_ROBIN


POLICIES: Final[Mapping[PolicyName, Policy]] = MappingProxyType(
    {
        "ttft": cheapest,
        "longest-prefix": longest_prefix,
        "session": session_first,
        "least-loaded": least_loaded,
        "round-robin": round_robin,
    }
)


def _home(candidates: Sequence[Candidate], context: PickContext) -> Candidate | None:
    return next((each for each in candidates if each.replica_id == context.home), None)


def _preferred(candidates: Sequence[Candidate], context: PickContext) -> Candidate:
    """Return the longest match; of equals the least loaded, then the first by rendezvous."""
    longest = max(each.matched for each in candidates)
    matching = [each for each in candidates if each.matched == longest]
    fewest = min(each.in_flight for each in matching)
    return _rendezvous([each for each in matching if each.in_flight == fewest], context)


def _rendezvous(candidates: Sequence[Candidate], context: PickContext) -> Candidate:
    if len(candidates) == 1:
        return candidates[0]
    return max(
        candidates,
        key=lambda each: rendezvous_score(context.affinity, salt_of(each.replica_id)),
    )


def _why(picked: Candidate, candidates: Sequence[Candidate]) -> Reason:
    longest = max(each.matched for each in candidates)
    if longest and picked.matched == longest:
        return Reason.LONGEST_MATCH
    if not longest and len({each.in_flight for each in candidates}) == 1:
        return Reason.NO_INFORMATION
    return Reason.LEAST_LOADED
