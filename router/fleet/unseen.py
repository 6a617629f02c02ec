"""First tokens that the router does not see: those of answers that are not streamed.

The headers of such an answer come with its last token. Its request counts as waiting, and
what it has to load as loading, only until one of these ends its prefill, whichever comes
first: the replica's KV event for the prompt's last block, the answer itself, or the time
that was predicted. Without that, seconds of decoding look like a prefill that never ends.

Pure: no clock, no I/O.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A prefill whose end is not seen."""

    last_block: int | None
    """Key of the prompt's last whole block; None where no event can tell of it."""
    due_s: Callable[[], float]
    """When it will be over, as predicted now."""
    ended: Callable[[], None]
    """Called when it is taken to be over."""


class Unseen:
    """The prefills of one fleet's answers that are not streamed."""

    def __init__(self) -> None:
        self._by_slot: dict[int, dict[int, Prefill]] = {}
        self._due: list[tuple[float, int, int]] = []
        self._last = 0

    @property
    def next_s(self) -> float:
        """When `pass_time` may end a prefill, infinite while there is none; never too late."""
        return self._due[0][0] if self._due else inf

    def add(self, slot: int, prefill: Prefill) -> int:
        """Wait for the end of a prefill at a replica; return the number to `remove` it by."""
        self._last += 1
        self._by_slot.setdefault(slot, {})[self._last] = prefill
        heapq.heappush(self._due, (prefill.due_s(), slot, self._last))
        return self._last

    def remove(self, slot: int, number: int) -> None:
        """Forget a prefill: its end is known; nothing if it was taken to be over already."""
        self._by_slot[slot].pop(number, None)

    def pass_time(self, now_s: float) -> None:
        """End the prefills that should be over by now."""
        while self._due and self._due[0][0] <= now_s:
            _, slot, number = heapq.heappop(self._due)
            prefill = self._by_slot[slot].get(number)
            if prefill is None:
                continue
            due_s = prefill.due_s()
            if due_s > now_s:  # what was before it took longer than predicted
                heapq.heappush(self._due, (due_s, slot, number))
            else:
                self._end(slot, number)

    def stored(self, slot: int, keys: Iterable[int]) -> None:
        """End the prefills of which the last block is now on a replica's GPU."""
        if not (prefills := self._by_slot.get(slot)):
            return
        stored = frozenset(keys)
        for number in [n for n, each in prefills.items() if each.last_block in stored]:
            self._end(slot, number)

    def _end(self, slot: int, number: int) -> None:
        self._by_slot[slot].pop(number).ended()

    def __repr__(self) -> str:
        return f"<Unseen {sum(map(len, self._by_slot.values()))} until {self.next_s:.3f}>"
