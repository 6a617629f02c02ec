"""A tree of the prompts that were sent to each replica, cut least recently used first.

The prompts that a replica was sent are a tree of blocks with it, since a block stands for
all before it: of a prompt, a replica has the first blocks and no later ones. So a longest
match is found by bisection, and only the tree's ends and forks need be known.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Part:
    """The part of the tree that one replica has."""

    blocks: int = 0
    ends: OrderedDict[int, Sequence[int]] = field(default_factory=OrderedDict)
    """Last blocks of the longest prompts, with all of their blocks; least recent first."""
    forks: dict[int, int] = field(default_factory=dict)
    """Blocks that more than one go on from, with how many more."""


class PrefixTree:
    """Which replicas were sent which blocks."""

    def __init__(self, replicas: int, max_blocks: int) -> None:
        """Bound each replica's part to so many blocks, as of each `cut`."""
        self._max_blocks = max_blocks
        self._parts = [_Part() for _ in range(replicas)]
        self._holders: dict[int, int] = {}
        self._first: dict[int, int] = {}
        """Of blocks that more than one replica was sent: which was the first."""

    def depth(self, blocks: Sequence[int], replica: int | None = None) -> int:
        """Return how many of a prompt's blocks a replica was sent before, or any at all."""
        bits, holders = -1 if replica is None else 1 << replica, self._holders
        return bisect_left(blocks, True, key=lambda block: not holders.get(block, 0) & bits)

    def first_sent(self, block: int) -> int:
        """Return the replica that was sent a block first, and still has it, or another with it."""
        if block in self._first:
            return self._first[block]
        return _lowest(self._holders[block])

    def insert(self, blocks: Sequence[int], replica: int) -> None:
        """Note that a replica is sent a prompt."""
        if not blocks:
            return
        depth, part = self.depth(blocks, replica), self._parts[replica]
        for block in blocks[depth:]:
            self._add(block, replica)
        part.blocks += len(blocks) - depth
        if depth < len(blocks):
            self._go_on(part, blocks, depth)
        elif blocks[-1] in part.ends:
            part.ends.move_to_end(blocks[-1])

    def cut(self) -> None:
        """Take the least recent ends from each part that is over its bound."""
        for replica, part in enumerate(self._parts):
            while part.blocks > self._max_blocks:
                self._cut_end(part, replica)

    def _add(self, block: int, replica: int) -> None:
        before = self._holders.get(block, 0)
        if before and block not in self._first:
            self._first[block] = _lowest(before)
        self._holders[block] = before | 1 << replica

    @staticmethod
    def _go_on(part: _Part, blocks: Sequence[int], depth: int) -> None:
        """Note where a prompt with new blocks leaves those that the part had before."""
        part.ends[blocks[-1]] = blocks
        if depth and part.ends.pop(blocks[depth - 1], None) is None:
            part.forks[blocks[depth - 1]] = part.forks.get(blocks[depth - 1], 0) + 1

    def _cut_end(self, part: _Part, replica: int) -> None:
        _, blocks = part.ends.popitem(last=False)
        for at in range(len(blocks) - 1, -1, -1):
            if part.blocks <= self._max_blocks:
                # What is left of the prompt is as old as all of it was.
                part.ends[blocks[at]] = blocks[: at + 1]
                part.ends.move_to_end(blocks[at], last=False)
                return
            self._remove(blocks[at], replica)
            part.blocks -= 1
            if at and self._close_fork(part, blocks[at - 1]):
                return

    @staticmethod
    def _close_fork(part: _Part, block: int) -> bool:
        """Take one of the ways on from a block; return whether another is left."""
        more = part.forks.pop(block, 0)
        if more > 1:
            part.forks[block] = more - 1
        return more > 0

    def _remove(self, block: int, replica: int) -> None:
        left = self._holders[block] & ~(1 << replica)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
        if self._first.get(block) == replica or left & (left - 1) == 0:
            self._first.pop(block, None)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
