"""Where a request should go: who is weighed for it, by how deep each one matches, and the pick.

Pure: what it is told in, a `Decision` out. In a fleet of more than
`MAX_WEIGHED` replicas only the most promising are weighed in full.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain, islice
from typing import Final

import xxhash

from router.config import Judgment, PolicyName, RouterConfig
from router.fleet.eligibility import Eligible
from router.fleet.options import Assessment, Assessor
from router.fleet.policy import (
    CandidateCost,
    Decision,
    KvCopy,
    Plan,
    Question,
    Reason,
    pick,
)
from router.fleet.replica import Replica
from router.latency import Part, Promised
from router.residency import Depth, PrefixIndex, PromptKeyring, PromptKeys, slots

MAX_WEIGHED: Final = 16
"""Replicas whose cost is worked out in full, beside the session's home or the pick of a policy
that asks for no costs."""

_MAX_DONORS: Final = 2
"""Replicas that KV might be copied from: the deepest of a prompt are rarely more."""

_MAX_HOLDERS: Final = 64
"""Replicas that match deep, of which the best are weighed; the deepest come first."""

_NO_MATCH: Final = Depth(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request to be placed."""

    keyring: PromptKeyring
    session: str | None
    home: int | None
    """Slot of the session's home."""
    turn: int
    """How many requests were sent before."""
    busy_share: float
    """Share of the fleet's time that recent requests took; above 1 it falls behind."""
    promised: Promised
    """What replicas will be given before this, beside what they have."""
    streamed: bool
    """Whether the answer will be streamed."""
    now_s: float


def decide(
    ask: Ask,
    eligible: Eligible,
    index: PrefixIndex,
    config: RouterConfig,
    judgment: Judgment,
) -> Decision:
    """Return where a request should go; ``eligible`` must not be empty."""
    keyring, now_s = ask.keyring, ask.now_s
    field = _Field(eligible, keyring, index)
    affinity = xxhash.xxh3_64_intdigest(keyring.affinity(ask.session))
    free_at_s = [line.free_at_s for line in eligible.lines]
    home = None if ask.home is None else eligible.by_slot.get(ask.home)
    question = Question(
        affinity=affinity,
        home=None if home is None else home.id,
        spill_margin_s=config.sessions.spill_margin_s,
        turn=ask.turn,
        judgment=judgment,
    )
    weighed, foreseen = eligible.replicas, None
    if len(eligible) > MAX_WEIGHED:
        if config.policy != "ttft":
            foreseen = _foreseen(field, config.policy, question)
        also = home if foreseen is None else foreseen[0]
        weighed = _shortlist(field, free_at_s, affinity, also, ask)
    assessor = Assessor(
        index,
        keyring.prompt_tokens,
        judgment=judgment,
        donors=field.donors(now_s) if config.prefetch.enabled else (),
        promised=ask.promised,
        busy_share=ask.busy_share,
        now_s=now_s,
    )
    assessed = [
        assessor.assess(each, field.keys(each), field.depth(each).gpu_blocks) for each in weighed
    ]
    candidates = tuple(each.candidate for each in assessed)
    if foreseen is None:
        picked, reason = pick(config.policy, candidates, question)
        chosen = next(each for each in assessed if each.candidate is picked)
    else:
        replica, reason = foreseen
        chosen = next(each for each in assessed if each.replica is replica)
    return _decision(chosen, reason, candidates, question.home, ask)


class _Field:
    """The eligible replicas and donors, with how deep each of them matches the prompt."""

    def __init__(self, eligible: Eligible, keyring: PromptKeyring, index: PrefixIndex) -> None:
        self.eligible = eligible
        self._prompt_tokens = keyring.prompt_tokens
        self._index = index
        self._keys = [keyring.of(kind.shape, kind.adapters) for kind in eligible.kinds]
        self._depths: list[Sequence[Depth]] = []
        """For each kind the replicas that match, deepest first."""
        self._by_slot: dict[int, Depth] = {}
        # Those of many are asked for by few: not worth an entry each.
        self._crowds: list[Depth] = []
        for kind, keys in zip(eligible.kinds, self._keys, strict=True):
            depths = index.depths(keys.keys, keys.blocks_per_chunk, kind.replicas)
            self._depths.append(depths)
            for depth in depths:
                if depth.replicas.bit_count() > MAX_WEIGHED:
                    self._crowds.append(depth)
                else:
                    self._by_slot.update(dict.fromkeys(slots(depth.replicas), depth))

    def keys(self, replica: Replica) -> PromptKeys:
        """Return the prompt's keys at one replica."""
        return self._keys[self.eligible.kind_at[replica.slot]]

    def depth(self, replica: Replica) -> Depth:
        """Return how deep one replica matches."""
        slot = replica.slot
        if (depth := self._by_slot.get(slot)) is not None:
            return depth
        return next((each for each in self._crowds if each.replicas >> slot & 1), _NO_MATCH)

    def matched_tokens(self, replica: Replica) -> int:
        """Return how much of the prompt one replica holds, in any tier."""
        matched_tokens = self.depth(replica).blocks * self.keys(replica).block_tokens
        return min(matched_tokens, self._prompt_tokens)

    def holders(self) -> list[Replica]:
        """Return replicas that match, at most `_MAX_HOLDERS`; of each crowd the soonest free.

        Of a crowd of most replicas those are found among all, without a search.
        """
        able = self.eligible.by_slot
        few = list(islice(filter(able.__contains__, self._by_slot), _MAX_HOLDERS))
        crowds = [
            list(filter(able.__contains__, slots(crowd.replicas)))
            for crowd in self._crowds
            if 2 * crowd.replicas.bit_count() <= len(self.eligible)
        ]
        few += [min(each, key=lambda slot: able[slot].line.free_at_s) for each in crowds if each]
        return [able[slot] for slot in few]

    def donors(self, now_s: float) -> list[tuple[Replica, int]]:
        """Return those that hold most of the prompt and can give of it, with how many blocks."""
        donors: list[tuple[Replica, int]] = []
        for keys, depths in zip(self._keys, self._depths, strict=True):
            holders = (
                (self.eligible.donors[slot], depth.blocks)
                for depth in depths
                for slot in slots(depth.replicas)
            )
            able = (
                (replica, held)
                for replica, held in holders
                if replica.can_give(now_s) and not self._computes(replica, keys, held)
            )
            donors += islice(able, _MAX_DONORS)
        return donors

    def _computes(self, replica: Replica, keys: PromptKeys, held: int) -> bool:
        """Whether a replica still computes the end of so many blocks that it is to hold.

        A copy of the part that is stored so far would be late: of 100 equal prompts those that
        waited for one had their first tokens 0.2 s after those that waited for the whole.
        """
        chunks = held // keys.blocks_per_chunk
        return chunks > 0 and self._index.computes(replica.slot, keys.chunk_keys[chunks - 1])

    def bound_s(self, replica: Replica, now_s: float) -> float:
        """Return what the prompt costs at the least, if nothing is copied."""
        missing = self._prompt_tokens - self.matched_tokens(replica)
        return replica.line.queue_s(now_s) + replica.rates.seconds(Part.PREFILL) * missing


