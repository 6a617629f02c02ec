"""The GPU's KV cache as vLLM keeps it: reference counts, and LRU order for unused blocks. Pure.

A block that a request holds is not evicted. A block that no request holds keeps its content until
it is the least recently used one and is taken for other content; of one request's blocks the last
of the prompt goes first. `RequestBlocks` takes blocks for requests and returns them.
"""

from collections import OrderedDict
from collections.abc import Sequence

from simulator.model.model_events import (
    BlockEvent,
    GpuBlocksCleared,
    GpuBlocksRemoved,
    GpuBlocksStored,
)
from simulator.model.replica_machine import Shape
from simulator.model.sim_request import SimRequest


class GpuCache:
    """``num_blocks`` blocks; those with content are known by their key."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._held: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._blank = num_blocks
        self._unkeyed = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, those with content included."""
        return self._blank + len(self._idle)

    @property
    def cached_blocks(self) -> int:
        """Blocks with content, held or not."""
        return len(self._held) + len(self._idle)

    @property
    def held_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self.free_blocks

    def __contains__(self, key: bytes) -> bool:
        return key in self._held or key in self._idle

    def match(self, keys: Sequence[bytes], most: int) -> int:
        """Return how many leading ones of the first ``most`` keys are here; changes nothing."""
        held, idle = self._held, self._idle
        for position in range(min(most, len(keys))):
            key = keys[position]
            if key not in held and key not in idle:
                return position
        return min(most, len(keys))

    def idle_among(self, keys: Sequence[bytes]) -> int:
        """Return how many of these keys' blocks nobody holds."""
        return sum(map(self._idle.__contains__, keys))

    def hold(self, keys: Sequence[bytes]) -> None:
        """Hold blocks with content until `release`."""
        held, idle = self._held, self._idle
        for key in keys:
            if key in held:
                held[key] += 1
            else:
                del idle[key]
                held[key] = 1

    def allocate(self, count: int) -> list[bytes]:
        """Hold ``count`` blocks without content; return the keys of what was evicted for them.

        Raises ValueError, changing nothing, when fewer are free.
        """
        if count > self.free_blocks:
            raise ValueError(f"{count} blocks are wanted and {self.free_blocks} are free")
        taken = min(count, self._blank)
        self._blank -= taken
        self._unkeyed += count
        return [self._idle.popitem(last=False)[0] for _ in range(count - taken)]

    def publish(self, key: bytes) -> bool:
        """Give a held block without content its key; False if another block has it.

        In that case the block stays without: it is the same content twice.
        """
        if key in self._held or key in self._idle:
            return False
        self._unkeyed -= 1
        self._held[key] = 1
        return True

    def release(self, keys: Sequence[bytes], unkeyed: int) -> None:
        """End a request's holds: of blocks with content, in prompt order, and of those without."""
        held, idle = self._held, self._idle
        for key in reversed(keys):
            left = held[key] - 1
            if left:
                held[key] = left
            else:
                del held[key]
                idle[key] = None
        self._unkeyed -= unkeyed
        self._blank += unkeyed

    def clear(self) -> bool:
        """Forget all content; False, and nothing happens, while something is held."""
        if self.held_blocks:
            return False
        self._blank += len(self._idle)
        self._idle.clear()
        return True

    def check(self) -> None:
        """Raise AssertionError if the numbers do not add up."""
        assert not self._held.keys() & self._idle.keys()
        assert all(count > 0 for count in self._held.values())
        assert self._blank >= 0 and self._unkeyed >= 0
        counted = self._blank + self._unkeyed + len(self._held) + len(self._idle)
        assert counted == self.num_blocks, f"{counted} of {self.num_blocks}"


class RequestBlocks:
    """A `GpuCache` with the requests that hold its blocks, and the events that report it."""

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

        As in vLLM, no room is reserved for answers.
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
        """Return how many more blocks a request needs for this many tokens."""
        return max(0, self._shape.blocks(tokens) - request.num_blocks)

    def grow(self, request: SimRequest, tokens: int) -> bool:
        """Let a request hold blocks for this many tokens; False, unchanged, without room."""
        count = self.lacking(request, tokens)
        if not count:
            return True
        if count > self.cache.free_blocks:
            return False
        evicted = self.cache.allocate(count)
        if evicted:
            self._events.append(GpuBlocksRemoved(evicted))
        request.num_blocks += count
        request.unkeyed += count
        return True

    def steps_that_fit(self, decoding: Sequence[SimRequest]) -> int:
        """Return how many tokens each of these requests can add before blocks run out."""
        rows = self.cache.free_blocks // len(decoding)
        return max(1, rows * self._shape.block_tokens)

    def publish(self, request: SimRequest, tokens: int) -> None:
        """Give a request's blocks, up to this many tokens, their keys: others may use them."""
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
                # Another request has computed the same: the new part continues after it.
                if first < index:
                    self._events.append(GpuBlocksStored(request, first, index))
                first = index + 1
        if first < end:
            self._events.append(GpuBlocksStored(request, first, end))
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
            self._events.append(GpuBlocksCleared())
        return cleared

    def take_events(self) -> list[BlockEvent]:
        """Return what has happened since the last call, in order."""
        events, self._events = self._events, []
        return events
