"""The tiers below the GPU that the model uses, and the events that it reports. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from simulator.model.machine_and_request import CachedTokens, SimRequest


class LoadableTokens(NamedTuple):
    """Tokens beyond those on the GPU that can be loaded now."""

    cpu: int = 0
    disk: int = 0
    """Tokens that were read from disk for this request."""


class LowerTiers(Protocol):
    """vLLM's offloading connector, as far as a scheduler sees it."""

    def find(self, request: SimRequest, gpu_tokens: int) -> LoadableTokens | None:
        """Return what follows the request's ``gpu_tokens``; None: ask again at a later step."""

    def begin_load(self, request: SimRequest) -> None:
        """Hold what `find` found, until `end_load`."""

    def end_load(self, request: SimRequest) -> None:
        """The bytes are on the GPU, or nobody wants them any more."""

    def begin_store(self, request: SimRequest) -> Sequence[bytes]:
        """Reserve room for the full chunks among the request's computed tokens.

        Returns those to be copied; `end_store` must follow.
        """

    def end_store(self, chunks: Sequence[bytes]) -> None:
        """The bytes of these chunks have come."""

    def end_schedule(self) -> None:
        """The scheduler is done with this step's questions."""

    def forget(self, request: SimRequest) -> None:
        """The request is over."""

    def tiers_of(self, chunk_keys: Sequence[bytes]) -> Sequence[str]:
        """Return the tier of each leading chunk, up to the first that is in none."""


class NoLowerTiers:
    """A replica with a GPU cache only."""

    def find(self, request: SimRequest, gpu_tokens: int) -> LoadableTokens | None:
        """Find nothing."""
        return LoadableTokens()

    def begin_load(self, request: SimRequest) -> None:
        """Never called: nothing is found."""

    def end_load(self, request: SimRequest) -> None:
        """Never called: nothing is found."""

    def begin_store(self, request: SimRequest) -> Sequence[bytes]:
        """Keep nothing."""
        return ()

    def end_store(self, chunks: Sequence[bytes]) -> None:
        """Never called: nothing is kept."""

    def end_schedule(self) -> None:
        """Nothing to end."""

    def forget(self, request: SimRequest) -> None:
        """Nothing to forget."""

    def tiers_of(self, chunk_keys: Sequence[bytes]) -> Sequence[str]:
        """Hold nothing."""
        return ()


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
    preempted: int = 0
    """Times that a running request had to give its blocks to others."""
    finished: int = 0
    """Requests that gave all their tokens."""
