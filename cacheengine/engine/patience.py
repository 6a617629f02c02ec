"""How long one request waits for chunks on their way into the pool. Pure."""

from dataclasses import dataclass
from typing import Final

_LEAST_QUIET_S: Final = 0.25
"""A small model computes a prompt sooner than a busy disk answers: that is no sign of trouble."""
_MOST_QUIET_S: Final = 5.0
"""Without a read's end for so long a tier is stuck, however long the prompt would compute."""
_LONGEST_S: Final = 60.0


@dataclass(slots=True)
class Patience:
    """A wait that is worth it as long as the tiers go on reading.

    A request whose chunks are queued behind others' waits longer than it would compute, and
    rightly so: computing them would make all behind it wait. Only tiers that stand still for as
    long as computing would take are not waited for.
    """

    began_s: float
    reads_ended: int
    moved_s: float

    def is_over(
        self, now_s: float, *, reads_ended: int, compute_s: float, for_room: bool = False
    ) -> bool:
        """Whether the request should compute what has not come by now.

        ``reads_ended`` is how many reads its tiers have answered so far; ``compute_s`` what
        computing would take. A request that waits ``for_room`` waits for others' loads instead.
        """
        if for_room or reads_ended != self.reads_ended:
            self.reads_ended = reads_ended
            self.moved_s = now_s
        quiet_s = min(max(compute_s, _LEAST_QUIET_S), _MOST_QUIET_S)
        return now_s - self.moved_s >= quiet_s or now_s - self.began_s >= _LONGEST_S
