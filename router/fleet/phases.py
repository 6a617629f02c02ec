"""The phases of a request in flight, and what moves it from one to the next. Pure values."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Phase(StrEnum):
    """Where a request in flight is."""

    FETCHING = "fetching"
    """Its KV is being brought to the replica's CPU RAM; it has not been sent."""
    PREFILLING = "prefilling"
    """Sent: in the replica's queue, or computed there."""
    DECODING = "decoding"
    """Its first token has come, or is taken to have."""
    ENDED = "ended"


class Event(StrEnum):
    """What moves a request on."""

    SENT = "sent"
    FIRST_TOKEN = "first token"
    """Seen, since it was streamed; or the answer's last."""
    PROMPT_STORED = "prompt stored"
    """A KV event: the prompt's last block is on the GPU."""
    DUE = "due"
    """Nothing told; the first token should have come by the prediction."""
    END = "end"


NEXT: Final[Mapping[tuple[Phase, Event], Phase]] = MappingProxyType(
    {
        (Phase.FETCHING, Event.SENT): Phase.PREFILLING,
        (Phase.FETCHING, Event.FIRST_TOKEN): Phase.DECODING,
        (Phase.PREFILLING, Event.FIRST_TOKEN): Phase.DECODING,
        (Phase.PREFILLING, Event.PROMPT_STORED): Phase.DECODING,
        (Phase.PREFILLING, Event.DUE): Phase.DECODING,
        (Phase.FETCHING, Event.END): Phase.ENDED,
        (Phase.PREFILLING, Event.END): Phase.ENDED,
        (Phase.DECODING, Event.END): Phase.ENDED,
    }
)
"""The next phase; a pair that is not here changes nothing."""

WAITING: Final = frozenset({Phase.FETCHING, Phase.PREFILLING})
"""Phases before the first token."""
