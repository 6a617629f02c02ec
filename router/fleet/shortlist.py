"""The eligible replicas by how deep each matches a prompt, and which are worth weighing. Pure.

In a fleet of more than `MAX_WEIGHED` replicas only the most promising are weighed in full.
"""

from bisect import bisect_left
from collections.abc import Sequence
from heapq import nsmallest
from itertools import chain, islice
from typing import Final

from router.fleet.eligibility import Eligible
from router.fleet.replica import Replica
from router.index import Depth, PrefixIndex, PromptKeyCache, PromptKeys, slots
from router.latency import Part

MAX_WEIGHED: Final = 16
"""Replicas whose cost is worked out in full, beside the session's home or the pick of a policy
that asks for no costs."""

_MAX_SOURCES: Final = 2
"""Replicas that KV might be copied from: the deepest of a prompt are rarely more."""

_MAX_HOLDERS: Final = 64
"""Replicas that match deep, of which the best are weighed; the deepest come first."""

_NO_MATCH: Final = Depth(0, 0, 0)


class Field:
    """The eligible replicas and peer sources, with how deep each of them matches the prompt."""

    def __init__(self, eligible: Eligible, keyring: PromptKeyCache, index: PrefixIndex) -> None:
        self.eligible = eligible
        self._prompt_tokens = keyring.prompt_tokens
        self._index = index
        self._keys = [keyring.of(kind.shape, kind.adapters) for kind in eligible.kinds]
        self._depths: list[Sequence[Depth]] = []
        """For each kind the replicas that match, deepest first."""
        self._by_slot: dict[int, Depth] = {}
        # Depths that many replicas share: an entry for each replica is not worth its time.
        self._crowds: list[Depth] = []
        for kind, keys in zip(eligible.kinds, self._keys, strict=True):
            depths = index.depths(keys.keys, keys.blocks_per_chunk, kind.replicas, keys.chunk_keys)
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

    def holders(self, now_s: float) -> list[Replica]:
        """Return replicas that match, at most `_MAX_HOLDERS`; of each crowd the soonest free.

        If more than half of the replicas match alike, the shortlist of idle replicas already
        contains some of them.
        """
        able = self.eligible.by_slot
        few = list(islice(filter(able.__contains__, self._by_slot), _MAX_HOLDERS))
        crowds = [
            list(filter(able.__contains__, slots(crowd.replicas)))
            for crowd in self._crowds
            if 2 * crowd.replicas.bit_count() <= len(self.eligible)
        ]
        few += [
            min(each, key=lambda slot: able[slot].queue.free_at_s(now_s)) for each in crowds if each
        ]
        return [able[slot] for slot in few]

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
            sources += islice(able, _MAX_SOURCES)
        return sources

    def _computes(self, replica: Replica, keys: PromptKeys, held: int) -> bool:
        """Whether a replica still computes the end of so many blocks that it is to hold.

        A copy of the part that is stored so far would be late: of 100 equal prompts, requests
        that waited for one had their first tokens 0.2 s after requests that waited for the whole.
        """
        chunks = held // keys.blocks_per_chunk
        return chunks > 0 and self._index.computes(replica.slot, keys.chunk_keys[chunks - 1])

    def bound_s(self, replica: Replica, now_s: float) -> float:
        """Return what the prompt costs at the least, if nothing is copied."""
        missing = self._prompt_tokens - self.matched_tokens(replica)
        return replica.queue.wait_s(now_s) + replica.rates.seconds(Part.PREFILL) * missing


def shortlist(field: Field, affinity: int, also: Replica | None, now_s: float) -> list[Replica]:
    """Return the replicas worth weighing: of the holders, of the others, and one more.

    Of the holders the cheapest for this prompt; of all, the soonest free.
    Idle ones are taken in turn from where the affinity falls among their
    hashes, so that equal prompts meet among those weighed, too.
    """
    eligible = field.eligible
    free_at_s = [queue.free_at_s(now_s) for queue in eligible.queues]
    half = MAX_WEIGHED // 2
    holders = field.holders(now_s)
    if len(holders) > half:
        holders = nsmallest(half, holders, key=lambda each: field.bound_s(each, now_s))
    soonest = _idle(eligible, free_at_s, affinity, now_s)
    if len(soonest) < half:
        order = nsmallest(half, range(len(eligible)), key=free_at_s.__getitem__)
        soonest += [eligible.replicas[at] for at in order]
    chosen = [*holders, *soonest[:half], *([] if also is None else [also])]
    return list({each.slot: each for each in chosen}.values())


def _idle(
    eligible: Eligible, free_at_s: Sequence[float], affinity: int, now_s: float
) -> list[Replica]:
    """Return some idle replicas, those first whose hashes follow the affinity."""
    ring = eligible.ring
    start = bisect_left(ring, (affinity, 0))
    around = chain(islice(ring, start, None), islice(ring, start))
    idle = (at for _, at in around if free_at_s[at] <= now_s)
    return [eligible.replicas[at] for at in islice(idle, MAX_WEIGHED // 2)]
