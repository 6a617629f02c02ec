"""What happens to which engine, its disk or the store, and when: from a seed. Pure."""

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bench.soak.faults import in_turn


class Kind(StrEnum):
    """What happens."""

    KILL = "engine killed"
    """SIGKILL; started again a while later, on the same disk."""
    HANG = "engine hangs"
    """SIGSTOP, while others copy from it; SIGCONT later."""
    STORE_KILL = "store killed"
    """The Redis server gets SIGKILL; it is started again, empty."""
    STORE_HANG = "store hangs"
    """SIGSTOP: connections stay and nothing comes over them. SIGCONT later."""
    STORE_FLAPS = "store flaps"
    """Stopped and let go on again, several times a second."""
    DISK_FULL = "disk full"
    """Nothing more can be written to the first engine's file system."""
    DISK_BITS = "bits flipped on disk"
    """In files of chunks; some files are cut short."""
    STORE_BITS = "bits flipped in the store"


_LASTS_S: Final = {
    Kind.KILL: (1.0, 4.0),
    Kind.HANG: (1.0, 4.0),
    Kind.STORE_KILL: (1.0, 4.0),
    Kind.STORE_HANG: (2.0, 6.0),
    Kind.STORE_FLAPS: (3.0, 6.0),
    Kind.DISK_FULL: (3.0, 7.0),
    Kind.DISK_BITS: (0.0, 0.0),
    Kind.STORE_BITS: (0.0, 0.0),
}
_NEVER_FIRST: Final = (Kind.KILL,)
"""What does not befall the first engine, whose memory is watched from beginning to end, and
whose small file system ends with its process."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One thing that happens."""

    at_s: float
    """Since the stress began."""
    kind: Kind
    engine: int
    """Of troubles of the store: without a meaning."""
    lasts_s: float
    """Without the time that a new process takes to start."""


def schedule(*, seed: int, duration_s: float, engines: int, every_s: float) -> list[Trouble]:
    """Return one trouble every ``every_s``, each kind as often as the others.

    None begins before the first interval is over, or in the last one.
    """
    rng = random.Random(f"troubles {seed}")
    found: list[Trouble] = []
    for at_s, kind in in_turn(rng, list(Kind), duration_s=duration_s, every_s=every_s):
        first = 1 if kind in _NEVER_FIRST else 0
        found.append(
            Trouble(
                at_s=at_s,
                kind=kind,
                engine=0 if kind is Kind.DISK_FULL else rng.randrange(first, engines),
                lasts_s=rng.uniform(*_LASTS_S[kind]),
            )
        )
    return found
