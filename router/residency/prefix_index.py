"""What each replica holds, by key, and how much of a prompt that is.

Keys are 64-bit (`cacheengine.keys.key64`): a collision can only cost a wrong
guess. Block keys and chunk keys live in one space, since a chunk has the key
of its last block; schemes that differ give different keys.

It is kept twice. Every replica has a dictionary per tier, in the order in which
keys came: for one replica's match in detail, for eviction, and to forget it
without a walk over all keys. And every key has the bits of its holders
(`router.residency.replica_sets`), so that one walk tells how deep all replicas match.

Pure state: no clock, no I/O. Replicas are small integers (`Replica.slot`).
"""

import heapq
import sys
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import filterfalse, islice, takewhile, zip_longest
from operator import itemgetter, or_
from typing import Final

from router.residency.matches import LOWER_TIERS, ChunkRun, Match, chunk_runs, joint_run
from router.residency.replica_sets import Depth, Holders, find_depths, slots
from router.residency.tiers import Tier

_EVICTION_SLACK: Final = 256
"""When full, this fraction of the limit is evicted at once: an eviction that
made room for one key only would scan past all earlier deletions each time."""

_EVICTED_PART: Final = 16
"""At most this fraction of a replica's keys in a tier goes before the next largest is
taken from: so none loses all while others, hardly smaller, lose nothing."""

_SWEPT_AT_ONCE: Final = 20_000
"""Keys whose bits are cleared in one piece: that takes some 10 ms."""


@dataclass(eq=False, slots=True)
class Claim:
    """Keys that a replica is believed to hold until a time, unless withdrawn."""

    replica: int
    keys: Sequence[int] = field(repr=False)
    until_s: float
    former: "Sequence[Claim | None]" = field(default=(), repr=False)
    """Of its first keys the claims whose place it took: most of them share a beginning."""


@dataclass(eq=False, slots=True)
class _Stale:
    """Keys that a replica held in a tier before it was forgotten, and still has the bits of."""

    replica: int
    tier: Tier
    keys: Iterator[int]
    count: int


