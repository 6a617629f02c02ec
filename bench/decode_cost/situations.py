"""What there is beside the decodes: which work of an engine, where, how fast, on which cores.

Work inside vLLM's process has a twin outside of it: the same engine's code doing the same in a
process of its own on the same machine, as a cache daemon would, while the engine in vLLM's process
is idle. What a twin costs as well, moving the work out of vLLM's process does not save.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Final


class Work(StrEnum):
    """What an engine does all the time."""

    DISK = "promoting from disk"
    REMOTE = "promoting from Redis"
    SEND = "sending copies"
    RECEIVE = "receiving copies"


class Where(StrEnum):
    """In which process an engine works."""

    INSIDE = "inside vLLM"
    OUTSIDE = "outside"


class Pace(StrEnum):
    """How fast."""

    FULL = "full speed"
    MODERATE = "moderate"


MODERATE_BYTES_S: Final[Mapping[Work, float]] = {
    Work.DISK: 1e9,
    Work.REMOTE: 0.1e9,
    Work.SEND: 0.3e9,
    Work.RECEIVE: 0.08e9,
}
"""Half or less of what two cores allow beside the decodes: so both twins reach it."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One of them. ``work`` is None where no engine works."""

    has_engine: bool = True
    """Whether the vLLM that decodes has the engine inside, be it idle."""
    work: Work | None = None
    where: Where | None = None
    pace: Pace | None = None
    is_parted: bool = False
    """Whether the model's thread has a core of its own, and all that moves bytes the others."""

    def __str__(self) -> str:
        if not self.has_engine:
            words = ["vLLM without the engine"]
        elif self.work is None:
            words = ["engine idle"]
        else:
            words = [str(each) for each in (self.work, self.pace, self.where)]
        return ", ".join([*words, "cores apart"] if self.is_parted else words)

    @property
    def plain(self) -> "Situation":
        """VLLM without the engine, on the same cores."""
        return Situation(has_engine=False, is_parted=self.is_parted)

    @property
    def idle(self) -> "Situation":
        """With an engine that does nothing, on the same cores."""
        return Situation(is_parted=self.is_parted)

    @property
    def twin(self) -> "Situation | None":
        """The same work outside of vLLM's process; None but for work inside of it."""
        if self.where is not Where.INSIDE:
            return None
        return Situation(
            work=self.work, where=Where.OUTSIDE, pace=self.pace, is_parted=self.is_parted
        )


_PACED: Final = ((Pace.FULL, False), (Pace.MODERATE, False), (Pace.MODERATE, True))
"""And whether the cores are parted. At full speed all that moves bytes fills the core that is left
for it, and the model waits for threads that have the interpreter's lock and no core."""


def _groups() -> Iterator[tuple[Situation, ...]]:
    for is_parted in (False, True):
        idle = Situation(is_parted=is_parted)
        yield (idle.plain, idle)
    for (pace, is_parted), work in product(_PACED, Work):
        inside = Situation(work=work, where=Where.INSIDE, pace=pace, is_parted=is_parted)
        assert inside.twin is not None
        yield (inside, inside.twin)


GROUPS: Final = tuple(_groups())
"""Situations that are compared with each other stand next to each other in every round."""
SITUATIONS: Final = tuple(each for group in GROUPS for each in group)


def shuffled(order: random.Random) -> list[Situation]:
    """Return all in an order of their own, the situations of a group next to each other."""
    groups = order.sample(GROUPS, len(GROUPS))
    return [each for group in groups for each in order.sample(group, len(group))]
