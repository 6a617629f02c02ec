"""One replica's scheduler: continuous batching with chunked prefill, as vLLM's. Pure.

Time is told to it, in model seconds, and never goes back. What can be worked
out is not waited for: `advance` ends all steps that were over by then, at
their own times, and steps that only decode are taken together until something
happens in them.

Left out of vLLM: preemption. A request is admitted when the blocks for all of
its prompt and output can be had.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence

from bench.simulator.model.gpu_cache import GpuCache
from bench.simulator.model.lower_tiers import LowerTiers
from bench.simulator.model.news import BlockEvent, Cleared, News, Removed, Stored, Totals
from bench.simulator.model.rates import Rates, Shape
from bench.simulator.model.request import CachedTokens, SimRequest
from bench.simulator.model.step import Step


class ReplicaModel:
    """The queue, the batch and the GPU cache of one replica."""

    def __init__(self, shape: Shape, rates: Rates, tiers: LowerTiers) -> None:
        self.shape = shape
        self.rates = rates
        self.cache = GpuCache(shape.gpu_blocks)
        self.totals = Totals()
        self.waiting: deque[SimRequest] = deque()
        self.loading: list[tuple[float, SimRequest]] = []
        """Requests whose KV is on its way from CPU RAM, and when it will have come."""
        self.running: list[SimRequest] = []
        self.is_blocked = False
        """Whether a waiting request was told by the tiers to ask again."""
        self._tiers = tiers
        self._step: Step | None = None
        self._reserved = 0
        self._load_free_s = 0.0
        self._promised: dict[bytes, int] = {}
        self._news: list[News] = []
        self._events: list[BlockEvent] = []

    # --- from outside

    def arrive(self, request: SimRequest, now_s: float) -> None:
        """Put a request at the end of the queue.

        Raises ValueError when the GPU could never hold it.
        """
        if self._blocks(request.total_tokens) > self.cache.num_blocks:
            raise ValueError(
                f"{request.total_tokens} tokens do not fit on a GPU for {self.shape.gpu_tokens}"
            )
        self.advance(now_s)
        request.arrived_s = now_s
        request.expected_tokens = request.prompt_tokens - self.known_tokens(request)
        for key in self._prompt_keys(request):
            self._promised[key] = self._promised.get(key, 0) + 1
        self.totals.requests += 1
        self.waiting.append(request)
        self._look_again(now_s)

    def cancel(self, request: SimRequest, now_s: float) -> None:
        """Forget a request, wherever it is; one that is over already stays so."""
        self.advance(now_s)
        if request.is_over:
            return
        self.totals.cancelled += 1
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
        else:
            self.loading = [(ready_s, each) for ready_s, each in self.loading if each != request]
            self._tiers.end_load(request)
        self._end(request)
        self._look_again(now_s)

    def poke(self, now_s: float) -> None:
        """Look at the queue again as soon as may be: the tiers may have what they had not."""
        self.advance(now_s)
        self._look_again(now_s)

    def advance(self, now_s: float) -> None:
        """End all steps and loads that are over by then, and begin what follows them."""
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            if self._step is not None:
                self._apply(self._step, self._step.count)
            self._schedule(at_s)

    def next_s(self) -> float | None:
        """Return when something will have happened next; None: not before something arrives."""
        if self._step is not None:
            return self._step.end_s
        return min((ready_s for ready_s, _ in self.loading), default=None)

    def take_news(self) -> list[News]:
        """Return what the callers should hear, once."""
        news, self._news = self._news, []
        return news

    def take_events(self) -> list[BlockEvent]:
        """Return what happened to the GPU's cache since the last call, in order."""
        events, self._events = self._events, []
        return events

    def clear_gpu(self) -> bool:
        """Empty the GPU's prefix cache; False, and nothing happens, while requests hold some."""
        cleared = self.cache.clear()
        if cleared:
            self._events.append(Cleared())
        return cleared

    @property
    def reserved_blocks(self) -> int:
        """Blocks that admitted requests will still take."""
        return self._reserved

    @property
    def step_end_s(self) -> float | None:
        """When the present step ends; the first of them if there are several in a row."""
        return None if self._step is None else self._step.begin_s + self._step.step_s

    @property
    def tokens_in_step(self) -> int:
        """Prompt tokens that the present step is computing."""
        return 0 if self._step is None else sum(tokens for _, tokens in self._step.prefill)

    def known_tokens(self, request: SimRequest) -> int:
        """Return the prompt tokens that will not need to be computed, as far as can be known now.

        Those in any tier, and those that requests before it will have computed.
        """
        most = (request.prompt_tokens - 1) // self.shape.block_tokens
        blocks = 0
        for key in request.block_keys[:most]:
            if key not in self._promised and key not in self.cache:
                break
            blocks += 1
        gpu_tokens = blocks * self.shape.block_tokens
        first = gpu_tokens // self.shape.chunk_tokens
        end = (first + len(self.lower_tiers_of(request, first))) * self.shape.chunk_tokens
        # Less than a chunk is not worth a load.
        known = end if end - gpu_tokens >= self.shape.chunk_tokens else gpu_tokens
        return min(known, request.prompt_tokens - 1)

    def lower_tiers_of(self, request: SimRequest, first_chunk: int) -> Sequence[str]:
        """Return the lower tier of each chunk of the prompt from ``first_chunk`` on."""
        end = request.prompt_tokens // self.shape.chunk_tokens
        return self._tiers.tiers_of(request.chunk_keys[first_chunk:end])

    # --- steps

    def _look_again(self, now_s: float) -> None:
        """Let the next step begin as soon as the present one ends, or now if there is none."""
        step = self._step
        if step is None:
            self._schedule(now_s)
        elif step.count > 1:
            done = min(step.count - 1, int((now_s - step.begin_s) / step.step_s))
            if done > 0:
                self._apply(step, done)
                step.begin_s += done * step.step_s
            step.count = 1

    def _schedule(self, now_s: float) -> None:
        """Decide what the step that begins now computes."""
        self.is_blocked = False
        budget = self.shape.max_batched_tokens
        prefill: list[tuple[SimRequest, int]] = []
        decoding: list[SimRequest] = []
        for request in self.running:
            if budget <= 0:
                break
            if request.is_prefilling:
                budget -= self._prefill(request, budget, prefill)
            else:
                decoding.append(request)
                budget -= 1
        budget = self._admit_loaded(now_s, budget, prefill)
        self._admit_waiting(now_s, budget, prefill)
        self._tiers.end_schedule()
        self._step = self._plan(now_s, prefill, decoding)

    def _plan(
        self,
        now_s: float,
        prefill: list[tuple[SimRequest, int]],
        decoding: list[SimRequest],
    ) -> Step | None:
        if not prefill and not decoding:
            return None
        step_s = self.rates.decode_s(len(decoding))
        if prefill:
            step_s += sum(self.rates.prefill_s(n, each.computed) for each, n in prefill)
            return Step(now_s, step_s, 1, prefill, decoding)
        count = min(each.steps_to_news() for each in decoding)
        if self.loading:
            ready_s = min(ready_s for ready_s, _ in self.loading)
            count = min(count, max(1, math.ceil((ready_s - now_s) / step_s)))
        return Step(now_s, step_s, count, prefill, decoding)

    def _prefill(
        self, request: SimRequest, budget: int, prefill: list[tuple[SimRequest, int]]
    ) -> int:
        tokens = min(request.prompt_tokens - request.computed, budget)
        self._grow(request, request.computed + tokens)
        # Others may use these blocks from now on: their step comes after this.
        self._publish(request, request.computed + tokens)
        prefill.append((request, tokens))
        return tokens

    def _apply(self, step: Step, steps: int) -> None:
        """Note what ``steps`` of the steps have computed."""
        end_s = step.begin_s + steps * step.step_s
        for request, tokens in step.prefill:
            if request.is_over:
                continue
            request.computed += tokens
            self.totals.prefilled += tokens
            if not request.is_prefilling:
                request.first_token_s = end_s
                self._gave(request, 1, end_s)
            self._tiers.store(request)
        for request in step.decoding:
            if request.is_over:
                continue
            request.computed += steps
            self._grow(request, request.computed)
            self._publish(request, request.computed)
            self._tiers.store(request)
            self._gave(request, steps, end_s)
        for request in [each for each in self.running if each.finished_s is not None]:
            self.running.remove(request)
            self.totals.finished += 1
            self._end(request)

    def _gave(self, request: SimRequest, tokens: int, at_s: float) -> None:
        request.generated += tokens
        self.totals.generated += tokens
        if request.generated >= request.output_tokens:
            request.finished_s = at_s
        elif not request.emit_every or (request.generated - 1) % request.emit_every:
            return
        self._news.append(News(request, request.generated, at_s))

    # --- admission

    def _admit_loaded(
        self, now_s: float, budget: int, prefill: list[tuple[SimRequest, int]]
    ) -> int:
        ready = [each for ready_s, each in self.loading if ready_s <= now_s]
        if not ready:
            return budget
        for request in ready:
            if budget <= 0 or len(self.running) >= self.shape.max_sequences:
                break
            self.loading = [each for each in self.loading if each[1] is not request]
            self._tiers.end_load(request)
            self._publish(request, request.computed)
            self.running.append(request)
            budget -= self._prefill(request, budget, prefill)
        return budget

    def _admit_waiting(
        self, now_s: float, budget: int, prefill: list[tuple[SimRequest, int]]
    ) -> None:
        """Admit from the head of the queue, passing over those that wait for lower tiers."""
        skipped: list[SimRequest] = []
        while budget > 0 and self.waiting and len(self.running) < self.shape.max_sequences:
            request = self.waiting[0]
            gpu_blocks = self.cache.match(
                request.block_keys, (request.prompt_tokens - 1) // self.shape.block_tokens
            )
            found = self._tiers.find(request, gpu_blocks * self.shape.block_tokens)
            if found is None:
                self.is_blocked = True
                skipped.append(self.waiting.popleft())
                continue
            if not self._has_room(request, gpu_blocks):
                break
            self.waiting.popleft()
            tokens = found.cpu + found.disk
            self._admit(request, gpu_blocks, CachedTokens(0, found.cpu, found.disk))
            if tokens:
                self._begin_load(request, tokens, now_s)
            else:
                self.running.append(request)
                budget -= self._prefill(request, budget, prefill)
        self.waiting.extendleft(reversed(skipped))

    def _has_room(self, request: SimRequest, gpu_blocks: int) -> bool:
        new = self._blocks(request.total_tokens) - gpu_blocks
        taken = self.cache.idle_among(request.block_keys[:gpu_blocks])
        return new + taken <= self.cache.free_blocks - self._reserved

    def _admit(self, request: SimRequest, gpu_blocks: int, cached: CachedTokens) -> None:
        hits = list(request.block_keys[:gpu_blocks])
        self.cache.hold(hits)
        self._reserved += self._blocks(request.total_tokens) - gpu_blocks
        request.held = hits
        request.num_blocks = request.published = gpu_blocks
        request.computed = cached.gpu = gpu_blocks * self.shape.block_tokens
        request.cached = cached
        totals = self.totals
        totals.queries += request.prompt_tokens
        totals.cached.gpu += cached.gpu
        totals.cached.cpu += cached.cpu
        totals.cached.disk += cached.disk

    def _begin_load(self, request: SimRequest, tokens: int, now_s: float) -> None:
        # The last token is always computed, for what it says of the next one.
        request.computed = min(request.computed + tokens, request.prompt_tokens - 1)
        self._grow(request, request.computed)
        self._tiers.begin_load(request)
        begin_s = max(now_s, self._load_free_s)
        self._load_free_s = begin_s + tokens / self.rates.load_tokens_per_s
        self.loading.append((self._load_free_s, request))

    # --- blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.shape.block_tokens)

    def _prompt_keys(self, request: SimRequest) -> Sequence[bytes]:
        return request.block_keys[: request.prompt_tokens // self.shape.block_tokens]

    def _grow(self, request: SimRequest, tokens: int) -> None:
        count = self._blocks(tokens) - request.num_blocks
        if count <= 0:
            return
        evicted = self.cache.allocate(count)
        if evicted:
            self._events.append(Removed(evicted))
        request.num_blocks += count
        request.unkeyed += count
        self._reserved -= count

    def _publish(self, request: SimRequest, tokens: int) -> None:
        end = tokens // self.shape.block_tokens
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

    def _end(self, request: SimRequest) -> None:
        """Give back all that a request has; it is in no queue any more."""
        request.is_over = True
        if request.num_blocks:
            self._reserved -= self._blocks(request.total_tokens) - request.num_blocks
            self.cache.release(request.held, request.unkeyed)
        for key in self._prompt_keys(request):
            left = self._promised[key] - 1
            if left:
                self._promised[key] = left
            else:
                del self._promised[key]
        self._tiers.forget(request)

    def check(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        self.cache.check()
        holding = [*self.running, *(each for _, each in self.loading)]
        assert self._reserved == sum(
            self._blocks(each.total_tokens) - each.num_blocks for each in holding
        )
        assert self.cache._unkeyed == sum(each.unkeyed for each in holding)
        assert not any(each.is_over for each in [*holding, *self.waiting])
        assert 0 <= self._reserved <= self.cache.free_blocks
        asked = [*holding, *self.waiting]
        assert self._promised == Counter(key for each in asked for key in self._prompt_keys(each))
