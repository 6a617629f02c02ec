"""What the load generator is told and what it says: a line of JSON each way."""

from typing import Final

import msgspec

from bench.overhead.case import AnswerForm

GO: Final = "go\n"
"""Told when it is ready and should begin."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to send; told first."""

    urls: tuple[str, ...]
    """Where to, in turns."""
    bodies: str
    """The file of them."""
    answer: AnswerForm
    tokens: int
    """Of an answer."""
    rate_per_s: float | None
    connections: int
    """Requests under way at once, where there is no rate."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it went. Times in seconds."""

    first_s: tuple[float, ...]
    """From sending a request to the first byte of its answer's body, without failed ones."""
    whole_s: tuple[float, ...]
    """To its last byte."""
    errors: int
    first_error: str | None
    elapsed_s: float
    cpu_s: float
    """Of the load generator itself."""
    late_s: tuple[float, ...]
    """How much later than due each request with a time was taken up."""


class Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What it says, one of these a line."""

    ready: bool = False
    """It could begin."""
    open: int | None = None
    """The last request with a time has been sent; so many are under way."""
    done: Outcome | None = None
