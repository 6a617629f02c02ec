"""What the model reports: progress of requests, changes of the GPU cache, totals. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from simulator.model.sim_request import CachedTokens, SimRequest


class TokenProgress(NamedTuple):
    """A request has given this many tokens by then; all of them if it is over."""

    request: SimRequest
    generated: int
    at_s: float


class GpuBlocksStored(NamedTuple):
    """Blocks ``first`` to ``end`` (not included) of a request are in the GPU's cache now."""

    request: SimRequest
    first: int
    end: int


class GpuBlocksRemoved(NamedTuple):
    """Blocks were evicted from the GPU's cache."""

    keys: Sequence[bytes]


class GpuBlocksCleared(NamedTuple):
    """The GPU's cache was emptied."""


BlockEvent = GpuBlocksStored | GpuBlocksRemoved | GpuBlocksCleared


@dataclass(slots=True)
class Totals:
    """Counts since the start, in tokens where nothing else is said."""

    requests: int = 0
    cancelled: int = 0
    queries: int = 0
    """Prompt tokens of all admitted requests."""
    cached: CachedTokens = field(default_factory=CachedTokens)
    prefilled: int = 0
    generated: int = 0
    between_tokens: int = 0
    """Tokens after the first ones of their answers."""
    between_tokens_s: float = 0.0
    """Seconds from the tokens before them, in sum."""
    preempted: int = 0
    """Times that a running request had to give its blocks to others."""
    pulled: int = 0
    """Tokens whose KV came from another replica's GPU."""
    finished: int = 0
    """Requests that gave all their tokens."""
