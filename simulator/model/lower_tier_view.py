"""The tiers below the GPU, as the model uses them. Pure."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from simulator.model.sim_request import SimRequest


class LoadableTokens(NamedTuple):
    """Tokens beyond those on the GPU that can be loaded now."""

    cpu: int = 0
    disk: int = 0
    """Tokens that were read from disk for this request."""


class LowerTiers(Protocol):
    """vLLM's offloading connector, as far as a scheduler sees it."""

    def find(
        self, request: SimRequest, gpu_tokens: int, *, others: int = 0
    ) -> LoadableTokens | None:
        """Return what follows the request's ``gpu_tokens``; None: ask again at a later step.

        ``others`` is the number of other requests whose prompts are not computed yet.
        """

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

    def find(
        self, request: SimRequest, gpu_tokens: int, *, others: int = 0
    ) -> LoadableTokens | None:
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
