"""Whether a replica takes requests, and what changes that."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class State(StrEnum):
    """Whether a replica takes requests."""

    UNKNOWN = "unknown"
    """Not asked yet: used only when no replica is known to be up."""
    UP = "up"
    DOWN = "down"
    DRAINING = "draining"
    """Finishes what it has and gets nothing new."""
    REMOVED = "removed"
    """No part of the fleet any more; requests that were under way there go on to their ends."""


class Signal(StrEnum):
    """What can change a replica's state."""

    ANSWERED = "answered"
    FAILED = "failed"
    DRAIN = "drain"
    RESUME = "resume"
    REMOVE = "remove"


TRANSITIONS: Final[Mapping[tuple[State, Signal], State]] = MappingProxyType(
    {
        (State.UNKNOWN, Signal.ANSWERED): State.UP,
        (State.UNKNOWN, Signal.FAILED): State.DOWN,
        (State.UNKNOWN, Signal.DRAIN): State.DRAINING,
        (State.UP, Signal.FAILED): State.DOWN,
        (State.UP, Signal.DRAIN): State.DRAINING,
        (State.DOWN, Signal.ANSWERED): State.UP,
        (State.DOWN, Signal.DRAIN): State.DRAINING,
        # A draining replica stays so, whether it answers or not, until resumed.
        (State.DRAINING, Signal.RESUME): State.UNKNOWN,
        **{(each, Signal.REMOVE): State.REMOVED for each in State},
    }
)
"""The next state; a pair that is not here changes nothing."""
