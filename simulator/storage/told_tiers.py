"""Tiers that tell which chunks they reserve and find, as vLLM's connector notes for its events."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from simulator.model.lower_tiers import Found
from simulator.model.request import SimRequest
from simulator.storage.engine_tiers import EngineTiers


class ToldTiers(EngineTiers):
    """Tiers that tell which of a request's chunks were just reserved, or found ready.

    ``noted`` is called with the chunks' numbers.
    """

    def __init__(
        self, *given: Any, noted: Callable[[SimRequest, Iterable[int]], None], **options: Any
    ) -> None:
        super().__init__(*given, **options)
        self._noted = noted

    def find(self, request: SimRequest, gpu_tokens: int) -> Found | None:
        """Look up what follows the GPU's part."""
        found = super().find(request, gpu_tokens)
        if found is not None and (tokens := found.cpu + found.disk):
            end = (gpu_tokens + tokens) // self._chunk_tokens
            self._noted(request, range(gpu_tokens // self._chunk_tokens, end))
        return found

    def begin_store(self, request: SimRequest) -> Sequence[bytes]:
        """Reserve room for what has become full."""
        first = request.stored_chunks
        keys = super().begin_store(request)
        if keys:
            reserved, stored = frozenset(keys), range(first, request.stored_chunks)
            self._noted(request, [each for each in stored if request.chunk_keys[each] in reserved])
        return keys
