"""Where a request should go: filter, score, pick.

`RequestScheduler.place` finds the replicas that may answer (`ReplicaFilter`), predicts the cost
of each (`Scorer`), and picks one (`pick`). It changes nothing except what is due in the fleet.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import xxhash

from router.config.settings import PolicyName
from router.fleet.cost_model import Work
from router.fleet.decision import Candidate, Decision, KvCopy, Reason
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.index.prompt_keys import KvTier, PromptKeyCache
from router.scheduling.picker import PickContext, pick, rendezvous_score, salt_of
from router.scheduling.prefix_matches import PrefixMatches
from router.scheduling.replica_filter import ReplicaFilter
from router.scheduling.scorer import ReservedWork, Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """A request that needs a replica; it may be placed more than once while it waits."""

    keys: PromptKeyCache
    """The prompt; its keys are made once."""
    model: str | None = None
    session: str | None = None
    bound_to: str | None = None
    """Id of the only replica that can answer."""
    exclude: Collection[str] = ()
    """Ids of replicas that failed to answer it."""
    among: Collection[str] | None = None
    """Ids of the replicas that may be asked; None: all."""
    streamed: bool = True
    """Whether the answer is streamed, so that its first token will be seen."""


class RequestScheduler:
    """Decides where requests go, from the state of a fleet."""

    def __init__(self, fleet: Fleet, stopwatch: Callable[[], float] = lambda: 0.0) -> None:
        """``stopwatch`` returns seconds, for `Decision.made_in_s`."""
        self.fleet = fleet
        self._filter = ReplicaFilter(fleet)
        self._stopwatch = stopwatch

    def place(
        self, request: PlacementRequest, now_s: float, reserved: ReservedWork | None = None
    ) -> Decision:
        """Return where a request should go.

        ``reserved`` is the work of requests that wait in the router and go before this one. Raises
        `UnknownModelError`, or `NoReplicaError` if no replica of the model takes requests.
        """
        began_s = self._stopwatch()
        fleet, keys = self.fleet, request.keys
        fleet.pass_time(now_s)
        eligible = self._filter.eligible(
            request.model, request.exclude, request.bound_to, request.among
        )
        config, weights = fleet.config, fleet.weights
        matches = PrefixMatches(eligible, keys, fleet.index, weights)
        affinity = xxhash.xxh3_64_intdigest(keys.affinity(request.session))
        home = fleet.home(request.session, now_s)
        home = None if home is None else eligible.by_slot.get(home.slot)
        if home is None and request.session is not None and config.shares_replicas:
            # Another router may have had its turns: all routers take this replica for its home.
            home = max(eligible, key=lambda each: rendezvous_score(affinity, salt_of(each.id)))
        context = PickContext(
            affinity=affinity,
            home=None if home is None else home.id,
            turn=fleet.started,
            weights=weights,
        )
        scored, foreseen = eligible.replicas, None
        if len(eligible) > weights.max_candidates:
            if config.policy != "ttft":
                foreseen = _pick_without_costs(matches, config.policy, context)
            scored = matches.shortlist(affinity, home if foreseen is None else foreseen[0], now_s)
        scorer = Scorer(
            fleet.index,
            keys.prompt_tokens,
            weights=weights,
            sources=matches.sources(now_s) if config.prefetch.enabled else (),
            reserved=reserved or ReservedWork(),
            busy_share=fleet.busy_share(now_s),
            now_s=now_s,
        )
        candidates = tuple(
            scorer.best(each, matches.keys(each), matches.depth(each).gpu_blocks) for each in scored
        )
        if foreseen is None:
            picked, reason = pick(config.policy, candidates, context)
        else:
            replica, reason = foreseen
            picked = next(each for each in candidates if each.replica is replica)
        if request.bound_to is not None:
            reason = Reason.BOUND
        elif request.exclude:
            reason = Reason.RETRY
        prefetches = picked.prefetch_gain_s > 0 and picked.replica.can_prefetch
        return Decision(
            picked=picked,
            reason=reason,
            prompt_tokens=keys.prompt_tokens,
            candidates=candidates,
            prefetch_keys=picked.slow_keys() if prefetches else (),
            copy=_copy(picked),
            home=context.home,
            session=request.session,
            streamed=request.streamed,
            made_in_s=self._stopwatch() - began_s,
        )


def _copy(picked: Candidate) -> KvCopy | None:
    if (source := picked.source) is None:
        return None
    return KvCopy(
        source_id=source.replica.id,
        keys=picked.keys.chunks(source.runs),
        nbytes=round(source.nbytes),
        expected_gain_s=source.gain_s,
    )


def _pick_without_costs(
    matches: PrefixMatches, policy: PolicyName, context: PickContext
) -> tuple[Replica, Reason]:
    """Return the pick of a policy that ignores costs, from all replicas, and why."""
    nothing = Work(new_tokens=0)
    candidates = [
        Candidate(
            replica=each,
            keys=matches.keys(each),
            matched_tokens={KvTier.GPU: matches.matched_tokens(each)},
            work=nothing,
            cost=each.rates.cost(nothing),
        )
        for each in matches.eligible.replicas
    ]
    picked, reason = pick(policy, candidates, context)
    return picked.replica, reason
