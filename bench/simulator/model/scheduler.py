"""One replica's scheduler: continuous batching with chunked prefill, as vLLM's. Pure.

Time is told to it, in model seconds, and never goes back. What can be worked
out is not waited for: `advance` ends all steps that were over by then, at
their own times, and steps that only decode are taken together until something
happens in them.

As in vLLM (`scheduler_reserve_full_isl`), a request is admitted when blocks for
all of its prompt can be had; where running ones find none for their answers, the
one admitted last is preempted: it gives its blocks back and computes anew what
was evicted meanwhile.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

from bench.simulator.model.blocks import Blocks
from bench.simulator.model.lower_tiers import LowerTiers
from bench.simulator.model.news import BlockEvent, News, Totals
from bench.simulator.model.rates import Rates, Shape
from bench.simulator.model.request import CachedTokens, SimRequest
from bench.simulator.model.step import Step

Prefill = list[tuple[SimRequest, int]]


def _steady() -> float:
    return 1.0


class ReplicaModel:
    """The queue, the batch and the GPU cache of one replica.

    ``noise`` gives the factor on the duration of each step. ``foresees``: what waiting
    requests will compute is kept track of, for `known_tokens`; else what is there counts.
    """

    def __init__(
        self,
        shape: Shape,
        rates: Rates,
        tiers: LowerTiers,
        *,
        noise: Callable[[], float] = _steady,
        foresees: bool = True,
    ) -> None:
        self.shape = shape
        self.rates = rates
        self.blocks = Blocks(shape)
        self.cache = self.blocks.cache
        self.totals = Totals()
        self.waiting: deque[SimRequest] = deque()
        self.loading: list[tuple[float, SimRequest]] = []
        """Requests whose KV is on its way from CPU RAM, and when it will have come."""
        self.running: list[SimRequest] = []
        self.is_blocked = False
        """Whether a waiting request was told by the tiers to ask again."""
        self._tiers = tiers
        self._noise = noise
        self._foresees = foresees
        self._step: Step | None = None
        self._load_free_s = 0.0
        self._storing: deque[tuple[float, Sequence[bytes]]] = deque()
        self._promised: dict[bytes, int] = {}
        self._news: list[News] = []

    # --- from outside

    def arrive(self, request: SimRequest, now_s: float) -> None:
        """Put a request at the end of the queue.

        Raises ValueError when the GPU could never hold it.
        """
        if self.shape.blocks(request.total_tokens) > self.cache.num_blocks:
            raise ValueError(
                f"{request.total_tokens} tokens do not fit on a GPU for {self.shape.gpu_tokens}"
            )
        self.advance(now_s)
        request.arrived_s = now_s
        if self._foresees:
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
        """End all steps, loads and stores that are over by then, and begin what follows them."""
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            self._end_stores(at_s)
            step = self._step
            if step is not None and step.end_s <= at_s:
                self._apply(step, step.count)
                self._schedule(at_s)
            elif step is None and any(ready_s <= at_s for ready_s, _ in self.loading):
                self._schedule(at_s)

    def next_s(self) -> float | None:
        """Return when something will have happened next; None: not before something arrives."""
        due_s = [self._storing[0][0]] if self._storing else []
        if self._step is not None:
            due_s.append(self._step.end_s)
        else:
            due_s += [ready_s for ready_s, _ in self.loading]
        return min(due_s, default=None)

    def take_news(self) -> list[News]:
        """Return what the callers should hear, once."""
        news, self._news = self._news, []
        return news

    def take_events(self) -> list[BlockEvent]:
        """Return what happened to the GPU's cache since the last call, in order."""
        return self.blocks.take_events()

    def clear_gpu(self) -> bool:
        """Empty the GPU's prefix cache; False, and nothing happens, while requests hold some."""
        return self.blocks.clear()

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
        preempted = self.totals.preempted
        prefill: Prefill = []
        decoding: list[SimRequest] = []
        at = 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            if request.is_prefilling:
                budget -= self._prefill(request, budget, prefill)
            elif self._find_blocks(request, request.computed + 1):
                decoding.append(request)
                budget -= 1
            at += 1
        if self.totals.preempted == preempted:
            budget = self._admit_loaded(now_s, budget, prefill)
            self._admit_waiting(now_s, budget, prefill)
        self._tiers.end_schedule()
        self._step = self._plan(now_s, prefill, decoding)

    def _plan(self, now_s: float, prefill: Prefill, decoding: list[SimRequest]) -> Step | None:
        if not prefill and not decoding:
            return None
        context_tokens = sum(each.computed for each in decoding)
        step_s = self.rates.decode_s(len(decoding), context_tokens)
        step_s += sum(self.rates.prefill_s(n, each.computed) for each, n in prefill)
        if self.loading or self._storing:
            step_s *= 1 + self.rates.transfer_slowdown
        step_s *= self._noise()
        if prefill:
            return Step(now_s, step_s, 1, prefill, decoding)
        count = min(each.steps_to_news() for each in decoding)
        count = min(count, self.blocks.steps_that_fit(decoding))
        if self.loading:
            ready_s = min(ready_s for ready_s, _ in self.loading)
            count = min(count, max(1, math.ceil((ready_s - now_s) / step_s)))
        return Step(now_s, step_s, count, prefill, decoding)

    def _prefill(self, request: SimRequest, budget: int, prefill: Prefill) -> int:
        """Let a running request compute what the budget allows; return how much that is."""
        tokens = min(request.prefill_end - request.computed, budget)
        if not self._find_blocks(request, request.computed + tokens):
            return 0
        # Others may use these blocks from now on: their step comes after this.
        self.blocks.publish(request, request.computed + tokens)
        prefill.append((request, tokens))
        return tokens

    def _find_blocks(self, request: SimRequest, tokens: int) -> bool:
        """Let a request hold blocks for so many tokens; preempt those admitted last for it.

        False: it was the last itself.
        """
        while not self.blocks.grow(request, tokens):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: SimRequest) -> None:
        self.totals.preempted += 1
        request.preemptions += 1
        self.blocks.release(request)
        request.computed = 0
        request.prefill_end = request.prompt_tokens + request.generated
        self.waiting.appendleft(request)

    def _apply(self, step: Step, steps: int) -> None:
        """Note what ``steps`` of the steps have computed."""
        end_s = step.begin_s + steps * step.step_s
        for request, tokens in step.prefill:
            if request.is_over:
                continue
            request.computed += tokens
            self.totals.prefilled += tokens
            if not request.is_prefilling:
                if request.first_token_s is None:
                    request.first_token_s = end_s
                self._gave(request, 1, end_s)
            self._begin_store(request, end_s)
        for request in step.decoding:
            if request.is_over:
                continue
            request.computed += steps
            self.blocks.grow(request, request.computed)
            self.blocks.publish(request, request.computed)
            self._begin_store(request, end_s)
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

    # --- copies between GPU and CPU RAM

    def _begin_store(self, request: SimRequest, now_s: float) -> None:
        chunks = self._tiers.begin_store(request)
        if chunks:
            begin_s = max(now_s, self._storing[-1][0] if self._storing else now_s)
            tokens = len(chunks) * self.shape.chunk_tokens
            self._storing.append((begin_s + tokens / self.rates.store_tokens_per_s, chunks))

    def _end_stores(self, now_s: float) -> None:
        while self._storing and self._storing[0][0] <= now_s:
            self._tiers.end_store(self._storing.popleft()[1])

    def _begin_load(self, request: SimRequest, tokens: int, now_s: float) -> None:
        request.computed = min(request.computed + tokens, request.prefill_end - 1)
        # For all of the prompt, lest two loads hold what neither can go on without.
        self.blocks.grow(request, request.prefill_end)
        self._tiers.begin_load(request)
        begin_s = max(now_s, self._load_free_s)
        self._load_free_s = begin_s + tokens / self.rates.load_tokens_per_s
        self.loading.append((self._load_free_s, request))

    # --- admission

    def _admit_loaded(self, now_s: float, budget: int, prefill: Prefill) -> int:
        ready = [each for ready_s, each in self.loading if ready_s <= now_s]
        for request in ready:
            if budget <= 0 or len(self.running) >= self.shape.max_sequences:
                break
            self.loading = [each for each in self.loading if each[1] is not request]
            self._tiers.end_load(request)
            self.blocks.publish(request, request.computed)
            self.running.append(request)
            budget -= self._prefill(request, budget, prefill)
        return budget

    def _admit_waiting(self, now_s: float, budget: int, prefill: Prefill) -> None:
        """Admit from the head of the queue, passing over those that wait for lower tiers."""
        skipped: list[SimRequest] = []
        while budget > 0 and self.waiting and len(self.running) < self.shape.max_sequences:
            request = self.waiting[0]
            gpu_blocks = self.blocks.match(request)
            has_room = self.blocks.has_room(request, gpu_blocks)
            if not has_room and request.is_looked_up:
                break  # a long prompt's lookup takes its time, and would be in vain
            request.is_looked_up = True
            found = self._tiers.find(request, gpu_blocks * self.shape.block_tokens)
            if found is None:
                self.is_blocked = True
                skipped.append(self.waiting.popleft())
                continue
            if not has_room:
                break
            self.waiting.popleft()
            self.blocks.admit(request, gpu_blocks)
            tokens = found.cpu + found.disk
            if not request.preemptions:
                gpu_tokens = gpu_blocks * self.shape.block_tokens
                self._count(request, CachedTokens(gpu_tokens, found.cpu, found.disk))
            if tokens:
                self._begin_load(request, tokens, now_s)
            else:
                self.running.append(request)
                budget -= self._prefill(request, budget, prefill)
        self.waiting.extendleft(reversed(skipped))

    def _count(self, request: SimRequest, cached: CachedTokens) -> None:
        request.cached = cached
        totals = self.totals
        totals.queries += request.prompt_tokens
        totals.cached.gpu += cached.gpu
        totals.cached.cpu += cached.cpu
        totals.cached.disk += cached.disk

    # --- the end

    def _prompt_keys(self, request: SimRequest) -> Sequence[bytes]:
        return request.block_keys[: request.prompt_tokens // self.shape.block_tokens]

    def _end(self, request: SimRequest) -> None:
        """Give back all that a request has; it is in no queue any more."""
        request.is_over = True
        self.blocks.release(request)
        if self._foresees:
            self._keep_no_promise(request)
        self._tiers.forget(request)

    def _keep_no_promise(self, request: SimRequest) -> None:
        for key in self._prompt_keys(request):
            left = self._promised[key] - 1
            if left:
                self._promised[key] = left
            else:
                del self._promised[key]

    def check(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        self.cache.check()
        holding = [*self.running, *(each for _, each in self.loading)]
        assert self.cache._unkeyed == sum(each.unkeyed for each in holding)
        assert not any(each.is_over for each in [*holding, *self.waiting])
        assert not any(each.num_blocks for each in self.waiting)
        assert [at_s for at_s, _ in self._storing] == sorted(at_s for at_s, _ in self._storing)
        asked = [*holding, *self.waiting] if self._foresees else []
        assert self._promised == Counter(key for each in asked for key in self._prompt_keys(each))
