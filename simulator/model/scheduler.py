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

from collections import deque
from collections.abc import Callable, Sequence

from simulator.model.batch import Batch, Step
from simulator.model.blocks import Blocks
from simulator.model.copies import Copies
from simulator.model.foresight import Foresight
from simulator.model.lower_tiers import Found, LowerTiers
from simulator.model.news import BlockEvent, News, Totals
from simulator.model.rates import Rates, Shape
from simulator.model.request import CachedTokens, SimRequest


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
        self.is_blocked = False
        """Whether a waiting request was told by the tiers to ask again."""
        self._tiers = tiers
        self._batch = Batch(shape, rates, self.blocks, noise)
        self._copies = Copies(shape, rates, tiers)
        self._foresight = Foresight(shape, self.cache, tiers, keeps_promises=foresees)
        self._step: Step | None = None
        self._news: list[News] = []

    @property
    def running(self) -> Sequence[SimRequest]:
        """Requests that compute, in the order of their admission."""
        return self._batch.running

    @property
    def loading(self) -> Sequence[tuple[float, SimRequest]]:
        """Requests whose KV is on its way from CPU RAM, and when it will have come."""
        return self._copies.loading

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
        self._foresight.expect(request)
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
            self._batch.running.remove(request)
        else:
            self._copies.end_load(request)
        self._end(request)
        self._look_again(now_s)

    def poke(self, now_s: float) -> None:
        """Look at the queue again as soon as may be: the tiers may have what they had not."""
        self.advance(now_s)
        self._look_again(now_s)

    def advance(self, now_s: float) -> None:
        """End all steps, loads and stores that are over by then, and begin what follows them."""
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            self._copies.end_stores(at_s)
            step = self._step
            if step is not None and step.end_s <= at_s:
                self._apply(step, step.count)
                self._schedule(at_s)
            elif step is None and self._copies.loaded(at_s):
                self._schedule(at_s)

    def next_s(self) -> float | None:
        """Return when something will have happened next; None: not before something arrives."""
        step, copies = self._step, self._copies
        due_s = (copies.next_store_s, copies.next_load_s if step is None else step.end_s)
        return min((each for each in due_s if each is not None), default=None)

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
        return self._foresight.known_tokens(request)

    def lower_tiers_of(self, request: SimRequest, first_chunk: int) -> Sequence[str]:
        """Return the lower tier of each chunk of the prompt from ``first_chunk`` on."""
        return self._foresight.lower_tiers_of(request, first_chunk)

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
        preempted = self._batch.go_on()
        for request in preempted:
            self.totals.preempted += 1
            self.waiting.appendleft(request)
        if not preempted:
            self._admit_loaded(now_s)
            self._admit_waiting(now_s)
        self._tiers.end_schedule()
        self._step = self._batch.plan(now_s, self._copies)

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
            self._copies.begin_store(request, end_s)
        for request in step.decoding:
            if request.is_over:
                continue
            request.computed += steps
            self.blocks.grow(request, request.computed)
            self.blocks.publish(request, request.computed)
            self._copies.begin_store(request, end_s)
            self._gave(request, steps, end_s)
        for request in [each for each in self.running if each.finished_s is not None]:
            self._batch.running.remove(request)
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

    def _admit_loaded(self, now_s: float) -> None:
        for request in self._copies.loaded(now_s):
            if not self._batch.may_grow:
                break
            self._copies.end_load(request)
            self.blocks.publish(request, request.computed)
            self._batch.join(request)

    def _admit_waiting(self, now_s: float) -> None:
        """Admit from the head of the queue, passing over those that wait for lower tiers."""
        skipped: list[SimRequest] = []
        while self.waiting and self._batch.may_grow:
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
            self._admit(request, gpu_blocks, found, now_s)
        self.waiting.extendleft(reversed(skipped))

    def _admit(self, request: SimRequest, gpu_blocks: int, found: Found, now_s: float) -> None:
        """Let a request run by what is there of it, after its load if there is one."""
        self.blocks.admit(request, gpu_blocks)
        tokens = found.cpu + found.disk
        if not request.preemptions:
            gpu_tokens = gpu_blocks * self.shape.block_tokens
            self._count(request, CachedTokens(gpu_tokens, found.cpu, found.disk))
        if not tokens:
            self._batch.join(request)
            return
        request.computed = min(request.computed + tokens, request.prefill_end - 1)
        # For all of the prompt, lest two loads hold what neither can go on without.
        self.blocks.grow(request, request.prefill_end)
        self._copies.begin_load(request, tokens, now_s)

    def _count(self, request: SimRequest, cached: CachedTokens) -> None:
        request.cached = cached
        totals = self.totals
        totals.queries += request.prompt_tokens
        totals.cached.gpu += cached.gpu
        totals.cached.cpu += cached.cpu
        totals.cached.disk += cached.disk

    # --- the end

    def _end(self, request: SimRequest) -> None:
        """Give back all that a request has; it is in no queue any more."""
        request.is_over = True
        self.blocks.release(request)
        self._foresight.forget(request)
        self._tiers.forget(request)

    def check(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        self.cache.check()
        self._copies.check()
        holding = [*self.running, *(each for _, each in self.loading)]
        assert self.cache._unkeyed == sum(each.unkeyed for each in holding)
        assert not any(each.is_over for each in [*holding, *self.waiting])
        assert not any(each.num_blocks for each in self.waiting)
        self._foresight.check([*holding, *self.waiting])
