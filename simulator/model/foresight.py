"""What a request will not have to compute, as far as a replica can know it. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from simulator.model.gpu_cache import GpuCache
from simulator.model.lower_tiers import LowerTiers
from simulator.model.rates import Shape
from simulator.model.request import SimRequest


class Foresight:
    """A replica's tiers, and what the requests that it has will have computed.

    ``keeps_promises``: those requests' prompts are kept track of, block by block; else what
    is there counts, and nothing is expected of requests.
    """

    def __init__(
        self, shape: Shape, cache: GpuCache, tiers: LowerTiers, *, keeps_promises: bool
    ) -> None:
        self._shape = shape
        self._cache = cache
        self._tiers = tiers
        self._keeps_promises = keeps_promises
        self._promised: dict[bytes, int] = {}

    def expect(self, request: SimRequest) -> None:
        """Note a request that comes now, and what it is thought to have to compute."""
        if not self._keeps_promises:
            return
        request.expected_tokens = request.prompt_tokens - self.known_tokens(request)
        for key in self._prompt_keys(request):
            self._promised[key] = self._promised.get(key, 0) + 1

    def forget(self, request: SimRequest) -> None:
        """Note that a request is over; once, after `expect`."""
        if not self._keeps_promises:
            return
        for key in self._prompt_keys(request):
            left = self._promised[key] - 1
            if left:
                self._promised[key] = left
            else:
                del self._promised[key]

    def known_tokens(self, request: SimRequest) -> int:
        """Return the prompt tokens in any tier, and those that others will have computed."""
        most = (request.prompt_tokens - 1) // self._shape.block_tokens
        blocks = 0
        for key in request.block_keys[:most]:
            if key not in self._promised and key not in self._cache:
                break
            blocks += 1
        gpu_tokens = blocks * self._shape.block_tokens
        first = gpu_tokens // self._shape.chunk_tokens
        end = (first + len(self.lower_tiers_of(request, first))) * self._shape.chunk_tokens
        # Less than a chunk is not worth a load.
        known = end if end - gpu_tokens >= self._shape.chunk_tokens else gpu_tokens
        return min(known, request.prompt_tokens - 1)

    def lower_tiers_of(self, request: SimRequest, first_chunk: int) -> Sequence[str]:
        """Return the lower tier of each chunk of the prompt from ``first_chunk`` on."""
        end = request.prompt_tokens // self._shape.chunk_tokens
        return self._tiers.tiers_of(request.chunk_keys[first_chunk:end])

    def _prompt_keys(self, request: SimRequest) -> Sequence[bytes]:
        return request.block_keys[: request.prompt_tokens // self._shape.block_tokens]

    def check(self, requests: Iterable[SimRequest]) -> None:
        """Raise AssertionError if other requests than these are expected to compute something."""
        expected = requests if self._keeps_promises else ()
        assert self._promised == Counter(
            key for each in expected for key in self._prompt_keys(each)
        )
