"""The prefix index: which replica holds which keys in which tier, and how much of a prompt that is.

Keys are 64-bit (`warmroute_common.keys.key64`): a collision can only cost a wrong guess. Block keys
and chunk keys share one space, because a chunk has the key of its last block. Different schemes
give different keys.

The index keeps every key twice. Each replica has a dictionary per tier, with the key before each
key: for the detailed match of one replica, for eviction, and to forget the replica without a walk
over all keys. Each key has the set of its holders (`router.index.holders`), so one walk over a
prompt gives the depth of a thousand replicas.

Pure state: no clock, no I/O.
"""

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import filterfalse, islice, takewhile, zip_longest
from math import inf
from operator import itemgetter, or_
from typing import Final

from router.index.departed import DepartedKeys
from router.index.holders import Depth, Holders, find_depths, slots
from router.index.prompt_keys import LOWER_TIERS, ChunkRun, KvTier, Match, chunk_runs, joint_run


@dataclass(eq=False, slots=True)
class Stale:
    """Keys that a replica held in a tier before it was forgotten, and still has the bits of."""

    replica: int
    tier: KvTier
    keys: Iterator[int]
    count: int


def set_bits(bits: dict[int, int], replica: int, keys: Iterable[int]) -> None:
    """Set a replica's bit at each of the keys."""
    for key in keys:
        bits[key] = bits.get(key, 0) | 1 << replica


@dataclass(eq=False, slots=True)
class SpeculativeEntry:
    """Keys that a replica is believed to hold on its GPU; none once it has ended."""

    replica: int
    keys: Sequence[int] = field(repr=False)
    former: "Sequence[SpeculativeEntry | None]" = field(default=(), repr=False)
    """Of its first keys the claims whose place it took: most of them share a beginning."""


class SpeculativeEntries:
    """The claims on all replicas. Of several on one key the latest counts until it ends."""

    def __init__(self) -> None:
        self._by_replica: dict[int, dict[int, SpeculativeEntry]] = {}
        self._by_end: list[tuple[float, int, SpeculativeEntry]] = []
        self._open: dict[SpeculativeEntry, None] = {}
        self._timed = 0
        self._keys = 0

    def __len__(self) -> int:
        """Return how many keys the claims have together."""
        return self._keys

    def of(self, replica: int) -> dict[int, SpeculativeEntry]:
        """Return the keys that a replica is believed to hold, each with the claim that counts.

        What is known of a key ends its belief: it is then taken out here.
        """
        return self._by_replica.setdefault(replica, {})

    def add(self, replica: int, keys: Sequence[int]) -> SpeculativeEntry:
        """Claim keys, without an end."""
        believed = self.of(replica)
        claim = SpeculativeEntry(replica, keys, tuple(takewhile(bool, map(believed.get, keys))))
        if keys:
            believed.update(dict.fromkeys(keys, claim))
            self._open[claim] = None
            self._keys += len(keys)
        return claim

    def set_end(self, claim: SpeculativeEntry, until_s: float) -> None:
        """Have a claim end at a time, unless it has an end already."""
        if claim in self._open:
            del self._open[claim]
            self._timed += 1
            heapq.heappush(self._by_end, (until_s, self._timed, claim))

    def pop(self, now_s: float) -> SpeculativeEntry | None:
        """Take out the claim whose time is over first, if it is over by now; `end` it then."""
        if self._by_end and self._by_end[0][0] <= now_s:
            return heapq.heappop(self._by_end)[2]
        return None

    def pop_first(self) -> SpeculativeEntry | None:
        """Take out the claim that ends first, or the oldest without an end; `end` it then."""
        return self.pop(inf) or next(iter(self._open), None)

    def end(self, claim: SpeculativeEntry) -> list[int]:
        """End a claim; return the keys that no other one is left on."""
        believed = self.of(claim.replica)
        ended: list[int] = []
        for key, former in zip_longest(claim.keys, claim.former):
            if believed.get(key) is not claim:
                continue
            if former is not None and former.keys:  # it has not ended
                believed[key] = former
            else:
                del believed[key]
                ended.append(key)
        self._open.pop(claim, None)
        self._keys -= len(claim.keys)
        claim.keys = claim.former = ()
        return ended

    def forget(self, replica: int) -> dict[int, SpeculativeEntry]:
        """Believe nothing of a replica any more; return what was believed."""
        return self._by_replica.pop(replica, {})

    def items(self) -> Iterable[tuple[int, dict[int, SpeculativeEntry]]]:
        """Return what is believed of each replica."""
        return self._by_replica.items()

    def check(self) -> None:
        """Raise AssertionError if the claims contradict each other."""
        claims = {id(claim): claim for claim in (*self._open, *(each for *_, each in self._by_end))}
        assert self._keys == sum(len(claim.keys) for claim in claims.values())
        for replica, believed in self.items():
            for key, claim in believed.items():
                assert id(claim) in claims and claim.replica == replica and key in claim.keys


