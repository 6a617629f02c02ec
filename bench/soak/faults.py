"""What happens to which replica, and when: from a seed. Pure."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

_K = TypeVar("_K")


class Kind(StrEnum):
    """What happens to a replica."""

    KILL = "kill"
    """SIGKILL; it is started again a while later."""
    HANG = "hang"
    """SIGSTOP; its connections stay and nothing comes over them. SIGCONT later."""
    SLOW = "slow"
    """Stopped for three quarters of the time."""
    RESTART = "restart"
    """SIGTERM, and started again at once."""


_LASTS_S: Final = {
    Kind.KILL: (3.0, 8.0),
    Kind.HANG: (5.0, 14.0),
    Kind.SLOW: (8.0, 14.0),
    Kind.RESTART: (0.0, 0.0),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One replica's trouble."""

    at_s: float
    """Since the soak began."""
    kind: Kind
    replica: int
    lasts_s: float
    """Without the time that a new process takes to start."""


def schedule(*, seed: int, duration_s: float, replicas: int, every_s: float) -> list[Fault]:
    """Return one fault every ``every_s``, each kind as often as the others.

    None begins before the first interval is over, or in the last one.
    """
    rng = random.Random(f"faults {seed}")
    return [
        Fault(
            at_s=at_s,
            kind=kind,
            replica=rng.randrange(replicas),
            lasts_s=rng.uniform(*_LASTS_S[kind]),
        )
        for at_s, kind in in_turn(rng, list(Kind), duration_s=duration_s, every_s=every_s)
    ]


def in_turn(
    rng: random.Random, kinds: Sequence[_K], *, duration_s: float, every_s: float
) -> Iterator[tuple[float, _K]]:
    """Yield when something begins, and of which kind: each as often as the others, mixed.

    None begins before the first interval is over, or in the last one.
    """
    left: list[_K] = []
    at_s = every_s
    while at_s + every_s <= duration_s:
        if not left:
            left = rng.sample(kinds, len(kinds))
        yield at_s, left.pop()
        at_s += every_s