class PrefixIndex:
    """The keys that replicas hold or are believed to hold, at most ``max_keys`` of them.

    A key counts once for each replica and tier that holds it, and once for
    each claim; those of a forgotten replica count until they are swept.
    Beyond the limit the oldest claims go first, then the oldest keys of the
    largest holdings; ``evicted`` counts both. Of ``swept_at_once`` see `sweep`.
    """

    def __init__(self, max_keys: int, *, swept_at_once: int = _SWEPT_AT_ONCE) -> None:
        self.max_keys = max_keys
        self.swept_at_once = swept_at_once
        self.evicted = 0
        self._held: dict[int, dict[Tier, dict[int, int]]] = {}
        self._believed: dict[int, dict[int, Claim]] = {}
        self._claims: list[tuple[float, int, Claim]] = []
        self._claims_made = 0
        # On the GPU: known or believed. Lower: in any of the other tiers.
        self._on_gpu = Holders()
        self._lower = Holders()
        self._stale: deque[_Stale] = deque()
        self._stale_replicas = 0
        self._known = 0
        self._claimed = 0
        self._to_sweep = 0

    def __len__(self) -> int:
        return self._known + self._claimed + self._to_sweep

    def __repr__(self) -> str:
        return f"<PrefixIndex known={self._known} claimed={self._claimed} evicted={self.evicted}>"

    def held(self, replica: int) -> dict[Tier, int]:
        """Return how many keys a replica is known to hold, by tier."""
        return {tier: len(keys) for tier, keys in self._held.get(replica, {}).items()}

    def add(self, replica: int, tier: Tier, keys: Sequence[int], *, counted: bool = False) -> None:
        """Note that a replica holds keys in a tier; what was believed of them is now known.

        With ``counted`` a key added twice must be removed twice: vLLM reports
        each physical copy of a block, and the second one outlives the first.
        """
        held = self._holding(replica, tier)
        before = len(held)
        believed = self._believed.get(replica) if tier is Tier.GPU else None
        for key in keys:
            held[key] = held.get(key, 0) + 1 if counted else 1
            if believed:
                believed.pop(key, None)
        self._known += len(held) - before
        self._holders(tier).add(replica, keys)
        self._make_room()

    def remove(self, replica: int, tier: Tier, keys: Iterable[int]) -> None:
        """Note that a replica lost keys (one copy of each); unknown ones are ignored."""
        held = self._holding(replica, tier)
        before = len(held)
        believed = self._believed.get(replica) if tier is Tier.GPU else None
        gone: list[int] = []
        for key in keys:
            copies = held.pop(key, 0)
            if copies > 1:
                held[key] = copies - 1
                continue
            gone.append(key)
            if believed:
                believed.pop(key, None)
        self._known += len(held) - before
        self._let_go(replica, tier, gone, left=held)

    def forget(self, replica: int, tiers: Collection[Tier] | None = None) -> None:
        """Drop all that is known of a replica, or of these tiers of it.

        With the GPU goes what was only believed. It is unknown at once; but
        where it is much the bits are left to `sweep`.
        """
        held = self._held.get(replica, {})
        for tier in tuple(held) if tiers is None else tiers:
            forgotten = held.pop(tier, {})
            self._known -= len(forgotten)
            self._let_all_go(replica, tier, forgotten)
        if tiers is None or Tier.GPU in tiers:
            self._let_all_go(replica, Tier.GPU, self._believed.pop(replica, {}))
        # Keys that were believed count twice now: in their claims, and as to be swept.
        self._make_room()

    def sweep(self) -> None:
        """Clear the bits of ``swept_at_once`` keys of forgotten replicas; to be called often.

        Until a replica's are cleared `depths` has to look at it by itself.
        """
        self._sweep(self.swept_at_once)

    def believe(self, replica: int, keys: Sequence[int], until_s: float) -> Claim:
        """Count keys as held on the GPU until a time: they are being computed there.

        A later claim on the same key takes its place until it ends; those known
        to be there need none.
        """
        if known := self._held.get(replica, {}).get(Tier.GPU):
            keys = list(filterfalse(known.__contains__, keys))
        believed = self._believed.setdefault(replica, {})
        claim = Claim(replica, keys, until_s, list(takewhile(bool, map(believed.get, keys))))
        if not keys:
            return claim
        believed.update(dict.fromkeys(keys, claim))
        self._claims_made += 1
        heapq.heappush(self._claims, (until_s, self._claims_made, claim))
        self._claimed += len(keys)
        self._on_gpu.add(replica, keys)
        self._make_room()
        return claim

    def withdraw(self, claim: Claim) -> None:
        """End a claim before its time; what another one claims too stays believed."""
        believed = self._believed.get(claim.replica, {})
        ended: list[int] = []
        for key, former in zip_longest(claim.keys, claim.former):
            if believed.get(key) is not claim:
                continue
            if former is not None and former.keys:  # it has not ended
                believed[key] = former
            else:
                del believed[key]
                ended.append(key)
        self._let_go(claim.replica, Tier.GPU, ended, left=believed)
        self._claimed -= len(claim.keys)
        claim.keys = claim.former = ()

    def expire(self, now_s: float, limit: int | None = None) -> None:
        """End the claims whose time is over, ``limit`` of them at most."""
        ended = 0
        while self._claims and self._claims[0][0] <= now_s and (limit is None or ended < limit):
            self.withdraw(heapq.heappop(self._claims)[2])
            ended += 1

    def match(self, replica: int, keys: Sequence[int], blocks_per_chunk: int = 1) -> Match:
        """Return how far a replica holds a prompt; ``keys`` are those of its blocks."""
        on_gpu = self._held.get(replica, {}).get(Tier.GPU, {})
        gpu_blocks = joint_run(on_gpu, self._believed.get(replica, {}), keys)
        chunks = keys[blocks_per_chunk - 1 :: blocks_per_chunk]
        return Match(gpu_blocks, self.runs(replica, chunks, gpu_blocks // blocks_per_chunk))

    def runs(self, replica: int, chunks: Sequence[int], start: int) -> tuple[ChunkRun, ...]:
        """Return what a replica's lower tiers hold without a gap, from a chunk on.

        ``chunks`` are the keys of a prompt's chunks.
        """
        if start >= len(chunks):
            return ()
        held = self._held.get(replica, {})
        lower = [(tier, held[tier]) for tier in LOWER_TIERS if held.get(tier)]
        return chunk_runs(lower, chunks, start) if lower else ()

    def computes(self, replica: int, chunk: int) -> bool:
        """Return whether a chunk is believed to be computed there, and stored in no lower tier."""
        believed = self._believed.get(replica, {})
        return chunk in believed and not self.runs(replica, (chunk,), 0)

    def depths(self, keys: Sequence[int], blocks_per_chunk: int, among: int) -> list[Depth]:
        """Return how deep each of many replicas holds a prompt, in one walk, deepest first.

        ``among`` has the bits of the replicas (`Replica.slot`) to tell of;
        those that hold nothing of the prompt are left out. For each of the
        others it says what `match` would.
        """
        stale = among & self._stale_replicas
        found = find_depths(self._on_gpu, self._lower, keys, blocks_per_chunk, among ^ stale)
        for replica in slots(stale):
            match = self.match(replica, keys, blocks_per_chunk)
            if blocks := match.blocks(blocks_per_chunk):
                found.append(Depth(1 << replica, match.gpu_blocks, blocks))
        if stale:
            found.sort(key=lambda depth: depth.blocks, reverse=True)
        return found

    def check(self) -> None:
        """Raise AssertionError if the index contradicts itself."""
        known = sum(len(keys) for tiers in self._held.values() for keys in tiers.values())
        assert known == self._known, (known, self._known)
        claimed = sum(len(claim.keys) for _, _, claim in self._claims)
        assert claimed == self._claimed, (claimed, self._claimed)
        assert len(self) <= max(self.max_keys, 0), (len(self), self.max_keys)
        for tiers in self._held.values():
            for keys in tiers.values():
                assert all(copies >= 1 for copies in keys.values())
        live = {id(claim) for _, _, claim in self._claims}
        for replica, believed in self._believed.items():
            for key, claim in believed.items():
                assert id(claim) in live and claim.replica == replica and key in claim.keys
        self._check_holders()

    def _check_holders(self) -> None:
        on_gpu: dict[int, int] = {}
        lower: dict[int, int] = {}
        for replica, tiers in self._held.items():
            for tier, keys in tiers.items():
                _set_bits(on_gpu if tier is Tier.GPU else lower, replica, keys)
        for replica, believed in self._believed.items():
            _set_bits(on_gpu, replica, believed)
        for stale in self._stale:
            assert stale.count > 0
            assert self._stale_replicas >> stale.replica & 1
        assert sum(stale.count for stale in self._stale) == self._to_sweep
        _check_masks(on_gpu, self._on_gpu, self._stale_replicas)
        _check_masks(lower, self._lower, self._stale_replicas)

    def _holding(self, replica: int, tier: Tier) -> dict[int, int]:
        return self._held.setdefault(replica, {}).setdefault(tier, {})

    def _holders(self, tier: Tier) -> Holders:
        return self._on_gpu if tier is Tier.GPU else self._lower

    def _let_go(
        self,
        replica: int,
        tier: Tier,
        keys: Iterable[int],
        left: Collection[int] | None = None,
    ) -> None:
        """Take a replica's bit off keys that it does not hold elsewhere.

        ``left`` is where they were, which need not be asked.
        """
        held = self._held.get(replica, {})
        places: list[Collection[int]]
        if tier is Tier.GPU:
            places = [held.get(tier, ()), self._believed.get(replica, ())]
        else:
            places = [held.get(each, ()) for each in LOWER_TIERS]
        for place in places:
            if place and place is not left:
                keys = filterfalse(place.__contains__, keys)
        self._holders(tier).discard(replica, keys)

    def _let_all_go(self, replica: int, tier: Tier, keys: Collection[int]) -> None:
        """Do as `_let_go`, but later if these are many."""
        if len(keys) <= self.swept_at_once:
            self._let_go(replica, tier, keys)
            return
        self._stale.append(_Stale(replica, tier, iter(keys), len(keys)))
        self._stale_replicas |= 1 << replica
        self._to_sweep += len(keys)

    def _sweep(self, limit: int) -> None:
        while self._stale and limit > 0:
            stale = self._stale[0]
            part = list(islice(stale.keys, limit))
            self._let_go(stale.replica, stale.tier, part)
            stale.count -= len(part)
            self._to_sweep -= len(part)
            limit -= len(part)
            if not stale.count:
                self._stale.popleft()
        self._stale_replicas = reduce(or_, (1 << each.replica for each in self._stale), 0)

    def _make_room(self) -> None:
        if len(self) <= self.max_keys:
            return
        target = self.max_keys - self.max_keys // _EVICTION_SLACK
        self._sweep(len(self) - target)
        while len(self) > target and self._claims:
            claim = heapq.heappop(self._claims)[2]
            self.evicted += len(claim.keys)
            self.withdraw(claim)
        if len(self) > target:
            self._evict_known(len(self) - target)

    def _evict_known(self, count: int) -> None:
        """Take the oldest keys of the largest holdings, a part of each."""
        while count:
            holdings = [
                (len(keys), replica, tier)
                for replica, tiers in self._held.items()
                for tier, keys in tiers.items()
            ]
            holdings.sort(key=itemgetter(0), reverse=True)
            for size, replica, tier in holdings:
                count -= self._evict_oldest(replica, tier, min(count, 1 + size // _EVICTED_PART))
                if not count:
                    break

    def _evict_oldest(self, replica: int, tier: Tier, count: int) -> int:
        held = self._held[replica][tier]
        oldest = list(islice(held, count))
        for key in oldest:
            del held[key]
        self._let_go(replica, tier, oldest, left=held)
        self._known -= len(oldest)
        self.evicted += len(oldest)
        return len(oldest)


def keys64(chain: Sequence[bytes]) -> list[int]:
    """Return the 64-bit keys of whole digests, all of one length (a multiple of 8 bytes)."""
    if not chain:
        return []
    words = array("Q", b"".join(chain))
    if sys.byteorder == "little":
        words.byteswap()
    per_digest = len(chain[0]) // words.itemsize
    return words[per_digest - 1 :: per_digest].tolist()


def _set_bits(masks: dict[int, int], replica: int, keys: Iterable[int]) -> None:
    for key in keys:
        masks[key] = masks.get(key, 0) | 1 << replica


def _check_masks(expected: dict[int, int], holders: Holders, stale: int) -> None:
    found = dict(holders.items())
    assert all(found.values()), "a key without holders is kept"
    for key in expected.keys() | found.keys():
        wanted, has = expected.get(key, 0), found.get(key, 0)
        assert not wanted & ~has, (key, wanted, has)
        assert not has & ~wanted & ~stale, (key, wanted, has, stale)
