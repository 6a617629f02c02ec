"""Predictions of a replica that queues: the fleet in front of a modelled machine."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from router.config.settings import RatesConfig, ReplicaConfig, RouterConfig
from router.fleet.cost_model import CostPart, ErrorFigures
from router.fleet.fleet import Fleet
from router.fleet.in_flight import Ticket
from tests.router.fleet.helpers import place
from tests.router.prompt.prompts_given import tokens

TOKENS_PER_S, BASE_S, DECODE_SLOWDOWN = 1000.0, 0.02, 0.03


@dataclass
class Machine:
    """One prefill after another, slower the more answers are being decoded."""

    fleet: Fleet
    source: random.Random
    stalls: float
    """Share of prefills during which it hangs for five seconds."""
    free_at_s: float = 0.0
    decoding: int = 0
    events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    count: int = 0

    def at(self, when_s: float, act: Callable[[float], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (when_s, self.count, act))

    def run(self) -> None:
        while self.events:
            when_s, _, act = heapq.heappop(self.events)
            act(when_s)

    def arrive(self, now_s: float) -> None:
        """Take a prompt that nobody holds anything of."""
        prompt = tokens(self.source.randrange(100, 2000), start=self.count * 10_000)
        streamed = self.source.random() < 0.7
        decision = place(self.fleet, prompt, now_s, streamed=streamed)
        ticket = self.fleet.start(decision, now_s)
        seconds = prompt.token_count / TOKENS_PER_S * (1 + DECODE_SLOWDOWN * self.decoding)
        seconds *= self.source.lognormvariate(0, 0.05)
        if self.source.random() < self.stalls:
            seconds += 5.0
        self.free_at_s = max(self.free_at_s, now_s) + seconds
        end_s = self.free_at_s + BASE_S + self.source.uniform(1, 10)
        self.at(self.free_at_s + BASE_S, lambda now_s: self.first(ticket, now_s, streamed=streamed))
        self.at(end_s, lambda now_s: self.end(ticket, now_s))

    def first(self, ticket: Ticket, now_s: float, *, streamed: bool) -> None:
        self.decoding += 1
        if streamed:
            ticket.first_byte(now_s)

    def end(self, ticket: Ticket, now_s: float) -> None:
        self.decoding -= 1
        ticket.first_byte(now_s, streamed=False)
        ticket.finish(now_s, ok=True)


def figures_after(
    count: int, *, load: float, start: float, stalls: float
) -> tuple[Fleet, ErrorFigures]:
    config = RouterConfig(
        replicas=(ReplicaConfig(url="http://host:8000", instance_id="r0"),),
        rates=RatesConfig(prefill_tokens_per_s=start),
    )
    fleet = Fleet(config)
    fleet.up("r0")
    machine = Machine(fleet, random.Random(4), stalls)
    now_s = 0.0
    for _ in range(count):
        now_s += machine.source.expovariate(load / 1.2)
        machine.at(now_s, machine.arrive)
    machine.run()
    figures = fleet.replicas["r0"].errors.figures()
    assert figures is not None
    return fleet, figures


@pytest.mark.parametrize("start", [200.0, 5000.0])
@pytest.mark.parametrize("load", [0.3, 0.8])
def test_queued_prompts_are_predicted_too(load: float, start: float) -> None:
    """From five times wrong rates, with a third of the answers not streamed."""
    fleet, figures = figures_after(600, load=load, start=start, stalls=0.0)
    assert figures.ratio.p50 < 0.1
    assert figures.ratio.p90 < 0.3
    assert figures.bias == pytest.approx(1.0, abs=0.07)
    rates = fleet.replicas["r0"].rates
    assert rates.per_second(CostPart.PREFILL) == pytest.approx(TOKENS_PER_S, rel=0.2)


def test_a_replica_that_hangs_now_and_then_spoils_no_rates() -> None:
    """Twice in a hundred prefills; who waits behind one is late as well, and teaches nothing."""
    fleet, figures = figures_after(600, load=0.8, start=1000.0, stalls=0.02)
    rates = fleet.replicas["r0"].rates
    assert rates.per_second(CostPart.PREFILL) == pytest.approx(TOKENS_PER_S, rel=0.25)
    assert figures.ratio.p50 < 0.25
