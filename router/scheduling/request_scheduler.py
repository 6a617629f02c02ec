"""Where a request should go: filter, match, score, pick.

`RequestScheduler.place` finds the replicas that may answer (`ReplicaFilter`), how much of the
prompt each of them holds (`PrefixMatches`), predicts the cost of each (`Scorer`), and picks one
(`pick`). It changes nothing except what is due in the fleet. In a fleet of more than
`CostWeights.max_candidates` replicas only the most promising are scored.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import chain, islice
from math import inf
from typing import Final, TypeAlias

import xxhash

from router.config.cost_weights import CostWeights
from router.config.settings import DECODING_ROLES, PREFILLING_ROLES, PolicyName
from router.fleet.cost_model import CostPart, Work
from router.fleet.decision import Candidate, Decision, KvCopy, Reason
from router.fleet.fleet import Fleet
from router.fleet.in_flight import Ticket
from router.fleet.replica import Replica, ReplicaState
from router.fleet.replica_queue import ReplicaQueue
from router.index.holders import Depth, slots
from router.index.prefix_index import PrefixIndex
from router.index.prompt_keys import KeyShape, KvTier, PromptKeyCache, PromptKeys
from router.priority import Priority
from router.scheduling.scorer import (
    PickContext,
    ReservedWork,
    Scorer,
    pick,
    rendezvous_score,
    salt_of,
)
from warmroute_common.api_errors import NoReplicaError, UnknownModelError

_MAX_VIEWS: Final = 256
"""Views kept: clients choose models' names if replicas do not report theirs; gateways, subsets."""
_MAY_RETURN: Final = (ReplicaState.UP, ReplicaState.UNKNOWN, ReplicaState.DOWN)

_Asked: TypeAlias = tuple[str | None, frozenset[str], str | None, frozenset[str] | None]
"""A model, excluded replicas, the one that a request is bound to, and those it may go to."""


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Replicas that make equal keys of one prompt."""

    shape: KeyShape | None
    adapters: Mapping[str, str]
    replicas: int
    """The bits of their slots."""


@dataclass(frozen=True, slots=True)
class EligibleReplicas:
    """The replicas that may get a request, in the order of the configuration."""

    replicas: Sequence[Replica]
    by_slot: Mapping[int, Replica]
    prefillers: Sequence[Replica]
    """Replicas that prefill for these, and answer nothing themselves."""
    sources: Mapping[int, Replica]
    """By slot, the replicas that may give their KV: these, the prefillers and the draining ones."""
    groups: Sequence[KeyGroup]
    """The groups of the peer sources."""
    group_at: Mapping[int, int]
    """By a source's slot, the index of its group."""
    queues: Sequence[ReplicaQueue]
    """The queues of the ``replicas``, in the same order."""
    ring: Sequence[tuple[int, int]]
    """The hash of each one's id and its position in the order, sorted."""
    away: Sequence[Replica]
    """Replicas that get no requests now, but could answer if these do not."""

    def __len__(self) -> int:
        return len(self.replicas)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self.replicas)

    @classmethod
    def of(cls, able: Sequence[Replica], others: Sequence[Replica]) -> "EligibleReplicas":
        """Return a view of the replicas that take requests now, of all that could answer."""
        answering = [each for each in able if not each.only_prefills]
        prefillers = [each for each in able if each.only_prefills] if answering else ()
        replicas = answering or able
        draining = [each for each in others if each.is_leaving]
        sources = [*replicas, *prefillers, *draining]
        groups = _key_groups(sources)
        return cls(
            replicas=replicas,
            by_slot={each.slot: each for each in replicas},
            prefillers=prefillers,
            sources={each.slot: each for each in sources},
            groups=groups,
            group_at={
                slot: at for at, group in enumerate(groups) for slot in slots(group.replicas)
            },
            queues=[each.queue for each in replicas],
            ring=sorted((salt_of(each.id), at) for at, each in enumerate(replicas)),
            away=[*prefillers, *(each for each in others if each.state in _MAY_RETURN)],
        )


