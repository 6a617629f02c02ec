"""The blocks of the GPU's cache that requests hold: taken, given their keys, given back. Pure."""

from collections.abc import Sequence

from simulator.model.gpu_cache import GpuCache
from simulator.model.news import BlockEvent, Cleared, Removed, Stored
from simulator.model.rates import Shape
from simulator.model.request import SimRequest


class Blocks:
    """A `GpuCache` with the requests that hold its blocks, and the events that tell of it."""

    def __init__(self, shape: Shape) -> None:
        self.cache = GpuCache(shape.gpu_blocks)
        self._shape = shape
        self._events: list[BlockEvent] = []

    def match(self, request: SimRequest) -> int:
        """Return how many leading blocks of what a request has to compute are there.

        The last token is always computed, for what it says of the next one.
        """
        most = (request.prefill_end - 1) // self._shape.block_tokens
        return self.cache.match(request.block_keys, most)

    def has_room(self, request: SimRequest, matched: int) -> bool:
        """Whether a request's whole prompt finds blocks, ``matched`` of which are there.

        What answers will take is not kept free, as in vLLM.
        """
        new = self._shape.blocks(request.prefill_end) - matched
        taken = self.cache.idle_among(request.block_keys[:matched])
        return new + taken <= self.cache.free_blocks

    def admit(self, request: SimRequest, matched: int) -> None:
        """Let a request hold the blocks that match."""
        hits = list(request.block_keys[:matched])
        self.cache.hold(hits)
        request.held = hits
        request.num_blocks = request.published = matched
        request.computed = matched * self._shape.block_tokens

    def lacking(self, request: SimRequest, tokens: int) -> int:
        """Return how many blocks a request has too few for so many tokens."""
        return max(0, self._shape.blocks(tokens) - request.num_blocks)

    def grow(self, request: SimRequest, tokens: int) -> bool:
        """Let a request hold blocks for so many tokens; False, and nothing, without room."""
        count = self.lacking(request, tokens)
        if not count:
            return True
        if count > self.cache.free_blocks:
            return False
        evicted = self.cache.allocate(count)
        if evicted:
            self._events.append(Removed(evicted))
        request.num_blocks += count
        request.unkeyed += count
        return True

    def steps_that_fit(self, decoding: Sequence[SimRequest]) -> int:
        """Return how many tokens each of these requests can add before blocks run out."""
        rows = self.cache.free_blocks // len(decoding)
        return max(1, rows * self._shape.block_tokens)

    def publish(self, request: SimRequest, tokens: int) -> None:
        """Give a request's blocks up to so many tokens their keys: others may use them."""
        end = tokens // self._shape.block_tokens
        first = request.published
        if end <= first:
            return
        for index in range(first, end):
            key = request.block_keys[index]
            if self.cache.publish(key):
                request.held.append(key)
                request.unkeyed -= 1
            else:
                # Another request has computed the same: what is new goes on after it.
                if first < index:
                    self._events.append(Stored(request, first, index))
                first = index + 1
        if first < end:
            self._events.append(Stored(request, first, end))
        request.published = end

    def release(self, request: SimRequest) -> None:
        """Take back all that a request holds; what has a key can be found until it is evicted."""
        if request.num_blocks:
            self.cache.release(request.held, request.unkeyed)
        request.held = []
        request.num_blocks = request.published = request.unkeyed = 0

    def clear(self) -> bool:
        """Forget all content; False, and nothing happens, while something is held."""
        cleared = self.cache.clear()
        if cleared:
            self._events.append(Cleared())
        return cleared

    def take_events(self) -> list[BlockEvent]:
        """Return what has happened since the last call, in order."""
        events, self._events = self._events, []
        return events
