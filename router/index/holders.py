"""Which replicas hold each key, and how deep each of them holds a prompt: one walk for all.

Each key has an integer with the bits of its holders' slots (`Replica.slot`). A step of the walk
costs a dictionary lookup and, where the holders change, an ``&``. Keys noted together share one
integer, which saves memory, and the walk passes over them by identity. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import compress, count
from operator import itemgetter, or_
from typing import Final, NamedTuple, TypeAlias

_DIGIT_VALUES: Final = bytes.maketrans(b"01", b"\0\1")
_BITS_PER_SLOT: Final = 16
"""Taking one slot out of a set costs as much as looking at this many bits."""

_PARTS: Final = 256
_PART_SHIFT: Final = 56

_PAIRS_PER_REPLICA: Final = 4
"""Comparing two ends costs about a quarter of looking up a replica by its bit."""


class Depth(NamedTuple):
    """Replicas that match a prompt equally deep."""

    replicas: int
    """The bits of their slots; see `slots`."""
    gpu_blocks: int
    """How many blocks from the first on are on the GPU."""
    blocks: int
    """How many are in any tier, without a gap."""


# Replicas, and after how many blocks of a prompt what they hold of it ends.
# Plain tuples here: a named one costs 0.3 us, and there may be a thousand.
_End: TypeAlias = tuple[int, int]


class Holders:
    """The replicas that hold each key; a key that none holds takes no room.

    The keys are in `_PARTS` dictionaries by their first bits: a dictionary that grows is copied
    as a whole, which takes 0.3 s for four million keys.
    """

    def __init__(self) -> None:
        self._parts: list[dict[int, int]] = [{} for _ in range(_PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __bool__(self) -> bool:
        return any(self._parts)

    def __repr__(self) -> str:
        return f"<Holders of {len(self)} keys>"

    def add(self, replica: int, keys: Iterable[int]) -> None:
        """Note that a replica holds keys, whether or not that was known."""
        bit = 1 << replica
        parts = self._parts
        before = after = bit
        for key in keys:
            masks = parts[key >> _PART_SHIFT]
            mask = masks.setdefault(key, bit)
            if mask is bit:
                continue
            if mask is not before:
                before, after = mask, mask if mask & bit else mask | bit
            if after is not mask:
                masks[key] = after

    def discard(self, replica: int, keys: Iterable[int]) -> None:
        """Note that a replica does not hold keys, whether or not it was known to."""
        bit = 1 << replica
        parts = self._parts
        before = after = 0
        for key in keys:
            masks = parts[key >> _PART_SHIFT]
            mask = masks.get(key, 0)
            if mask is not before:
                before, after = mask, mask ^ bit if mask & bit else mask
            if after is not mask:
                if after:
                    masks[key] = after
                else:
                    del masks[key]

    def at(self, key: int) -> int:
        """Return the bits of one key's holders."""
        return self._parts[key >> _PART_SHIFT].get(key, 0)

    def of(self, keys: Iterable[int]) -> Iterator[int]:
        """Return the bits of each key's holders."""
        parts = self._parts
        return (parts[key >> _PART_SHIFT].get(key, 0) for key in keys)

    def check(self, expected: Mapping[int, int], stale: int) -> None:
        """Raise AssertionError if these are not the holders, apart from ``stale`` replicas."""
        found = {key: mask for masks in self._parts for key, mask in masks.items()}
        assert len(found) == len(self) and all(found.values()), "a key without holders is kept"
        for key in expected.keys() | found:
            wanted, has = expected.get(key, 0), found.get(key, 0)
            assert wanted | has & stale == has, (key, wanted, has, stale)


def slots(replicas: int) -> list[int]:
    """Return the slots whose bits are set, lowest first."""
    if replicas.bit_count() * _BITS_PER_SLOT > replicas.bit_length():
        digits = f"{replicas:b}".encode().translate(_DIGIT_VALUES)
        return list(compress(count(), reversed(digits)))
    found: list[int] = []
    while replicas:
        lowest = replicas & -replicas
        found.append(lowest.bit_length() - 1)
        replicas ^= lowest
    return found