class ReplicaFilter:
    """Finds the replicas that may answer, and keeps them per question until the fleet changes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._views: dict[_Asked, EligibleReplicas] = {}
        self._version = fleet.replicas.version
        """`Replicas.version` that the views belong to."""

    def eligible(
        self,
        model: str | None,
        exclude: Collection[str],
        bound_to: str | None,
        among: Collection[str] | None,
    ) -> EligibleReplicas:
        """Return the replicas that may answer.

        Raises `UnknownModelError` or `NoReplicaError` if there is none.
        """
        if self._version != self._fleet.replicas.version:
            self._version = self._fleet.replicas.version
            self._views.clear()
        subset = None if among is None else frozenset(among)
        asked = (model, frozenset(exclude), bound_to, subset)
        view = self._views.get(asked)
        if view is None:
            view = self._find(*asked)
            if len(self._views) >= _MAX_VIEWS:
                del self._views[next(iter(self._views))]
            self._views[asked] = view
        return view

    def _find(
        self,
        model: str | None,
        exclude: Collection[str],
        bound_to: str | None,
        among: Collection[str] | None,
    ) -> EligibleReplicas:
        replicas = self._fleet.replicas
        if not replicas:
            raise NoReplicaError(
                "no replicas are registered; check 'replicas' and 'discovery' in the router's "
                "configuration"
            )
        serving = [each for each in replicas.values() if each.serves(model)]
        if not serving:
            raise UnknownModelError(model, self._fleet.models())
        # By replica, not by id: a replica may have been renamed since it was tried.
        tried = {replicas.find(each) for each in exclude}
        left = [each for each in serving if each not in tried]
        if bound_to is not None:
            bound = replicas.find(bound_to)
            left = [each for each in left if each is bound]
        if among is not None:
            named = {replicas.find(each) for each in among}
            left = [each for each in left if each in named]
        for state in (ReplicaState.UP, ReplicaState.UNKNOWN):
            if in_state := [each for each in left if each.state is state]:
                eligible = [each for each in in_state if not each.is_held_off] or in_state
                taken = set(eligible)
                others = [each for each in left if each not in taken]
                return EligibleReplicas.of(eligible, others)
        raise NoReplicaError(_why_none(serving, tried, bound_to))


def _key_groups(replicas: Sequence[Replica]) -> list[KeyGroup]:
    groups: dict[tuple[KeyShape | None, tuple[tuple[str, str], ...]], KeyGroup] = {}
    for each in replicas:
        name = (each.key_shape, tuple(sorted(each.adapters.items())))
        bits = groups[name].replicas if name in groups else 0
        groups[name] = KeyGroup(each.key_shape, each.adapters, bits | 1 << each.slot)
    return list(groups.values())


def _why_none(
    serving: Sequence[Replica], tried: Collection[Replica | None], bound_to: str | None
) -> str:
    states = ", ".join(
        f"{each.id} {'was tried' if each in tried else each.state}" for each in serving
    )
    if bound_to is not None:
        return f"the previous response is kept by '{bound_to}', which is not up ({states})"
    return f"no replica can take the request ({states})"


_MAX_HOLDERS: Final = 64
"""Replicas with long matches of which the best are scored; the longest matches come first."""

_NO_MATCH: Final = Depth(0, 0, 0)


class PrefixMatches:
    """The eligible replicas and peer sources, with how deep each of them matches the prompt."""

    def __init__(
        self,
        eligible: EligibleReplicas,
        keys: PromptKeyCache,
        index: PrefixIndex,
        weights: CostWeights,
    ) -> None:
        self.eligible = eligible
        self._weights = weights
        self._prompt_tokens = keys.prompt_tokens
        self._index = index
        self._keys = [keys.of(group.shape, group.adapters) for group in eligible.groups]
        self._depths: list[Sequence[Depth]] = []
        """For each group the replicas that match, deepest first."""
        self._by_slot: dict[int, Depth] = {}
        # Depths that many replicas share: one entry per replica would take too long.
        self._shared: list[Depth] = []
        for group, each in zip(eligible.groups, self._keys, strict=True):
            depths = index.depths(each.keys, each.blocks_per_chunk, group.replicas, each.chunk_keys)
            self._depths.append(depths)
            for depth in depths:
                if depth.replicas.bit_count() > weights.max_candidates:
                    self._shared.append(depth)
                else:
                    self._by_slot.update(dict.fromkeys(slots(depth.replicas), depth))

    def keys(self, replica: Replica) -> PromptKeys:
        """Return the prompt's keys at one replica."""
        return self._keys[self.eligible.group_at[replica.slot]]

    def depth(self, replica: Replica) -> Depth:
        """Return how deep one replica matches."""
        slot = replica.slot
        if (depth := self._by_slot.get(slot)) is not None:
            return depth
        return next((each for each in self._shared if each.replicas >> slot & 1), _NO_MATCH)

    def matched_tokens(self, replica: Replica) -> int:
        """Return how many tokens of the prompt one replica holds, in any tier."""
        matched_tokens = self.depth(replica).blocks * self.keys(replica).block_tokens
        return min(matched_tokens, self._prompt_tokens)

    def sources(self, now_s: float) -> list[tuple[Replica, int]]:
        """Return the replicas that hold most of the prompt and can give it, with their blocks."""
        sources: list[tuple[Replica, int]] = []
        for keys, depths in zip(self._keys, self._depths, strict=True):
            holders = (
                (self.eligible.sources[slot], depth.blocks)
                for depth in depths
                for slot in slots(depth.replicas)
            )
            able = (
                (replica, held)
                for replica, held in holders
                if replica.can_give(now_s) and not self._computes(replica, keys, held)
            )
            sources += islice(able, self._weights.max_sources)
        return sources

    def _computes(self, replica: Replica, keys: PromptKeys, held: int) -> bool:
        """Whether a replica still computes the end of the blocks that it is assumed to hold.

        A copy of the part that is stored already would be late: of 100 equal prompts, requests that
        waited for one got their first tokens 0.2 s after requests that waited for the whole.
        """
        chunks = held // keys.blocks_per_chunk
        return chunks > 0 and self._index.computes(replica.slot, keys.chunk_keys[chunks - 1])

    # --- the shortlists of a large fleet

    def prefillers(self, now_s: float) -> Sequence[Replica]:
        """Return the replicas that only prefill, the cheapest for this prompt."""
        all_of_them = self.eligible.prefillers
        if len(all_of_them) <= self._weights.max_candidates:
            return all_of_them
        return nsmallest(
            self._weights.max_candidates, all_of_them, key=lambda each: self._least_s(each, now_s)
        )

    def shortlist(self, affinity: int, also: Replica | None, now_s: float) -> Sequence[Replica]:
        """Return the replicas worth scoring, with ``also``.

        Half are the cheapest holders for this prompt, and half the replicas that are free soonest.
        Idle ones are taken in the order of their hashes, from the affinity on: so equal prompts
        meet among the scored replicas too.
        """
        eligible, half = self.eligible, self._weights.max_candidates // 2
        free_at_s = [queue.free_at_s(now_s) for queue in eligible.queues]
        holders = self._holders(now_s)
        if len(holders) > half:
            holders = nsmallest(half, holders, key=lambda each: self._least_s(each, now_s))
        soonest = self._idle(free_at_s, affinity, now_s)
        if len(soonest) < half:
            order = nsmallest(half, range(len(eligible)), key=free_at_s.__getitem__)
            soonest += [eligible.replicas[at] for at in order]
        chosen = [*holders, *soonest[:half], *([] if also is None else [also])]
        return list({each.slot: each for each in chosen}.values())

    def _holders(self, now_s: float) -> list[Replica]:
        """Return at most `_MAX_HOLDERS` that match; of many with one depth the one free soonest.

        If more than half of the replicas have one depth, the idle replicas of the shortlist already
        contain some of them.
        """
        able = self.eligible.by_slot
        few = list(islice(filter(able.__contains__, self._by_slot), _MAX_HOLDERS))
        shared = [
            list(filter(able.__contains__, slots(depth.replicas)))
            for depth in self._shared
            if 2 * depth.replicas.bit_count() <= len(self.eligible)
        ]
        few += [
            min(each, key=lambda slot: able[slot].queue.free_at_s(now_s)) for each in shared if each
        ]
        return [able[slot] for slot in few]

    def _least_s(self, replica: Replica, now_s: float) -> float:
        """Return a lower bound of the prompt's cost, if nothing is copied."""
        missing = self._prompt_tokens - self.matched_tokens(replica)
        return replica.queue.wait_s(now_s) + replica.rates.seconds(CostPart.PREFILL) * missing

    def _idle(self, free_at_s: Sequence[float], affinity: int, now_s: float) -> list[Replica]:
        """Return some idle replicas, in the order of their hashes from the affinity on."""
        ring = self.eligible.ring
        start = bisect_left(ring, (affinity, 0))
        around = chain(islice(ring, start, None), islice(ring, start))
        idle = (at for _, at in around if free_at_s[at] <= now_s)
        return [
            self.eligible.replicas[at] for at in islice(idle, self._weights.max_candidates // 2)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """A request that needs a replica; it may be placed more than once while it waits."""

    keys: PromptKeyCache
    """The prompt; its keys are made once."""
    model: str | None = None
    session: str | None = None
    client: str | None = None
    """Name of the client's key; None without keys."""
    priority: Priority = Priority.NORMAL
    """Its class, by which it waits."""
    bound_to: str | None = None
    """Id of the only replica that can answer."""
    exclude: Collection[str] = ()
    """Ids of replicas that failed to answer it."""
    among: Collection[str] | None = None
    """Ids of the replicas that may be asked; None: all."""
    streamed: bool = True
    """Whether the answer is streamed, so that its first token will be seen."""
    begin_by_s: float = inf
    """When a replica must begin with it, by the clock of `RequestScheduler.place`."""
    output_tokens: float | None = None
    """Expected length of the answer; None: nothing is known of it."""
    may_split: bool = False
    """Whether another replica may prefill the prompt."""
    former: Candidate | None = None
    """The pair whose first leg has ended, and that is still in flight: a replica is sought that
    pulls the KV and answers."""


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
        `UnknownModelError`, or `NoReplicaError` if no replica of the model takes requests, or none
        can pull the lender's KV.
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
        may_split = request.may_split and config.policy == "ttft"
        able = [
            each
            for each in ((*scored, *matches.prefillers(now_s)) if may_split else ())
            if each.nixl_role in PREFILLING_ROLES
        ]
        scorer = Scorer(
            fleet.index,
            keys.prompt_tokens,
            weights=weights,
            sources=matches.sources(now_s) if config.prefetch.enabled else (),
            reserved=reserved or ReservedWork(),
            busy_share=fleet.busy_share(now_s),
            output_tokens=request.output_tokens or weights.output_tokens,
            now_s=now_s,
            pairs_up=bool(able),
        )
        candidates = tuple(
            scorer.best(each, matches.keys(each), matches.depth(each).gpu_blocks) for each in scored
        )
        if request.former is not None:
            candidates = _pulling(candidates, scorer, request.former)
        at_home = next((each for each in candidates if each.replica is home), None)
        home_work_s = inf if at_home is None else at_home.work_s
        for each in candidates:
            each.beyond_home_s = max(0.0, each.work_s - home_work_s)
        begin_in_s = request.begin_by_s - now_s
        if able:
            candidates = _split(
                candidates,
                able,
                scorer,
                matches,
                home_work_s=home_work_s,
                begin_in_s=begin_in_s,
                weights=weights,
            )
        if foreseen is None:
            # A replica where it disturbs nobody is of no use if it begins too late.
            in_time = [each for each in candidates if each.begins_in_s <= begin_in_s]
            picked, reason = pick(config.policy, in_time or candidates, context)
        else:
            replica, reason = foreseen
            picked = next(each for each in candidates if each.replica is replica)
        if request.bound_to is not None:
            reason = Reason.BOUND
        elif request.exclude:
            reason = Reason.RETRY
        # What is brought to a full CPU RAM is evicted before it is used.
        prefetches = (
            picked.prefetch_gain_s > 0
            and picked.replica.can_prefetch
            and (picked.source is not None or picked.replica.can_stage(picked.slow_tokens))
        )
        return Decision(
            picked=picked,
            reason=reason,
            prompt_tokens=keys.prompt_tokens,
            candidates=candidates,
            away=eligible.away,
            prefetch_keys=picked.slow_keys() if prefetches else (),
            copy=_copy(picked),
            home=context.home,
            session=request.session,
            streamed=request.streamed,
            made_in_s=self._stopwatch() - began_s,
        )

    def second_leg(
        self, request: PlacementRequest, decision: Decision, ticket: Ticket, now_s: float
    ) -> tuple[Decision, Ticket]:
        """Return where a request is answered whose prompt another replica has just prefilled.

        That is decided again: while the prompt was computed, others came to the replica that was
        chosen, and vLLM admits no request while it computes another one's prompt. If another one
        is better by now, ``ticket`` is finished, and the request is in flight there.
        """
        again = replace(request, former=decision.picked, may_split=False, begin_by_s=inf)
        ticket.prefilled()
        try:
            moved = self.place(again, now_s)
        except (NoReplicaError, UnknownModelError):
            return decision, ticket
        if moved.picked.replica is ticket.replica:
            return decision, ticket
        ticket.finish(now_s, ok=False)
        return moved, self.fleet.start(moved, now_s)


def _split(
    candidates: Sequence[Candidate],
    able: Sequence[Replica],
    scorer: Scorer,
    matches: PrefixMatches,
    *,
    home_work_s: float,
    begin_in_s: float,
    weights: CostWeights,
) -> tuple[Candidate, ...]:
    """Return the candidates, each with another replica's prefill where that has a lower score.

    ``able`` are the replicas that may prefill for others. What begins within ``begin_in_s`` goes
    before what does not.
    """
    firsts = scorer.prefillers(
        [(each, matches.keys(each), matches.depth(each).gpu_blocks) for each in able]
    )
    best = []
    for own in candidates:
        options = [own]
        for first in firsts if own.replica.nixl_role in DECODING_ROLES else ():
            if (split := scorer.with_prefiller(own, first)) is not None:
                split.beyond_home_s = max(0.0, split.work_s - home_work_s)
                options.append(split)
        in_time = [each for each in options if each.begins_in_s <= begin_in_s]
        best.append(min(in_time or options, key=lambda each: each.score_s(weights)))
    return tuple(best)


def _pulling(
    candidates: Sequence[Candidate], scorer: Scorer, former: Candidate
) -> tuple[Candidate, ...]:
    """Return the candidates that can pull what the prefiller of ``former`` has computed.

    At the replica of ``former`` the request itself seems to wait, and its KV to be there already.
    Raises `NoReplicaError` if there is none.
    """
    assert former.prefiller is not None
    lender = former.prefiller.replica
    able = []
    for own in candidates:
        replica = own.replica
        if replica is former.replica:
            own.waiting -= 1
            own.matched_tokens = former.matched_tokens
        may_pull = replica is not lender and replica.nixl_role in DECODING_ROLES
        if may_pull and replica.has_keys_of(lender):
            able.append(scorer.pulling(own))
    if not able:
        raise NoReplicaError(f"no replica can pull the KV of {lender.id}")
    return tuple(able)


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
