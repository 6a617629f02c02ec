"""One replica's scheduler: continuous batching with chunked prefill, as in vLLM. Pure.

Callers pass the time, in model seconds; it never goes back. `ReplicaModel.advance` ends all steps
that are over by then, at their own times, and takes steps that only decode together until something
happens in them.

As in vLLM (`scheduler_reserve_full_isl`), a request is admitted when there are blocks for its whole
prompt. If running requests find no blocks for their answers, the last admitted one is preempted: it
returns its blocks and later computes again what was evicted meanwhile. `Copies` models the loads
and stores between GPU and CPU RAM and the pulls from other GPUs, and `Batch` the running requests
of a step. As with NixlConnector, a request that lends its KV holds its blocks after its end.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cacheengine.record import BandwidthMeter
from cacheengine.step_meter import StepMeter
from simulator.model.gpu_cache import RequestBlocks
from simulator.model.lower_tier_view import LoadableTokens, LowerTiers
from simulator.model.model_events import BlockEvent, TokenProgress, Totals
from simulator.model.replica_machine import Rates, Shape
from simulator.model.sim_request import CachedTokens, SimRequest


class ReplicaMeter:
    """Measures steps and loads as the engine inside vLLM does.

    ``speed`` seconds of the model are one second for the readers of the meters.
    """

    def __init__(
        self,
        steps: StepMeter,
        loads: BandwidthMeter,
        *,
        bytes_per_token: float = 1.0,
        speed: float = 1.0,
    ) -> None:
        self._steps = steps
        self._loads = loads
        self._bytes_per_token = bytes_per_token
        self._speed = speed

    def add_step(
        self, step_s: float, prefill: Sequence[tuple[SimRequest, int]], decoding: int
    ) -> None:
        """Add a step before its tokens count as computed."""
        self._steps.add(
            step_s / self._speed,
            prefill_tokens=sum(tokens for _, tokens in prefill),
            attended=sum(tokens * (each.computed + tokens / 2) for each, tokens in prefill),
            decoding=decoding,
        )

    def add_load(self, tokens: int, seconds: float) -> None:
        """Add a load from CPU RAM."""
        self._loads.add(round(tokens * self._bytes_per_token), seconds / self._speed)


class Copies:
    """One replica's loads and stores: each way one copy after another, at its own rate."""

    def __init__(self, shape: Shape, rates: Rates, tiers: LowerTiers, meter: ReplicaMeter) -> None:
        self._meter = meter
        self.loading: list[tuple[float, SimRequest]] = []
        """Requests whose KV is on its way to the GPU, and when it will have come."""
        self._pull_free_s = 0.0
        self._shape = shape
        self._rates = rates
        self._tiers = tiers
        self._load_free_s = 0.0
        self._storing: deque[tuple[float, Sequence[bytes]]] = deque()

    @property
    def are_under_way(self) -> bool:
        """Whether any is in progress."""
        return bool(self.loading or self._storing)

    @property
    def next_load_s(self) -> float | None:
        """When the next load will have come."""
        return min((ready_s for ready_s, _ in self.loading), default=None)

    @property
    def next_store_s(self) -> float | None:
        """When the next store will have come."""
        return self._storing[0][0] if self._storing else None

    def begin_store(self, request: SimRequest, now_s: float) -> None:
        """Store what has become full of a request's computed tokens."""
        chunks = self._tiers.begin_store(request)
        if chunks:
            begin_s = max(now_s, self._storing[-1][0] if self._storing else now_s)
            tokens = len(chunks) * self._shape.chunk_tokens
            self._storing.append((begin_s + tokens / self._rates.store_tokens_per_s, chunks))

    def end_stores(self, now_s: float) -> None:
        """Make visible what has come to CPU RAM by now."""
        while self._storing and self._storing[0][0] <= now_s:
            self._tiers.end_store(self._storing.popleft()[1])

    def begin_load(self, request: SimRequest, tokens: int, now_s: float) -> None:
        """Load this many tokens, which the tiers have found for a request."""
        self._tiers.begin_load(request)
        begin_s = max(now_s, self._load_free_s)
        seconds = tokens / self._rates.load_tokens_per_s
        self._meter.add_load(tokens, seconds)
        self._load_free_s = begin_s + seconds
        self.loading.append((self._load_free_s, request))

    def begin_pull(self, request: SimRequest, tokens: int, now_s: float) -> None:
        """Load this many tokens from another replica's GPU."""
        seconds = tokens / self._rates.pull_tokens_per_s
        self._pull_free_s = max(now_s, self._pull_free_s) + seconds
        self.loading.append((self._pull_free_s, request))

    def loaded(self, now_s: float) -> list[SimRequest]:
        """Return the requests whose KV has come by now; `end_load` must follow for each."""
        return [each for ready_s, each in self.loading if ready_s <= now_s]

    def end_load(self, request: SimRequest) -> None:
        """Forget a load that has come, or that nobody wants any more."""
        self.loading = [each for each in self.loading if each[1] is not request]
        self._tiers.end_load(request)

    def check(self) -> None:
        """Raise AssertionError if stores are not in the order of their ends."""
        assert [at_s for at_s, _ in self._storing] == sorted(at_s for at_s, _ in self._storing)


