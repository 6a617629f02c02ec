"""What each replica holds, by key, and how much of a prompt that is.

Keys are 64-bit (`cacheengine.keys.key64`): a collision can only cost a wrong
guess. Block keys and chunk keys live in one space, since a chunk has the key
of its last block; schemes that differ give different keys.

Every replica has a dictionary per tier rather than every key a set of
replicas: so a replica that restarted is forgotten at once, without a walk over
all keys, and the longest match is a run of dictionary lookups inside C.

Pure state: no clock, no I/O. Replicas are small integers (`Replica.slot`).
"""

import heapq
import sys
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Final

from router.replica import Tier

LOWER_TIERS: Final = (Tier.CPU, Tier.DISK, Tier.REMOTE)
"""The tiers of chunks, fastest first."""

_EVICTION_SLACK: Final = 64
"""When full, this fraction of the limit is evicted at once: an eviction that
made room for one key only would scan past all earlier deletions each time."""


@dataclass(eq=False, slots=True)
class Claim:
    """Keys that a replica is believed to hold until a time, unless withdrawn."""

    replica: int
    keys: Sequence[int] = field(repr=False)
    until_s: float


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Consecutive chunks whose fastest tier is the same: indices start to stop - 1."""

    tier: Tier
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Match:
    """How far a replica holds a prompt without a gap.

    The first ``gpu_blocks`` blocks are on the GPU; ``runs`` go on from the
    chunk that holds their end.
    """

    gpu_blocks: int = 0
    runs: tuple[ChunkRun, ...] = ()

    def tokens(self, block_tokens: int, blocks_per_chunk: int) -> dict[Tier, int]:
        """Return the matched tokens by tier; tiers that hold none are left out."""
        matched = {Tier.GPU: self.gpu_blocks * block_tokens} if self.gpu_blocks else {}
        chunk_tokens = block_tokens * blocks_per_chunk
        end = self.gpu_blocks * block_tokens
        for run in self.runs:
            stop = run.stop * chunk_tokens
            matched[run.tier] = matched.get(run.tier, 0) + stop - end
            end = stop
        return matched


class PrefixIndex:
    """The keys that replicas hold or are believed to hold, at most ``max_keys`` of them.

    A key counts once for each replica and tier that holds it, and once for
    each claim. Beyond the limit the oldest claims go first, then the oldest
    keys of the largest holding; ``evicted`` counts both.
    """

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self.evicted = 0
        self._held: dict[int, dict[Tier, dict[int, int]]] = {}
        self._believed: dict[int, dict[int, Claim]] = {}
        self._claims: list[tuple[float, int, Claim]] = []
        self._claims_made = 0
        self._known = 0
        self._claimed = 0

    def __len__(self) -> int:
        return self._known + self._claimed

    def __repr__(self) -> str:
        return f"<PrefixIndex known={self._known} claimed={self._claimed} evicted={self.evicted}>"

    def held(self, replica: int) -> dict[Tier, int]:
        """Return how many keys a replica is known to hold, by tier."""
        return {tier: len(keys) for tier, keys in self._held.get(replica, {}).items()}

    def add(self, replica: int, tier: Tier, keys: Iterable[int], *, counted: bool = False) -> None:
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
        self._make_room()

    def remove(self, replica: int, tier: Tier, keys: Iterable[int]) -> None:
        """Note that a replica lost keys (one copy of each); unknown ones are ignored."""
        held = self._holding(replica, tier)
        before = len(held)
        believed = self._believed.get(replica) if tier is Tier.GPU else None
        for key in keys:
            copies = held.pop(key, 0)
            if copies > 1:
                held[key] = copies - 1
            elif believed:
                believed.pop(key, None)
        self._known += len(held) - before

    def forget(self, replica: int, tiers: Collection[Tier] | None = None) -> None:
        """Drop all that is known of a replica, or of these tiers of it.

        With the GPU goes what was only believed.
        """
        held = self._held.get(replica, {})
        for tier in tuple(held) if tiers is None else tiers:
            self._known -= len(held.pop(tier, ()))
        if tiers is None or Tier.GPU in tiers:
            self._believed.pop(replica, None)

    def believe(self, replica: int, keys: Sequence[int], until_s: float) -> Claim:
        """Count keys as held on the GPU until a time: they are being computed there.

        A later claim on the same key takes its place.
        """
        claim = Claim(replica, keys, until_s)
        self._believed.setdefault(replica, {}).update(dict.fromkeys(keys, claim))
        self._claims_made += 1
        heapq.heappush(self._claims, (until_s, self._claims_made, claim))
        self._claimed += len(keys)
        self._make_room()
        return claim

    def withdraw(self, claim: Claim) -> None:
        """End a claim before its time; what a later one claims too stays believed."""
        believed = self._believed.get(claim.replica, {})
        for key in claim.keys:
            if believed.get(key) is claim:
                del believed[key]
        self._claimed -= len(claim.keys)
        claim.keys = ()

    def expire(self, now_s: float, limit: int | None = None) -> None:
        """End the claims whose time is over, ``limit`` of them at most."""
        ended = 0
        while self._claims and self._claims[0][0] <= now_s and (limit is None or ended < limit):
            self.withdraw(heapq.heappop(self._claims)[2])
            ended += 1

    def match(self, replica: int, keys: Sequence[int], blocks_per_chunk: int = 1) -> Match:
        """Return how far a replica holds a prompt; ``keys`` are those of its blocks."""
        held = self._held.get(replica, {})
        gpu_blocks = _joint_run(held.get(Tier.GPU, {}), self._believed.get(replica, {}), keys)
        lower = [(tier, held[tier]) for tier in LOWER_TIERS if held.get(tier)]
        if not lower or gpu_blocks == len(keys):
            return Match(gpu_blocks)
        chunks = keys[blocks_per_chunk - 1 :: blocks_per_chunk]
        return Match(gpu_blocks, _chunk_runs(lower, chunks, gpu_blocks // blocks_per_chunk))

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

    def _holding(self, replica: int, tier: Tier) -> dict[int, int]:
        return self._held.setdefault(replica, {}).setdefault(tier, {})

    def _make_room(self) -> None:
        if len(self) <= self.max_keys:
            return
        target = self.max_keys - self.max_keys // _EVICTION_SLACK
        while len(self) > target and self._claims:
            claim = heapq.heappop(self._claims)[2]
            self.evicted += len(claim.keys)
            self.withdraw(claim)
        while len(self) > target:
            self._evict_known(len(self) - target)

    def _evict_known(self, count: int) -> None:
        largest = max((keys for tiers in self._held.values() for keys in tiers.values()), key=len)
        oldest = list(islice(largest, count))
        for key in oldest:
            del largest[key]
        self._known -= len(oldest)
        self.evicted += len(oldest)


def keys64(chain: Sequence[bytes]) -> list[int]:
    """Return the 64-bit keys of whole digests, all of one length (a multiple of 8 bytes)."""
    if not chain:
        return []
    words = array("Q", b"".join(chain))
    if sys.byteorder == "little":
        words.byteswap()
    per_digest = len(chain[0]) // words.itemsize
    return words[per_digest - 1 :: per_digest].tolist()


def _run(held: Mapping[int, object], keys: Sequence[int], start: int) -> int:
    """Return how many keys from ``start`` on are held without a gap."""
    return len(list(takewhile(held.__contains__, islice(keys, start, None))))


def _joint_run(gpu: dict[int, int], believed: dict[int, Claim], keys: Sequence[int]) -> int:
    """Return how many leading keys are known or believed to be on the GPU."""
    end = 0
    while True:
        found = _run(gpu, keys, end) if gpu else 0
        if believed:
            found += _run(believed, keys, end + found)
        if not found:
            return end
        end += found


def _chunk_runs(
    lower: Sequence[tuple[Tier, dict[int, int]]], chunks: Sequence[int], start: int
) -> tuple[ChunkRun, ...]:
    """Return the runs of held chunks from ``start`` on, each in its fastest tier."""
    (fastest_tier, fastest), *slower = lower
    runs: list[ChunkRun] = []
    at = start
    while at < len(chunks):
        if chunks[at] in fastest:
            found = _run(fastest, chunks, at)
            runs.append(ChunkRun(fastest_tier, at, at + found))
            at += found
            continue
        tier = next((tier for tier, held in slower if chunks[at] in held), None)
        if tier is None:
            break
        at += 1
        if runs and runs[-1].tier is tier:
            runs[-1] = ChunkRun(tier, runs[-1].start, at)
        else:
            runs.append(ChunkRun(tier, at - 1, at))
    return tuple(runs)
