"""What one prompt would cost at one replica for each source of its KV, and which candidate to pick.

The policies are functions from candidates to a pick. Rendezvous hashing of the prompt's beginning
separates equal candidates, so that equal prompts meet at one replica when nothing else decides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from types import MappingProxyType
from typing import Final

import xxhash

from router.config.cost_weights import DEFAULT_WEIGHTS, CostWeights
from router.config.settings import PolicyName
from router.fleet.cost_model import CostPart, Work
from router.fleet.decision import Candidate, PeerSource, Prefiller, Reason
from router.fleet.replica import SLOW_TIERS, Replica
from router.fleet.replica_queue import KvNeed
from router.index.prefix_index import PrefixIndex
from router.index.prompt_keys import ChunkRun, KvTier, Match, PromptKeys

_RATE_OF: Final = {KvTier.DISK: CostPart.DISK, KvTier.REMOTE: CostPart.REMOTE}

_KV_PART_TOKENS: Final = 512
"""Granularity, in tokens, of the KV memory that requests are known to share."""


class ReservedWork:
    """Work that waiting requests will bring to replicas, by the slots of the replicas."""

    def __init__(self) -> None:
        self._work_s: dict[int, float] = {}
        self._requests: dict[int, int] = {}

    def work_s(self, slot: int) -> float:
        """Return the seconds of a replica's time that are reserved."""
        return self._work_s.get(slot, 0.0)

    def requests(self, slot: int) -> int:
        """Return how many requests will come to a replica."""
        return self._requests.get(slot, 0)

    def add(self, slot: int, service_s: float) -> None:
        """Reserve ``service_s`` of a replica's time for one request."""
        self._work_s[slot] = self._work_s.get(slot, 0.0) + service_s
        self._requests[slot] = self._requests.get(slot, 0) + 1


