"""The phases of a request in flight, and what moves it from one to the next.

First tokens of answers that are not streamed are not seen: the headers of such an answer come
with its last token. Its request is prefilling only until one of these ends that, whichever
comes first: the replica's KV event for the prompt's last block, the answer itself, or the time
that was predicted. Without that, seconds of decoding look like a prefill that never ends.

Pure: no clock, no I/O.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Phase(StrEnum):
    """Where a request in flight is."""

    FETCHING = "fetching"
    """Its KV is being brought to the replica's CPU RAM; it has not been sent."""
    PREFILLING = "prefilling"
    """Sent: in the replica's queue, or computed there."""
    DECODING = "decoding"
    """Its first token has come, or is taken to have."""
    ENDED = "ended"


class Event(StrEnum):
    """What moves a request on."""

    SENT = "sent"
    FIRST_TOKEN = "first token"
    """Seen, since it was streamed; or the answer's last."""
    PROMPT_STORED = "prompt stored"
    """A KV event: the prompt's last block is on the GPU."""
    DUE = "due"
    """Nothing told; the first token should have come by the prediction."""
    END = "end"


NEXT: Final[Mapping[tuple[Phase, Event], Phase]] = MappingProxyType(
    {
        (Phase.FETCHING, Event.SENT): Phase.PREFILLING,
        (Phase.FETCHING, Event.FIRST_TOKEN): Phase.DECODING,
        (Phase.PREFILLING, Event.FIRST_TOKEN): Phase.DECODING,
        (Phase.PREFILLING, Event.PROMPT_STORED): Phase.DECODING,
        (Phase.PREFILLING, Event.DUE): Phase.DECODING,
        (Phase.FETCHING, Event.END): Phase.ENDED,
        (Phase.PREFILLING, Event.END): Phase.ENDED,
        (Phase.DECODING, Event.END): Phase.ENDED,
    }
)
"""The next phase; a pair that is not here changes nothing."""

WAITING: Final = frozenset({Phase.FETCHING, Phase.PREFILLING})
"""Phases before the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A prefill whose end is not seen."""

    last_block: int | None
    """Key of the prompt's last whole block; None where no event can tell of it."""
    due_s: Callable[[float], float]
    """When it will be over, as predicted at a time."""
    ended: Callable[[Event, float], None]
    """Called, with the time, when it is taken to be over."""


class Unseen:
    """The prefills of one fleet's answers that are not streamed."""

    def __init__(self) -> None:
        self._by_slot: dict[int, dict[int, Prefill]] = {}
        self._due: list[tuple[float, int, int]] = []
        self._last = 0

    def add(self, slot: int, prefill: Prefill, now_s: float) -> int:
        """Wait for the end of a prefill at a replica; return the number to `remove` it by."""
        self._last += 1
        self._by_slot.setdefault(slot, {})[self._last] = prefill
        heapq.heappush(self._due, (prefill.due_s(now_s), slot, self._last))
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
            due_s = prefill.due_s(now_s)
            if due_s > now_s:  # what was before it took longer than predicted
                heapq.heappush(self._due, (due_s, slot, number))
            else:
                self._end(slot, number, Event.DUE, now_s)

    def stored(self, slot: int, keys: Iterable[int], now_s: float) -> None:
        """End the prefills of which the last block is now on a replica's GPU."""
        if not (prefills := self._by_slot.get(slot)):
            return
        stored = frozenset(keys)
        for number in [n for n, each in prefills.items() if each.last_block in stored]:
            self._end(slot, number, Event.PROMPT_STORED, now_s)

    def _end(self, slot: int, number: int, sign: Event, now_s: float) -> None:
        self._by_slot[slot].pop(number).ended(sign, now_s)

    def __repr__(self) -> str:
        return f"<Unseen {sum(map(len, self._by_slot.values()))}>"
