"""Which replica holds which block in which tier, by its KV events."""

from collections.abc import Sequence

from bench.discrete.rules.in_flight import CountingRule
from router.index.prompt_keys import Tier

Runs = Sequence[tuple[int, int]]
"""A prompt's blocks by holders: (tiers of replicas as bits, end of the run in blocks)."""


class KvIndex:
    """Blocks with the tiers that hold them, as bits; bounded by what the replicas hold."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._shifts = {tier: at * replicas for at, tier in enumerate(Tier)}
        self._held: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def bits(self, replica: int, *tiers: Tier) -> int:
        """Return the bits of a replica's tiers."""
        return sum(1 << (self._shifts[tier] + replica) for tier in tiers)

    def stored(self, replica: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Note that a tier holds blocks."""
        bit, held = self.bits(replica, tier), self._held
        for block in blocks:
            held[block] = held.get(block, 0) | bit

    def removed(self, replica: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Note that a tier does not hold blocks any more."""
        keep, held = ~self.bits(replica, tier), self._held
        for block in blocks:
            if left := held.get(block, 0) & keep:
                held[block] = left
            else:
                held.pop(block, None)

    def cleared(self, replica: int) -> None:
        """Note that a replica holds nothing in any tier."""
        keep = ~self.bits(replica, *self._shifts)
        self._held = {block: mask & keep for block, mask in self._held.items() if mask & keep}

    def runs(self, blocks: Sequence[int], at_least: int = 0) -> Runs:
        """Return a prompt's blocks by their holders, up to the first that nobody holds.

        Among the first `at_least` blocks, such a one does not end them.
        """
        runs: list[tuple[int, int]] = []
        last = -1
        for at, block in enumerate(blocks):
            mask = self._held.get(block, 0)
            if mask != last and at:
                runs.append((last, at))
            if not mask and at >= at_least:
                return runs
            last = mask
        if blocks:
            runs.append((last, len(blocks)))
        return runs


def reach(runs: Runs, bit: int, start: int = 0) -> int:
    """Return the end of an unbroken run, in blocks, of blocks with a bit from `start` on."""
    at = start
    for mask, end in runs:
        if end > start:
            if not mask & bit:
                break
            at = end
    return at


class KvInformedRule(CountingRule):
    """What rules have in common that take KV events of all tiers."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.index = KvIndex(replicas)

    def stored(self, replica: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Note that a tier holds blocks."""
        self.index.stored(replica, tier, blocks)

    def removed(self, replica: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Note that a tier does not hold blocks any more."""
        self.index.removed(replica, tier, blocks)

    def cleared(self, replica: int) -> None:
        """Note that a replica holds nothing."""
        self.index.cleared(replica)
