"""What the controller has been asked to do, by event id: the latest, so that memory is bounded."""

import uuid
from dataclasses import dataclass
from typing import Final

from cacheengine.wire import MoveStatus
from router.controller.registry import Instance

MAX_EVENTS: Final = 1000


@dataclass(kw_only=True)
class Move:
    """A move: which agent to ask about it."""

    destination: Instance
    agent_event_id: str
    chunk_tokens: int
    final: MoveStatus | None = None
    """How it ended, once that is known: its agent may forget it."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that was asked; without a ``move`` it was done when it was answered."""

    num_tokens: int
    move: Move | None = None


class Events:
    """The latest ``max_events`` events, by id."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._max_events = max_events
        self._events: dict[str, Event] = {}

    def add(self, event_id: str, event: Event) -> None:
        """Remember an event, and forget the oldest if there are too many."""
        self._events[event_id] = event
        while len(self._events) > self._max_events:
            del self._events[next(iter(self._events))]

    def get(self, event_id: str) -> Event | None:
        """Return an event, None if it is unknown or forgotten."""
        return self._events.get(event_id)


def new_event_id(kind: str) -> str:
    """Return an id that begins with what was asked, as LMCache's do."""
    return f"{kind}{uuid.uuid4()}"