_EVICTION_SLACK: Final = 256
"""When full, this fraction of the limit is evicted at once: an eviction that
made room for one key only would scan past all earlier deletions each time."""
_EVICTED_PART: Final = 8
"""At most this fraction of a replica's keys in a tier goes before the next largest is taken from:
so none loses all while others, hardly smaller, lose nothing. Each costs a walk over its keys."""
_KEYS_PER_TICK: Final = 10_000
"""Keys whose claims end, and keys whose bits are cleared, in one `tick`: some 10 ms each."""
_MAX_CONTRADICTED: Final = 256
"""Answers from one `tick` to the next that correct the index; the latest count."""
_KEYS_PER_CLAIM: Final = 12
"""Ending a speculative entry costs as much as this many keys, besides its own."""


class PrefixIndex:
    """The keys that replicas hold or are believed to hold, at most ``max_keys`` of them.

    A key counts once for each replica and tier that holds it, and once for each claim; those of a
    forgotten replica count until they are swept. A store that replicas share is a holder of its
    own: its keys count once, in the remote tier. Beyond the limit the oldest claims go first, then
    keys of the largest holdings: the chains that were not used for longest, from their ends. No
    key goes before those that follow it in a prompt, which would be useless without it.
    ``evicted`` counts claims and keys.
    """

    def __init__(self, max_keys: int, departed: DepartedKeys | None = None) -> None:
        """``departed`` gets the keys that replicas lose, if that is wanted."""
        self.max_keys = max_keys
        self.departed = departed
        self.evicted = 0
        # Each key with the one before it in its prompt, if known, in the order of their use.
        self._held: dict[int, dict[KvTier, dict[int, int | None]]] = {}
        # Copies besides the first, of the few keys that have any.
        self._copies: dict[tuple[int, KvTier], dict[int, int]] = {}
        self._contradicted: deque[tuple[int, Sequence[int]]] = deque(maxlen=_MAX_CONTRADICTED)
        self._to_correct = self._contradicted.copy()
        self._claims = SpeculativeEntries()
        # On the GPU: known or believed. Lower: in any of the other tiers.
        self._on_gpu = Holders()
        self._lower = Holders()
        # Stores that replicas share: the bits of each one's readers, and the stores of each reader.
        self._mounts: dict[int, int] = {}
        self._stores: dict[int, list[int]] = {}
        self._stale: deque[Stale] = deque()
        self._stale_replicas = 0
        self._known = 0
        self._to_sweep = 0

    def __len__(self) -> int:
        return self._known + len(self._claims) + self._to_sweep

    def __repr__(self) -> str:
        return f"<PrefixIndex {self._known=} claimed={len(self._claims)} {self.evicted=}>"

    def held(self, replica: int) -> dict[KvTier, int]:
        """Return how many keys a replica is known to hold, by tier, in shared stores too."""
        held = {tier: len(keys) for tier, keys in self._held.get(replica, {}).items()}
        for keys in self._in_stores(replica):
            held[KvTier.REMOTE] = held.get(KvTier.REMOTE, 0) + len(keys)
        return held

    def believed(self, replica: int) -> int:
        """Return how many keys a replica is believed to hold on its GPU, or to be computing."""
        return len(self._claims.of(replica))

    def add(
        self,
        replica: int,
        tier: KvTier,
        keys: Sequence[int],
        *,
        parent: int | None = None,
        counted: bool = False,
    ) -> None:
        """Note that a replica holds keys in a tier; what was believed of them is now known.

        ``keys`` follow each other in a prompt, after ``parent``. If they do not, they are only
        evicted in a worse order. With ``counted`` a key added twice must be removed twice: vLLM
        reports each physical copy of a block, and the second one outlives the first.
        """
        held = self._held.setdefault(replica, {}).setdefault(tier, {})
        copies = self._copies.setdefault((replica, tier), {})
        before = len(held)
        believed = self._claims.of(replica) if tier is KvTier.GPU else None
        for key in keys:
            if key not in held:
                held[key] = parent
            elif counted:
                copies[key] = copies.get(key, 0) + 1
            elif copies:
                copies.pop(key, None)
            parent = key
            if believed:
                believed.pop(key, None)
        self._known += len(held) - before
        self._holders(tier).add(replica, keys)
        self._make_room()

    def remove(self, replica: int, tier: KvTier, keys: Iterable[int]) -> None:
        """Note that a replica lost keys (one copy of each); unknown ones are ignored."""
        held = self._held.setdefault(replica, {}).setdefault(tier, {})
        copies = self._copies.setdefault((replica, tier), {})
        before = len(held)
        believed = self._claims.of(replica) if tier is KvTier.GPU else None
        gone: list[int] = []
        for key in keys:
            if copies and (more := copies.pop(key, 0)):
                if more > 1:
                    copies[key] = more - 1
                continue
            held.pop(key, None)
            gone.append(key)
            if believed:
                believed.pop(key, None)
        self._known += len(held) - before
        if self.departed is not None:
            self.departed.left(replica, tier, gone)
        if tier is KvTier.GPU:
            self._on_gpu.discard(replica, gone)
        else:
            self._clear_bits(replica, tier, gone)

    def contradicted(self, replica: int, keys: Sequence[int]) -> None:
        """Note that a replica has computed keys that its GPU was known to hold: it did not.

        Too many copies were counted: vLLM also reports blocks that are reused, if a request wants
        it. From the next but one `tick` on, when the events of the computing have arrived, one copy
        counts.
        """
        self._contradicted.append((replica, keys))

    def _correct(self) -> None:
        for replica, keys in self._to_correct:
            if copies := self._copies.get((replica, KvTier.GPU)):
                for key in keys:
                    copies.pop(key, None)
        self._to_correct.clear()
        self._to_correct, self._contradicted = self._contradicted, self._to_correct

    def forget(self, replica: int, tiers: Collection[KvTier] | None = None) -> None:
        """Drop all that is known of a replica, or of these tiers of it, at once.

        With the GPU goes what was only believed, with all of them its shared stores. Its bits are
        left to `tick`.
        """
        if tiers is None:
            self.mount(replica, 0)
            for store in tuple(self._stores.get(replica, ())):
                self.mount(store, self._mounts[store] & ~(1 << replica))
        held = self._held.get(replica, {})
        tiers = tuple(KvTier) if tiers is None else tiers
        for tier in tiers:
            forgotten = held.pop(tier, {})
            self._copies.pop((replica, tier), None)
            self._known -= len(forgotten)
            if self.departed is not None:
                self.departed.lost(replica, tier, forgotten)
            self._leave_bits(replica, tier, forgotten)
        if KvTier.GPU in tiers:
            self._leave_bits(replica, KvTier.GPU, self._claims.forget(replica))
        # Keys that were believed count twice now: in their claims, and as to be swept.
        self._make_room()

    def mount(self, store: int, replicas: int) -> None:
        """Set which replicas read a shared store: ``replicas`` has the bits of their slots.

        The store has a slot of its own, with which its keys are added to the remote tier, and
        removed.
        """
        for replica in slots(self._mounts.pop(store, 0)):
            self._stores[replica].remove(store)
        if replicas:
            self._mounts[store] = replicas
        for replica in slots(replicas):
            self._stores.setdefault(replica, []).append(store)

    def _in_stores(self, replica: int) -> Iterator[dict[int, int | None]]:
        """Return what the shared stores hold that a replica reads."""
        for store in self._stores.get(replica, ()):
            if held := self._held.get(store, {}).get(KvTier.REMOTE):
                yield held

    def believe(
        self, replica: int, keys: Sequence[int], until_s: float | None = None
    ) -> SpeculativeEntry:
        """Count keys as held on the GPU until a time (or `set_end`): they are being computed there.

        A later claim on the same key takes its place until it ends; those known
        to be there need none.
        """
        if known := self._held.get(replica, {}).get(KvTier.GPU):
            keys = list(filterfalse(known.__contains__, keys))
        claim = self._claims.add(replica, keys)
        self._on_gpu.add(replica, keys)
        if until_s is not None:
            self.set_end(claim, until_s)
        self._make_room()
        return claim

    def set_end(self, claim: SpeculativeEntry, until_s: float) -> None:
        """Have a claim end at a time, unless it has an end already."""
        self._claims.set_end(claim, until_s)

    def use(self, replica: int, keys: Sequence[int], chunks: Sequence[int]) -> None:
        """Note that a request uses what a replica holds of a prompt: that is evicted last.

        ``keys`` are those of its blocks, ``chunks`` of its chunks.
        """
        own = self._held.get(replica, {}).items()
        for tier, held in (*own, *((KvTier.REMOTE, each) for each in self._in_stores(replica))):
            used = reversed(keys if tier is KvTier.GPU else chunks)
            # The last one stands for those before it, which are not evicted before it.
            if held and (last := next(filter(held.__contains__, used), None)) is not None:
                held[last] = held.pop(last)

    def withdraw(self, claim: SpeculativeEntry) -> None:
        """End a claim before its time; what another one claims too stays believed."""
        # What is known is not believed as well: these keys are neither now.
        self._on_gpu.discard(claim.replica, self._claims.end(claim))

    def expire(self, now_s: float, max_keys: float = inf) -> None:
        """End the claims whose time is over, until ``max_keys`` are reached or just exceeded."""
        while max_keys > 0 and (claim := self._claims.pop(now_s)) is not None:
            max_keys -= len(claim.keys) + _KEYS_PER_CLAIM
            self.withdraw(claim)

    def sweep(self, max_keys: int) -> None:
        """Clear the bits of forgotten replicas, for at most ``max_keys`` keys.

        Until a replica's are cleared `depths` has to look at it by itself.
        """
        while self._stale and max_keys > 0:
            stale = self._stale[0]
            part = list(islice(stale.keys, max_keys))
            self._clear_bits(stale.replica, stale.tier, part)
            stale.count -= len(part)
            self._to_sweep -= len(part)
            max_keys -= len(part)
            if not stale.count:
                self._stale.popleft()
        self._stale_replicas = reduce(or_, (1 << each.replica for each in self._stale), 0)

    def is_clear(self, replica: int) -> bool:
        """Whether a forgotten replica's bits are all cleared: another may get its number."""
        return not self._stale_replicas >> replica & 1

    def tick(self, now_s: float) -> None:
        """Do what is left to do of `expire` and `sweep`, a bounded part, and correct what answers
        contradicted; to be called about once a second."""
        if self.departed is not None:
            self.departed.pass_time(now_s)
        self._correct()
        self.expire(now_s, _KEYS_PER_TICK)
        self.sweep(_KEYS_PER_TICK)

    def match(
        self,
        replica: int,
        keys: Sequence[int],
        blocks_per_chunk: int = 1,
        chunks: Sequence[int] | None = None,
    ) -> Match:
        """Return how far a replica holds a prompt of blocks ``keys`` (and LMCache's ``chunks``)."""
        on_gpu = self._held.get(replica, {}).get(KvTier.GPU, {})
        gpu_blocks = joint_run(on_gpu, self._claims.of(replica), keys)
        if chunks is None:
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
        lower += ((KvTier.REMOTE, each) for each in self._in_stores(replica))
        return chunk_runs(lower, chunks, start) if lower else ()

    def holders(self, block: int, chunk: int | None) -> int:
        """Return the bits of the replicas that are known or believed to hold a block.

        ``block`` is its key, and ``chunk`` that of the chunk that it is in, if that is whole.
        Stores that replicas share have bits too, and replicas that were just forgotten do not.
        """
        lower = 0 if chunk is None else self._lower.at(chunk)
        return (self._on_gpu.at(block) | lower) & ~self._stale_replicas

    def knows(self, replica: int, block: int, chunk: int | None) -> bool:
        """Whether a replica is known, and not only believed, to hold a block: see `holders`."""
        held = self._held.get(replica, {})
        return block in held.get(KvTier.GPU, ()) or (
            chunk is not None and bool(self.runs(replica, (chunk,), 0))
        )

    def computes(self, replica: int, chunk: int) -> bool:
        """Return whether a chunk is believed to be computed there, and stored in no lower tier."""
        return chunk in self._claims.of(replica) and not self.runs(replica, (chunk,), 0)

    def depths(
        self,
        keys: Sequence[int],
        blocks_per_chunk: int,
        among: int,
        chunks: Sequence[int] | None = None,
    ) -> list[Depth]:
        """Return how deep each of many replicas holds a prompt, in one walk, deepest first.

        ``among`` has the bits of the replicas (`Replica.slot`) to report;
        replicas that hold nothing of the prompt are left out. For each of the
        others it says what `match` would.
        """
        if chunks is None:
            chunks = keys[blocks_per_chunk - 1 :: blocks_per_chunk]
        stale = self._stale_replicas
        for store, replicas in self._mounts.items():
            if self._stale_replicas >> store & 1:
                stale |= replicas
        stale &= among
        found = find_depths(
            self._on_gpu,
            self._lower,
            keys,
            blocks_per_chunk,
            among ^ stale,
            chunks=chunks,
            mounts=self._mounts,
        )
        for replica in slots(stale):
            match = self.match(replica, keys, blocks_per_chunk, chunks)
            if blocks := match.blocks(blocks_per_chunk):
                found.append(Depth(1 << replica, match.gpu_blocks, blocks))
        if stale:
            found.sort(key=lambda depth: depth.blocks, reverse=True)
        return found

    def check(self) -> None:
        """Raise AssertionError if the index contradicts itself."""
        self._claims.check()
        if self.departed is not None:
            self.departed.check()
        holdings = [keys for tiers in self._held.values() for keys in tiers.values()]
        assert sum(map(len, holdings)) == self._known
        for (replica, tier), copies in self._copies.items():
            assert copies.keys() <= self._held.get(replica, {}).get(tier, {}).keys()
            assert all(more >= 1 for more in copies.values())
        assert sum(stale.count for stale in self._stale) == self._to_sweep
        assert len(self) <= self.max_keys
        for store, replicas in self._mounts.items():
            assert replicas and all(store in self._stores[each] for each in slots(replicas))
        assert sum(map(len, self._stores.values())) == sum(
            map(int.bit_count, self._mounts.values())
        )
        on_gpu: dict[int, int] = {}
        lower: dict[int, int] = {}
        for replica, tiers in self._held.items():
            for tier, keys in tiers.items():
                set_bits(on_gpu if tier is KvTier.GPU else lower, replica, keys)
        for replica, believed in self._claims.items():
            set_bits(on_gpu, replica, believed)
        self._on_gpu.check(on_gpu, self._stale_replicas)
        self._lower.check(lower, self._stale_replicas)

    def _holders(self, tier: KvTier) -> Holders:
        return self._on_gpu if tier is KvTier.GPU else self._lower

    def _clear_bits(self, replica: int, tier: KvTier, keys: Iterable[int]) -> None:
        """Take a replica's bit off those keys that it does not hold elsewhere."""
        held = self._held.get(replica, {})
        places: list[Collection[int]]
        if tier is KvTier.GPU:
            places = [held.get(tier, ()), self._claims.of(replica)]
        else:
            places = [held.get(each, ()) for each in LOWER_TIERS]
        for place in filter(None, places):
            keys = filterfalse(place.__contains__, keys)
        self._holders(tier).discard(replica, keys)

    def _leave_bits(self, replica: int, tier: KvTier, keys: Collection[int]) -> None:
        """Have a replica's bits be taken off keys by `sweep`."""
        if keys:
            self._stale.append(Stale(replica, tier, iter(keys), len(keys)))
            self._stale_replicas |= 1 << replica
            self._to_sweep += len(keys)

    def _make_room(self) -> None:
        if len(self) <= self.max_keys:
            return
        target = self.max_keys - self.max_keys // _EVICTION_SLACK
        self.sweep(len(self) - target)
        while len(self) > target and (claim := self._claims.pop_first()) is not None:
            self.evicted += len(claim.keys)
            self.withdraw(claim)
        while (count := len(self) - target) > 0:
            self._evict_known(count)

    def _evict_known(self, count: int) -> None:
        """Take keys of the largest holdings, a part of each, ``count`` at most."""
        holdings = [
            (len(keys), replica, tier)
            for replica, tiers in self._held.items()
            for tier, keys in tiers.items()
        ]
        for size, replica, tier in sorted(holdings, key=itemgetter(0), reverse=True):
            held, copies = self._held[replica][tier], self._copies[replica, tier]
            ends = _chain_ends(held, min(count, 1 + size // _EVICTED_PART))
            for key in ends:
                del held[key]
                copies.pop(key, None)
            self._clear_bits(replica, tier, ends)
            self._known -= len(ends)
            self.evicted += len(ends)
            count -= len(ends)
            if not count:
                break


def _chain_ends(parents: Mapping[int, int | None], count: int) -> list[int]:
    """Return keys that none of the others follows, oldest chain first, each from its end."""
    children = Counter(parents.values())
    ends: dict[int, None] = {}
    for key in parents:
        at: int | None = key
        while at is not None and at in parents and at not in ends and not children[at]:
            ends[at] = None
            if len(ends) >= count:
                return list(ends)
            at = parents[at]
            children[at] -= 1
    # What is left follows itself: such links come from keys that did not follow each other.
    ends.update(dict.fromkeys(islice(filterfalse(ends.__contains__, parents), count - len(ends))))
    return list(ends)