@dataclass(slots=True)
class Step:
    """``count`` equal steps that follow each other; only those without prefill are more than one.

    ``prefill`` says how many tokens of which prompt.
    """

    begin_s: float
    step_s: float
    count: int
    prefill: list[tuple[SimRequest, int]]
    decoding: list[SimRequest]

    @property
    def end_s(self) -> float:
        """When the last of them ends."""
        return self.begin_s + self.step_s * self.count


class Batch:
    """Running requests in the order of their admission, and the step that is being planned.

    ``noise`` gives the factor on the duration of each step.
    """

    def __init__(
        self, shape: Shape, rates: Rates, blocks: RequestBlocks, noise: Callable[[], float]
    ) -> None:
        self.running: list[SimRequest] = []
        self._shape = shape
        self._rates = rates
        self._blocks = blocks
        self._noise = noise
        self._budget = 0
        """Tokens that the step can compute still."""
        self._prefill: list[tuple[SimRequest, int]] = []
        self._decoding: list[SimRequest] = []

    @property
    def may_grow(self) -> bool:
        """Whether the step that is being planned can take one more request."""
        return self._budget > 0 and len(self.running) < self._shape.max_sequences

    @property
    def prefilling(self) -> int:
        """How many requests' prompts the step that is being planned computes."""
        return len(self._prefill)

    def go_on(self) -> list[SimRequest]:
        """Begin to plan a step, by what the running requests compute in it.

        Returns the requests that run no more, since there are not blocks for all: the one
        admitted last comes first. Those hold nothing, and have to begin anew.
        """
        self._budget = self._shape.max_batched_tokens
        self._prefill, self._decoding = [], []
        preempted: list[SimRequest] = []
        at = 0
        while at < len(self.running) and self._budget > 0:
            request = self.running[at]
            if request.is_prefilling:
                self._go_on_prefilling(request, preempted)
            elif self._find_blocks(request, request.computed + 1, preempted):
                self._decoding.append(request)
                self._budget -= 1
            at += 1
        return preempted

    def join(self, request: SimRequest) -> None:
        """Let one more request run, which holds what it has computed or loaded.

        There are blocks for its prompt: nothing is preempted for it.
        """
        self.running.append(request)
        self._go_on_prefilling(request, [])

    def plan(self, now_s: float, copies: Copies) -> Step | None:
        """Return the planned step; None where there is nothing to compute."""
        prefill, decoding = self._prefill, self._decoding
        if not prefill and not decoding:
            return None
        context_tokens = sum(each.computed for each in decoding)
        step_s = self._rates.decode_s(len(decoding), context_tokens)
        step_s += sum(self._rates.prefill_s(n, each.computed) for each, n in prefill)
        if copies.are_under_way:
            step_s *= 1 + self._rates.transfer_slowdown
        step_s *= self._noise()
        if prefill:
            return Step(now_s, step_s, 1, prefill, decoding)
        count = min(each.steps_to_progress() for each in decoding)
        count = min(count, self._blocks.steps_that_fit(decoding))
        if (until_s := self._alike_until_s(copies)) is not None:
            count = min(count, max(1, math.ceil((until_s - now_s) / step_s)))
        return Step(now_s, step_s, count, prefill, decoding)

    def _alike_until_s(self, copies: Copies) -> float | None:
        """Return when steps may be others, since a load has come or a store is over."""
        slows = self._rates.transfer_slowdown > 0
        ends_s = (copies.next_load_s, copies.next_store_s if slows else None)
        return min((each for each in ends_s if each is not None), default=None)

    def _go_on_prefilling(self, request: SimRequest, preempted: list[SimRequest]) -> None:
        """Let a running request compute what the budget allows."""
        tokens = min(request.prefill_end - request.computed, self._budget)
        if not self._find_blocks(request, request.computed + tokens, preempted):
            return
        # Others may use these blocks from now on: their step comes after this.
        self._blocks.publish(request, request.computed + tokens)
        self._prefill.append((request, tokens))
        self._budget -= tokens

    def _find_blocks(self, request: SimRequest, tokens: int, preempted: list[SimRequest]) -> bool:
        """Let a request hold blocks for this many tokens; preempt those admitted last for it.

        False: it was the last itself.
        """
        while not self._blocks.grow(request, tokens):
            victim = self.running.pop()
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: SimRequest) -> None:
        request.preemptions += 1
        self._blocks.release(request)
        request.computed = 0
        request.prefill_end = request.prompt_tokens + request.generated