class Scorer:
    """Makes the candidates for one prompt.

    ``sources`` are replicas that hold much of the prompt, each with its number of blocks: others
    may copy from them what they lack. ``reserved`` is work that goes to replicas before this
    prompt. ``busy_share`` is the fleet's, ``output_tokens`` the expected length of the answer.
    ``pairs_up``: whether one replica may prefill the prompt for another.
    """

    def __init__(
        self,
        index: PrefixIndex,
        prompt_tokens: int,
        *,
        weights: CostWeights,
        sources: Sequence[tuple[Replica, int]] = (),
        reserved: ReservedWork,
        busy_share: float,
        output_tokens: float,
        now_s: float,
        pairs_up: bool = False,
    ) -> None:
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._weights = weights
        self._sources = sources
        self._reserved = reserved
        self._busy_share = busy_share
        self._output_tokens = output_tokens
        self._now_s = now_s
        self._pairs_up = pairs_up
        self._needed: tuple[PromptKeys, KvNeed] | None = None

    def best(self, replica: Replica, keys: PromptKeys, gpu_blocks: int) -> Candidate:
        """Return the best candidate of a replica whose GPU holds this many blocks of the prompt.

        Its KV may come from the replica's own tiers alone, or also from a peer source.
        """
        runs = self._index.runs(replica.slot, keys.chunk_keys, gpu_blocks // keys.blocks_per_chunk)
        match = Match(gpu_blocks, runs)
        held = match.tokens(keys.block_tokens, keys.blocks_per_chunk)
        matched = _usable(held, self._prompt_tokens, replica.max_staged_tokens)
        reading, *computing = self._from_own_tiers(replica, keys, runs, matched)
        # A copy is useful only behind all that the replica has, however slow the tier.
        from_peers = self._from_peers(reading, match) if self._may_copy_to(replica, keys) else []
        if not (computing or from_peers):
            return reading
        # By the whole score: computing may give the first token slightly earlier, but take ten
        # times as much of the replica's time from the requests behind.
        candidates = (reading, *computing, *from_peers)
        return min(candidates, key=lambda each: each.score_s(self._weights))

    def prefillers(
        self, replicas: Sequence[tuple[Replica, PromptKeys, int]]
    ) -> Sequence[Candidate]:
        """Return the best replicas to prefill the prompt for another one, the best one first.

        Each replica comes with the prompt's keys and the number of its blocks on the GPU. Nothing
        is staged for a first leg: KV on disk or remote counts as not there.
        """
        able = []
        for replica, keys, gpu_blocks in replicas:
            chunk = gpu_blocks // keys.blocks_per_chunk
            runs = self._index.runs(replica.slot, keys.chunk_keys, chunk)
            held = Match(gpu_blocks, runs).tokens(keys.block_tokens, keys.blocks_per_chunk)
            matched = _usable(held, self._prompt_tokens, replica.max_staged_tokens)
            slow = [tier for tier in SLOW_TIERS if matched.get(tier)]
            each = self._candidate(replica, keys, (), _before(matched, slow) if slow else matched)
            each.output_tokens = 0.0  # the answer is written elsewhere
            able.append(each)
        weights = self._weights
        return nsmallest(weights.max_prefillers + 1, able, key=lambda each: each.score_s(weights))

    def with_prefiller(self, own: Candidate, first: Candidate) -> Candidate | None:
        """Return the candidate whose prompt ``first`` prefills; None if they cannot pair up."""
        replica, there = own.replica, first.replica
        if there is replica or first.keys is not own.keys:
            return None  # other keys: another model or adapter
        pulling = self.pulling(own, prefilled_s=first.ttft_s)
        return replace(
            pulling,
            prefiller=Prefiller(
                replica=there,
                work=first.work,
                cost=first.cost,
                pull_bytes=pulling.work.pull_bytes,
                waiting=first.waiting,
                second_legs_s=first.second_legs_s,
            ),
        )

    def pulling(self, own: Candidate, *, prefilled_s: float = 0.0) -> Candidate:
        """Return the candidate that pulls the prompt's KV once another replica has computed it."""
        replica = own.replica
        gpu_tokens = own.matched_tokens.get(KvTier.GPU, 0)
        kv = replace(own.kv, tokens=own.kv.tokens + replica.incoming_tokens)
        work = Work(
            new_tokens=1,
            matched_tokens=self._prompt_tokens - 1,
            pull_bytes=max(0, self._prompt_tokens - gpu_tokens) * replica.kv_bytes_per_token,
            prefilled_s=prefilled_s,
            queue_s=replica.queue.wait_s(self._now_s, kv) + self._reserved.work_s(replica.slot),
            decoding=own.work.decoding,
            context_tokens=own.work.context_tokens,
        )
        return replace(
            own,
            runs=(),
            matched_tokens={KvTier.GPU: gpu_tokens} if gpu_tokens else {},
            work=work,
            cost=replica.rates.cost(work),
            prefetch_gain_s=0.0,
            source=None,
        )

    def _may_copy_to(self, replica: Replica, keys: PromptKeys) -> bool:
        return bool(keys.chain) and replica.has_agent and replica.no_copies_until_s <= self._now_s

    def _from_own_tiers(
        self,
        replica: Replica,
        keys: PromptKeys,
        runs: tuple[ChunkRun, ...],
        matched: dict[KvTier, int],
    ) -> list[Candidate]:
        """Return the candidate with all of the replica's tiers, and the one without slow tiers.

        The latter counts only if the speed of the slow tier is known: otherwise a wrong initial
        rate would keep the tier from being used, and would never be corrected.
        """
        candidate = self._candidate(replica, keys, runs, matched)
        slow = [tier for tier in SLOW_TIERS if matched.get(tier)]
        if not slow:
            return [candidate]
        # Tiers may alternate along a prefix. Chunks in a faster tier behind a slow one are lost
        # too; that is rare, and not treated separately.
        shallow = self._work(replica, keys, _before(matched, slow))
        computing = replace(candidate, work=shallow, cost=replica.rates.cost(shallow))
        gain_s = computing.cost.busy_s - candidate.cost.busy_s
        candidate.prefetch_gain_s = max(0.0, gain_s)
        known = all(replica.rates.knows(_RATE_OF[tier]) for tier in slow)
        return [candidate, computing] if known else [candidate]

    def _candidate(
        self,
        replica: Replica,
        keys: PromptKeys,
        runs: tuple[ChunkRun, ...],
        matched: Mapping[KvTier, int],
    ) -> Candidate:
        work = self._work(replica, keys, matched)
        return Candidate(
            replica=replica,
            keys=keys,
            runs=runs,
            matched_tokens=matched,
            work=work,
            cost=replica.rates.cost(work),
            kv=self._kv_need(keys),
            waiting=replica.waiting
            + replica.others_waiting
            + self._reserved.requests(replica.slot),
            second_legs_s=[each.due_s - self._now_s for each in replica.second_legs.values()],
            pairs_up=self._pairs_up,
            busy_share=self._busy_share,
            own_share=replica.recent.share(self._now_s),
            output_tokens=self._output_tokens,
        )

    def _from_peers(self, own: Candidate, match: Match) -> list[Candidate]:
        """Return a candidate for each peer source that is worth its copy."""
        blocks = match.blocks(own.keys.blocks_per_chunk)
        base = self._work(own.replica, own.keys, own.matched_tokens)
        return [
            candidate
            for source, source_blocks in self._sources
            if source_blocks > blocks and _may_fetch(own.replica, source)
            if (runs := self._to_copy(source, own, match))
            if (candidate := self._with_copy(own, base, source, runs)) is not None
        ]

    def _to_copy(self, source: Replica, own: Candidate, match: Match) -> tuple[ChunkRun, ...]:
        """Return the chunks of a peer source that are useful behind the end of a match."""
        keys = own.keys
        on_gpu = match.gpu_blocks // keys.blocks_per_chunk
        start = match.runs[-1].stop if match.runs else on_gpu
        runs = self._index.runs(source.slot, keys.chunk_keys, start)
        end = on_gpu + own.replica.max_staged_tokens / keys.chunk_tokens
        usable = [run for run in runs if run.start + 1 <= end]
        if usable:
            usable[-1] = replace(usable[-1], stop=int(min(usable[-1].stop, end)))
        return tuple(usable)

    def _with_copy(
        self, own: Candidate, base: Work, source: Replica, runs: tuple[ChunkRun, ...]
    ) -> Candidate | None:
        """Return the candidate whose KV a copy completes; None if that gains too little.

        All of the replica's own tiers count. The source first reads chunks that lie on its disk or
        remote; it is assumed to be as fast at that as the replica itself.
        """
        replica, keys, matched = own.replica, own.keys, own.matched_tokens
        reach = min(runs[-1].stop * keys.chunk_tokens, self._prompt_tokens)
        per_chunk = keys.chunk_tokens * replica.kv_bytes_per_token
        slow = dict.fromkeys(SLOW_TIERS, 0.0)
        copied = 0.0
        for run in runs:
            nbytes = (run.stop - run.start) * per_chunk
            copied += nbytes
            if run.tier in slow:
                slow[run.tier] += nbytes
        backlog_s = base.backlog_s
        if any(slow.values()):
            backlog_s = max(backlog_s, source.fetching_until_s - self._now_s)
        new_tokens = self._new_tokens(keys, reach)
        work = Work(
            new_tokens=new_tokens,
            matched_tokens=max(0, self._prompt_tokens - new_tokens),
            load_bytes=(reach - matched.get(KvTier.GPU, 0)) * replica.kv_bytes_per_token,
            disk_bytes=base.disk_bytes + slow[KvTier.DISK],
            remote_bytes=base.remote_bytes + slow[KvTier.REMOTE],
            peer_bytes=copied,
            queue_s=base.queue_s,
            backlog_s=backlog_s,
            decoding=base.decoding,
            context_tokens=base.context_tokens,
        )
        cost = replica.rates.cost(work)
        gain_s = replica.rates.cost(base).busy_s - cost.busy_s
        if gain_s < self._weights.least_copy_gain_s:
            return None
        copied_tokens = reach - sum(matched.values())
        if not replica.can_stage(copied_tokens + own.slow_tokens):
            return None
        peer = PeerSource(
            replica=source, runs=runs, tokens=copied_tokens, nbytes=copied, gain_s=gain_s
        )
        return replace(own, work=work, cost=cost, source=peer)

    def _new_tokens(self, keys: PromptKeys, matched_tokens: int) -> int:
        """Return the tokens to compute: at least the last token, and with it its whole block."""
        least = 1
        if keys.chain:
            least += max(0, self._prompt_tokens - 1) % keys.block_tokens
        return max(least, self._prompt_tokens - matched_tokens)

    def _kv_need(self, keys: PromptKeys) -> KvNeed:
        if self._needed is None or self._needed[0] is not keys:
            self._needed = (keys, _kv_need(keys, self._prompt_tokens))
        return self._needed[1]

    def _work(self, replica: Replica, keys: PromptKeys, matched: Mapping[KvTier, int]) -> Work:
        total = sum(matched.values())
        per_token = replica.kv_bytes_per_token
        new_tokens = self._new_tokens(keys, total)
        return Work(
            new_tokens=new_tokens,
            matched_tokens=max(0, self._prompt_tokens - new_tokens),
            load_bytes=(total - matched.get(KvTier.GPU, 0)) * per_token,
            disk_bytes=matched.get(KvTier.DISK, 0) * per_token,
            remote_bytes=matched.get(KvTier.REMOTE, 0) * per_token,
            queue_s=replica.queue.wait_s(self._now_s, self._kv_need(keys))
            + self._reserved.work_s(replica.slot),
            backlog_s=max(0.0, replica.fetching_until_s - self._now_s),
            decoding=replica.decoding + replica.others_running,
            context_tokens=replica.context_tokens,
            reads_late=replica.reads_late(matched),
        )


def _kv_need(keys: PromptKeys, prompt_tokens: int) -> KvNeed:
    """Return the KV memory of a prompt, in parts of about `_KV_PART_TOKENS`."""
    if not keys.chain:
        return KvNeed(tokens=prompt_tokens)
    step = max(1, _KV_PART_TOKENS // keys.block_tokens)
    part = keys.keys[step - 1 :: step]
    return KvNeed(keys=part, tokens_per_key=step * keys.block_tokens, tokens=prompt_tokens)


def _may_fetch(replica: Replica, source: Replica) -> bool:
    """Whether a replica can use chunks of another."""
    if source is replica:
        return False
    return source.layout == replica.layout and source.key_shape == replica.key_shape


def _usable(
    held: dict[KvTier, int], prompt_tokens: int, max_staged_tokens: float
) -> dict[KvTier, int]:
    """Cut off what exceeds the prompt, or CPU RAM.

    Token counts of texts are estimates. All tokens that are not on the GPU pass through CPU RAM at
    the same time.
    """
    left: float = prompt_tokens
    usable: dict[KvTier, int] = {}
    staged_left = max_staged_tokens
    for tier, count in held.items():
        usable[tier] = int(min(count, left if tier is KvTier.GPU else min(left, staged_left)))
        left -= usable[tier]
        staged_left -= 0 if tier is KvTier.GPU else usable[tier]
    return usable


def _before(matched: dict[KvTier, int], slow: Sequence[KvTier]) -> dict[KvTier, int]:
    first = min(list(matched).index(tier) for tier in slow)
    return dict(list(matched.items())[:first])


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
        if each.busy_s <= picked.busy_s + weights.near_s
        if each.after_s(weights) <= picked.after_s(weights) + weights.near_s
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
