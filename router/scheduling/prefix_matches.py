"""How much of a prompt each eligible replica holds, and which replicas are worth scoring.

In a fleet of more than `CostWeights.max_candidates` replicas only the most promising are scored.
"""

from bisect import bisect_left
from collections.abc import Sequence
from heapq import nsmallest
from itertools import chain, islice
from typing import Final

from router.config.cost_weights import CostWeights
from router.fleet.cost_model import CostPart
from router.fleet.replica import Replica
from router.index.holders import Depth, slots
from router.index.prefix_index import PrefixIndex
from router.index.prompt_keys import PromptKeyCache, PromptKeys
from router.scheduling.replica_filter import EligibleReplicas

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

    # --- the shortlist of a large fleet

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