def _steady() -> float:
    return 1.0


class ReplicaModel:
    """The queue, the batch and the GPU cache of one replica.

    ``noise`` returns the factor on the duration of each step. ``meter`` measures steps and loads.
    """

    def __init__(
        self,
        shape: Shape,
        rates: Rates,
        tiers: LowerTiers,
        *,
        noise: Callable[[], float] = _steady,
        meter: ReplicaMeter | None = None,
    ) -> None:
        self.shape = shape
        self.rates = rates
        self.blocks = RequestBlocks(shape)
        self.cache = self.blocks.cache
        self.totals = Totals()
        self.waiting: deque[SimRequest] = deque()
        self.is_blocked = False
        """Whether a waiting request was told by the tiers to ask again."""
        self.lent: set[SimRequest] = set()
        """Finished requests whose KV others may pull."""
        self._pulled: list[tuple[SimRequest, int]] = []
        self._tiers = tiers
        self._batch = Batch(shape, rates, self.blocks, noise)
        self._meter = meter or ReplicaMeter(StepMeter(), BandwidthMeter())
        self._copies = Copies(shape, rates, tiers, self._meter)
        self._step: Step | None = None
        self._news: list[TokenProgress] = []

    @property
    def running(self) -> Sequence[SimRequest]:
        """Requests that compute, in the order of their admission."""
        return self._batch.running

    @property
    def loading(self) -> Sequence[tuple[float, SimRequest]]:
        """Requests whose KV is on its way to the GPU, and when it will have come."""
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

    def end_loan(self, request: SimRequest, now_s: float) -> bool:
        """Return the blocks that a finished request has lent; False if it lends none any more."""
        self.advance(now_s)
        if request not in self.lent:
            return False
        self.lent.remove(request)
        self.blocks.release(request)
        self._look_again(now_s)
        return True

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

    def take_progress(self) -> list[TokenProgress]:
        """Return what the callers should hear, once."""
        news, self._news = self._news, []
        return news

    def take_pulled(self) -> list[tuple[SimRequest, int]]:
        """Return the requests whose pulls have ended since the last call, with the tokens pulled.

        None were if the GPU held the whole prompt.
        """
        pulled, self._pulled = self._pulled, []
        return pulled

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
        self._meter.add_step(step.step_s, step.prefill, len(step.decoding))
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
            if request.lends:
                self.lent.add(request)
            self._end(request)

    def _gave(self, request: SimRequest, tokens: int, at_s: float) -> None:
        if request.generated:
            self.totals.between_tokens += tokens
            self.totals.between_tokens_s += at_s - request.last_token_s
        request.last_token_s = at_s
        request.generated += tokens
        self.totals.generated += tokens
        if request.generated >= request.output_tokens:
            request.finished_s = at_s
        elif not request.emit_every or (request.generated - 1) % request.emit_every:
            return
        self._news.append(TokenProgress(request, request.generated, at_s))

    # --- admission

    def _admit_loaded(self, now_s: float) -> None:
        for request in self._copies.loaded(now_s):
            if not self._batch.may_grow:
                break
            self._copies.end_load(request)
            if request.pull_tokens:
                self._pulled.append((request, request.pull_tokens))
                self.totals.pulled += request.pull_tokens
                request.pull_tokens = 0
            self.blocks.publish(request, request.computed)
            self._batch.join(request)

    def _admit_waiting(self, now_s: float) -> None:
        """Admit from the head of the queue, passing over requests that wait for lower tiers."""
        skipped: list[SimRequest] = []
        while self.waiting and self._batch.may_grow:
            request = self.waiting[0]
            gpu_blocks = self.blocks.match(request)
            has_room = self.blocks.has_room(request, gpu_blocks)
            if not has_room and request.is_looked_up:
                break  # a long prompt's lookup takes time, and would have no effect
            request.is_looked_up = True
            # What is pulled is not looked up, but the tiers must know the request.
            known_tokens = max(gpu_blocks * self.shape.block_tokens, request.pull_tokens)
            others = self._batch.prefilling + len(self.loading) + len(self.waiting) - 1
            found = self._tiers.find(request, known_tokens, others=others + len(skipped))
            if found is None:
                self.is_blocked = True
                skipped.append(self.waiting.popleft())
                continue
            if not has_room:
                break
            self.waiting.popleft()
            self._admit(request, gpu_blocks, found, now_s)
        self.waiting.extendleft(reversed(skipped))

    def _admit(
        self, request: SimRequest, gpu_blocks: int, found: LoadableTokens, now_s: float
    ) -> None:
        """Let a request run by what is there of it, after its load if there is one."""
        self.blocks.admit(request, gpu_blocks)
        tokens = found.cpu + found.disk
        if not request.preemptions:
            gpu_tokens = gpu_blocks * self.shape.block_tokens
            self._count(request, CachedTokens(gpu_tokens, found.cpu, found.disk))
        if request.pull_tokens:
            self._begin_pull(request, now_s)
            return
        if not tokens:
            self._batch.join(request)
            return
        request.computed = min(request.computed + tokens, request.prefill_end - 1)
        # For all of the prompt, lest two loads hold what neither can go on without.
        self.blocks.grow(request, request.prefill_end)
        self._copies.begin_load(request, tokens, now_s)

    def _begin_pull(self, request: SimRequest, now_s: float) -> None:
        """Pull what the GPU lacks of what is lent; the last token is computed in any case."""
        tokens = min(request.pull_tokens, request.prefill_end - 1) - request.computed
        request.pull_tokens = max(0, tokens)
        if tokens <= 0:
            self._pulled.append((request, 0))
            self._batch.join(request)
            return
        request.computed += tokens
        self.blocks.grow(request, request.prefill_end)
        self._copies.begin_pull(request, tokens, now_s)

    def _count(self, request: SimRequest, cached: CachedTokens) -> None:
        request.cached = cached
        totals = self.totals
        totals.queries += request.prompt_tokens
        totals.cached.gpu += cached.gpu
        totals.cached.cpu += cached.cpu
        totals.cached.disk += cached.disk

    # --- the end

    def _end(self, request: SimRequest) -> None:
        """Give back all that a request has and does not lend; it is in no queue any more."""
        request.is_over = True
        if request not in self.lent:
            self.blocks.release(request)
        self._tiers.forget(request)

    def check(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        self.cache.check()
        self._copies.check()
        holding = [*self.running, *(each for _, each in self.loading)]
        assert self.cache._unkeyed == sum(each.unkeyed for each in (*holding, *self.lent))
        assert all(each.is_over and each.lends for each in self.lent)
        assert not any(each.is_over for each in [*holding, *self.waiting])
        assert not any(each.num_blocks for each in self.waiting)
