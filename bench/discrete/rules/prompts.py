"""Prompts as sequences of blocks that each stand for all before them: what two have in common."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence


class Prompts:
    """Some prompts, and how far another one goes along with any of them."""

    def __init__(self) -> None:
        self._prompts: dict[int, Sequence[int]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, number: int, blocks: Sequence[int]) -> None:
        """Take a prompt in."""
        self._prompts[number] = blocks

    def remove(self, number: int) -> None:
        """Take a prompt out."""
        del self._prompts[number]

    def shared(self, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks one of the prompts has, at most."""
        depth = 0
        for prompt in self._prompts.values():
            most = min(len(prompt), len(blocks))
            if depth < most and prompt[depth] == blocks[depth]:
                depth = _split(prompt, blocks, depth + 1, most)
        return depth


class Expectations:
    """Prompts that replicas are taken to hold for some seconds after they were sent them."""

    def __init__(self, replicas: int, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._prompts = [Prompts() for _ in range(replicas)]
        self._sent: deque[tuple[float, int, int]] = deque()
        self._number = 0

    def sent(self, replica: int, blocks: Sequence[int], now_s: float) -> None:
        """Expect a replica to hold a prompt."""
        self._number += 1
        self._prompts[replica].add(self._number, blocks)
        self._sent.append((now_s + self._ttl_s, replica, self._number))

    def depth(self, replica: int, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks a replica is taken to hold."""
        return self._prompts[replica].shared(blocks)

    def expire(self, now_s: float) -> None:
        """Forget what is too old."""
        while self._sent and self._sent[0][0] <= now_s:
            _, replica, number = self._sent.popleft()
            self._prompts[replica].remove(number)


class ActivePrompts:
    """The prompts in flight on a replica, and how many blocks they are, shared ones once."""

    def __init__(self) -> None:
        self.blocks = 0
        self._prompts = Prompts()

    def blocks_with(self, blocks: Sequence[int]) -> int:
        """Return how many blocks there would be with one more prompt."""
        return self.blocks + len(blocks) - self._prompts.shared(blocks)

    def add(self, number: int, blocks: Sequence[int]) -> None:
        """Take a prompt in."""
        self.blocks = self.blocks_with(blocks)
        self._prompts.add(number, blocks)

    def remove(self, number: int, blocks: Sequence[int]) -> None:
        """Take a prompt out, and the blocks that no other one has."""
        self._prompts.remove(number)
        self.blocks -= len(blocks) - self._prompts.shared(blocks)


def _split(one: Sequence[int], other: Sequence[int], shared: int, most: int) -> int:
    """Return where two prompts part, after `shared` blocks in common, up to `most`."""
    return bisect_left(range(most), True, lo=shared, key=lambda at: one[at] != other[at])
