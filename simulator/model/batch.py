"""The requests that run, what each computes in a step, and which of them must give way. Pure."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from simulator.model.blocks import Blocks
from simulator.model.copies import Copies
from simulator.model.rates import Rates, Shape
from simulator.model.request import SimRequest


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
        self, shape: Shape, rates: Rates, blocks: Blocks, noise: Callable[[], float]
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
        count = min(each.steps_to_news() for each in decoding)
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
        """Let a request hold blocks for so many tokens; preempt those admitted last for it.

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
