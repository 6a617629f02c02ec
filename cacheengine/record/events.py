"""What the tiers gained and lost, for agents' callers and vLLM's stream.

Pure bookkeeping; the caller serializes calls.
"""

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final

from cacheengine import wire
from cacheengine.keys import key64

DEFAULT_HISTORY: Final = 65_536


@dataclass(frozen=True, slots=True)
class KeyEventRecord:
    """Chunks that a tier gained (``stored``) or lost, in whole digests."""

    tier: str
    stored: bool
    keys: tuple[bytes, ...]


class EventLog:
    """The last ``history`` events, numbered from 1, and a queue of those not taken yet."""

    def __init__(self, history: int = DEFAULT_HISTORY) -> None:
        self._history: deque[KeyEventRecord] = deque(maxlen=history)
        self._untaken: deque[KeyEventRecord] = deque(maxlen=history)
        self.last_seq = 0
        self.untaken_dropped = 0
        """Events that left the queue before `take`."""

    def append(self, tier: str, *, stored: bool, keys: tuple[bytes, ...]) -> None:
        """Note an event; none if there are no keys."""
        if not keys:
            return
        record = KeyEventRecord(tier, stored, keys)
        if len(self._untaken) == self._untaken.maxlen:
            self.untaken_dropped += 1
        self._untaken.append(record)
        self._history.append(record)
        self.last_seq += 1

    def take(self) -> list[KeyEventRecord]:
        """Return the events since the last call, the oldest lost if they were too many."""
        taken = list(self._untaken)
        self._untaken.clear()
        return taken

    def after(self, seq: int) -> list[KeyEventRecord] | None:
        """Return the events after number ``seq``; None when some of them are gone."""
        first = self.last_seq - len(self._history) + 1
        if not first - 1 <= seq <= self.last_seq:
            return None
        return list(islice(self._history, seq - first + 1, None))


def to_wire(record: KeyEventRecord) -> wire.KeyEvent:
    """Return an event with its keys packed."""
    packed = wire.pack_keys(key64(key) for key in record.keys)
    return wire.KeyEvent(tier=record.tier, stored=record.stored, keys=packed)
