"""The words in which the engine's decisions are told."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from cacheengine.residency.promotion import Outcome, Promotion


class Presence(Enum):
    """Where a chunk is, as far as it can be used from there."""

    MISS = auto()
    PENDING = auto()
    """Being stored or promoted into the pool."""
    CPU = auto()
    """Ready in the pool."""
    DISK = auto()
    """Below the pool: a promotion is needed."""
    REMOTE = auto()
    """Known to be held by the remote tier, and by none nearer: a promotion is needed."""
    UNKNOWN = auto()
    """The remote tier is being asked for it: look again."""


@dataclass(frozen=True, slots=True)
class StoreReservation:
    """Room for chunks to be written: ``slots[i]`` of the pool for ``keys[i]``."""

    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    evicted: tuple[bytes, ...]
    """What left the pool to make the room."""


@dataclass(slots=True)
class Todo:
    """What is to be done outside the lock; the tiers' parts by tier."""

    gets: Counter[str] = field(default_factory=Counter)
    """How many reads were queued (`Promotions.take`)."""
    puts: Counter[str] = field(default_factory=Counter)
    """How many puts were queued (`Puts.begin`)."""
    deletes: dict[str, list[bytes]] = field(default_factory=dict)
    """Chunks to delete; then `Puts.deleted`."""
    asks: bool = False
    """There are questions to the remote tier (`Promotions.take_questions`)."""
    settled: list[tuple[Promotion, Outcome, int]] = field(default_factory=list)
    has_news: bool = False
    """Events were logged."""
