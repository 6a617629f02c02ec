"""One chunk of the CPU pool: its slot, and how the chunk is used at the moment."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final


class State(Enum):
    """The life of an entry: filled from the GPU or from a tier, then ready."""

    STORING = auto()
    PROMOTING = auto()
    READY = auto()


Holder = str | None
"""The request or loan that a pin is for, whose `hold` ends it; None: only its deadline does."""


@dataclass(slots=True)
class Use:
    """How a chunk is used, beyond lying in the pool, ready.

    A ``condemned`` chunk was cleared while in use: no lookup finds it, and its
    slot is freed at the end of the last use.
    """

    state: State = State.READY
    holds: int = 0
    """Times held and not released."""
    putting: int = 0
    """Puts to lower tiers that are queued or reading the bytes."""
    leases: dict[Holder, float] = field(default_factory=dict)
    """Each holder's pin: until when, or while the entry is not ready, how long from when it is."""
    pinned_until_s: float | None = None
    """The last of them, of a ready entry."""
    due_s: float | None = None
    """The first of them, of a ready entry: when `CpuIndex.expired_pins` is to find it."""
    operator_pinned: bool = False
    """Pinned by an operator."""
    condemned: bool = False
    prefetched: bool = False
    """Promoted or copied here for a request, and not held since."""


UNUSED: Final = Use()  # shared by all: never written to


class Entry:
    """One chunk in the pool, without a `Use` while it is unused: there are millions."""

    __slots__ = ("key", "slot", "use")

    def __init__(self, key: bytes, slot: int, state: State) -> None:
        self.key = key
        self.slot = slot
        self.use: Use | None = Use(state)

    @property
    def state(self) -> State:
        """Whether the bytes are whole, and if not, where they come from."""
        return self.seen.state

    @property
    def seen(self) -> Use:
        """The use, to read only."""
        return self.use or UNUSED

    @property
    def in_use(self) -> Use:
        """The use, to change; `CpuIndex.tidy` after something has ended."""
        if self.use is None:
            self.use = Use()
        return self.use

    @property
    def condemned(self) -> bool:
        """Whether it was cleared."""
        return self.seen.condemned

    @property
    def is_usable(self) -> bool:
        """Whether the bytes are whole and may be found."""
        # Read once: statistics are counted without the lock, and a use may end between two reads.
        use = self.seen
        return use.state is State.READY and not use.condemned

    @property
    def is_busy(self) -> bool:
        """Whether the bytes are read, or about to be."""
        use = self.seen
        return use.holds > 0 or use.putting > 0

    def is_pinned(self, now_s: float) -> bool:
        """Whether a pin keeps the entry at that time."""
        use = self.seen
        return use.operator_pinned or (
            use.pinned_until_s is not None and use.pinned_until_s > now_s
        )

    def is_idle(self, now_s: float) -> bool:
        """Whether the entry may be evicted at that time."""
        return self.use is None or not (self.is_busy or self.is_pinned(now_s))

    def __repr__(self) -> str:
        return f"<Entry {self.key.hex()[:8]} slot={self.slot} {self.state} {self.use}>"


def count_held(entries: Iterable[Entry], now_s: float) -> int:
    """Count the entries that cannot be evicted at that time: not ready, in use or pinned.

    Others may change them meanwhile: each counts as it was at some moment.
    """
    return sum(
        not (entry.is_usable and entry.is_idle(now_s)) for entry in entries if entry.use is not None
    )


def check_entry(entry: Entry) -> None:
    """Raise AssertionError if the entry contradicts itself."""
    assert Use() == UNUSED, "written to what all share"
    use = entry.seen
    assert use.holds >= 0 and use.putting >= 0
    if not entry.is_usable:
        assert use.pinned_until_s is None, "a pin on what cannot be used"
    if entry.state is not State.READY:
        assert not entry.is_busy, "unfinished bytes in use"
        return
    assert use.pinned_until_s == max(use.leases.values(), default=None), "a pin that never ends"
    if entry.condemned:
        assert entry.is_busy, "condemned, unused and still here"