def _shortlist(
    field: _Field, free_at_s: Sequence[float], affinity: int, also: Replica | None, ask: Ask
) -> list[Replica]:
    """Return the replicas worth weighing: of the holders, of the others, and one more.

    Of the holders those that it would cost least; of all, the soonest free.
    Idle ones are taken in turn from where the affinity falls among their
    hashes, so that equal prompts meet among those weighed, too.
    """
    eligible, now_s = field.eligible, ask.now_s
    half = MAX_WEIGHED // 2
    holders = field.holders()
    if len(holders) > half:
        holders = nsmallest(half, holders, key=lambda each: field.bound_s(each, now_s))
    soonest = _idle(eligible, free_at_s, affinity, now_s)
    if len(soonest) < half:
        order = nsmallest(half, range(len(eligible)), key=free_at_s.__getitem__)
        soonest += [eligible.replicas[at] for at in order]
    chosen = [*holders, *soonest[:half], *([] if also is None else [also])]
    return list({each.slot: each for each in chosen}.values())


def _foreseen(field: _Field, policy: PolicyName, question: Question) -> tuple[Replica, Reason]:
    """Return what a policy picks that asks for no costs, and why."""
    replicas = field.eligible.replicas
    candidates = [
        CandidateCost(
            replica_id=each.id,
            matched_tokens={"any": field.matched_tokens(each)},
            in_flight=each.in_flight,
            ttft_s=0.0,
            base_s=0.0,
            queue_s=0.0,
            fetch_s=0.0,
            load_s=0.0,
            prefill_s=0.0,
        )
        for each in replicas
    ]
    picked, reason = pick(policy, candidates, question)
    at = next(at for at, each in enumerate(candidates) if each is picked)
    return replicas[at], reason


def _idle(
    eligible: Eligible, free_at_s: Sequence[float], affinity: int, now_s: float
) -> list[Replica]:
    """Return some idle replicas, those first whose hashes follow the affinity."""
    ring = eligible.ring
    start = bisect_left(ring, (affinity, 0))
    around = chain(islice(ring, start, None), islice(ring, start))
    idle = (at for _, at in around if free_at_s[at] <= now_s)
    return [eligible.replicas[at] for at in islice(idle, MAX_WEIGHED // 2)]


def _decision(
    chosen: Assessment,
    reason: Reason,
    candidates: tuple[CandidateCost, ...],
    home: str | None,
    ask: Ask,
) -> Decision:
    replica, way = chosen.replica, chosen.way
    prefetched = way.gain_s > 0 and replica.has_agent
    return Decision(
        replica_id=replica.id,
        url=replica.config.url,
        reason=reason,
        prompt_tokens=ask.keyring.prompt_tokens,
        matched_tokens=chosen.candidate.matched_tokens,
        predicted_ttft_s=chosen.candidate.ttft_s,
        prefetch_keys=chosen.slow_keys() if prefetched else (),
        expected_gain_s=way.gain_s if prefetched else 0.0,
        copy=_copy(chosen),
        candidates=candidates,
        home=home,
        plan=Plan(
            slot=replica.slot,
            work=way.work,
            claim_keys=chosen.keys.keys,
            chain=chosen.keys.chain,
            session=ask.session,
            streamed=ask.streamed,
        ),
    )


def _copy(chosen: Assessment) -> KvCopy | None:
    offer = chosen.way.offer
    if offer is None:
        return None
    return KvCopy(
        source_id=offer.donor.id,
        keys=chosen.keys.chunks(offer.runs),
        nbytes=round(chosen.way.work.peer_bytes),
        expected_gain_s=chosen.way.copy_gain_s,
    )