def find_depths(
    gpu: Holders,
    lower: Holders,
    keys: Sequence[int],
    blocks_per_chunk: int,
    among: int,
    *,
    chunks: Sequence[int],
    mounts: Mapping[int, int],
) -> list[Depth]:
    """Return those ``among`` the replicas that hold the beginning of a prompt, deepest first.

    ``keys`` are those of its blocks, ``chunks`` of its chunks. The GPU's blocks lead, and the lower
    tiers continue from the chunk that holds their end. ``mounts`` has the replicas that read a
    shared store, by the store's slot: what it holds they hold.
    """
    on_gpu = _gpu_ends(gpu, keys, among)
    beyond = _lower_ends(lower, chunks, blocks_per_chunk, on_gpu, mounts) if lower else []
    gone_on = reduce(or_, (replicas for replicas, _ in beyond), 0)
    found = [
        Depth(stayed, blocks, blocks)
        for replicas, blocks in reversed(on_gpu)
        if blocks and (stayed := replicas & ~gone_on)
    ]
    if beyond:
        found += _split(beyond, on_gpu, gone_on)
        found.sort(key=itemgetter(2, 1), reverse=True)
    return found


def _gpu_ends(gpu: Holders, keys: Sequence[int], among: int) -> list[_End]:
    """Return replicas with how many blocks they hold on the GPU, from none to all."""
    ends: list[_End] = []
    alive, last = among, -1
    if not among:
        return ends
    for at, holders in enumerate(gpu.of(keys)):
        if holders is last:
            continue
        last = holders
        left = alive & holders
        if left != alive:
            ends.append((alive ^ left, at))
            alive = left
            if not left:
                return ends
    ends.append((alive, len(keys)))
    return ends


def _lower_ends(
    lower: Holders,
    chunks: Sequence[int],
    blocks_per_chunk: int,
    on_gpu: Sequence[_End],
    mounts: Mapping[int, int],
) -> list[_End]:
    """Return the replicas that lower tiers take beyond their GPU, with how many blocks."""
    joining: dict[int, int] = {}
    for replicas, blocks in on_gpu:
        if (chunk := blocks // blocks_per_chunk) < len(chunks):
            joining[chunk] = joining.get(chunk, 0) | replicas
    if not joining:
        return []
    first, last_joining = min(joining), max(joining)
    stores = reduce(or_, (1 << store for store in mounts), 0)
    ends: list[_End] = []
    alive, last = 0, -1
    for at, holders in enumerate(lower.of(chunks[first:]), first):
        if holders is last and at not in joining:
            continue
        last = holders
        reading = (mounts[store] for store in slots(holders & stores))
        left = (alive | joining.get(at, 0)) & reduce(or_, reading, holders)
        if ended := alive & ~left:
            ends.append((ended, at * blocks_per_chunk))
        alive = left
        if not left and at >= last_joining:
            return ends
    if alive:
        ends.append((alive, len(chunks) * blocks_per_chunk))
    return ends


def _split(beyond: Sequence[_End], on_gpu: Sequence[_End], gone_on: int) -> list[Depth]:
    """Return the replicas that end equally, split by where their GPU ends."""
    if len(beyond) * len(on_gpu) <= _PAIRS_PER_REPLICA * gone_on.bit_count():
        return [
            Depth(both, gpu_blocks, blocks)
            for replicas, blocks in beyond
            for others, gpu_blocks in on_gpu
            if (both := replicas & others)
        ]
    gpu_blocks_of = {
        slot: blocks for replicas, blocks in on_gpu for slot in slots(replicas & gone_on)
    }
    parts: dict[tuple[int, int], int] = {}
    for replicas, blocks in beyond:
        for slot in slots(replicas):
            part = (gpu_blocks_of[slot], blocks)
            parts[part] = parts.get(part, 0) | 1 << slot
    return [Depth(replicas, *part) for part, replicas in parts.items()]
