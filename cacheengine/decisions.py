"""The words in which the engine's decisions are told."""

from dataclasses import dataclass, field
from enum import Enum, auto

from cacheengine.index import Entry
from cacheengine.promotion import Outcome, Promotion


class Presence(Enum):
    """Where a chunk is, as far as it can be used from there."""

    MISS = auto()
    PENDING = auto()
    """Being stored or promoted into the pool."""
    CPU = auto()
    """Ready in the pool."""
    DISK = auto()
    """Below the pool: a promotion is needed."""


@dataclass(frozen=True, slots=True)
class StoreReservation:
    """Room for chunks to be written: ``slots[i]`` of the pool for ``keys[i]``."""

    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    evicted: tuple[bytes, ...]
    """What left the pool to make the room."""


@dataclass(slots=True)
class Todo:
    """What is to be done outside the lock."""

    puts: list[Entry] = field(default_factory=list)
    gets: list[Entry] = field(default_factory=list)
    deletes: list[bytes] = field(default_factory=list)
    """Chunks of the lower tier to delete; then `Residency.deleted`."""
    settled: list[tuple[Promotion, Outcome, int]] = field(default_factory=list)
    has_news: bool = False
    """Events were logged."""
