"""Estimates against the times that the model then takes."""

from collections.abc import Callable, Iterator

import pytest

from replay.estimates import Foresight, estimate
from simulator.model.lower_tier_view import NoLowerTiers
from tests.simulator.helpers import Bench, model, request, run


@pytest.fixture
def benches() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**sizes: int) -> Bench:
        made.append(Bench(**sizes))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_the_estimate_is_what_then_happens(benches: Callable[..., Bench]) -> None:
    """Alone, behind a queue, and with KV in each tier."""
    bench = benches(cpu_chunks=50, disk_chunks=100, gpu_tokens=1000)
    foresight = Foresight(bench.model, bench.tiers)
    for at_s, name, prompt_tokens in (
        (0.0, "a", 100),
        (1000.0, "a", 95),
        (2000.0, "b", 250),
        (2001.0, "c", 130),
        (2002.0, "c", 130),
    ):
        bench.model.advance(at_s)
        asked = request(f"{name}@{at_s}", prompt_tokens, text=name)
        expected = estimate(foresight, asked, at_s)
        foresight.expect(asked)
        bench.model.arrive(asked, at_s)
        if at_s < 2000.0:
            run(bench.model)
            foresight.forget(asked)
            bench.model.clear_gpu()
            assert asked.first_token_s is not None
            assert expected.ttft_s == pytest.approx(asked.first_token_s - at_s)
        asked_last, expected_last = asked, expected
    run(bench.model)
    assert asked_last.first_token_s is not None
    # Steps are shared at the seams: a step's fixed second or two.
    assert expected_last.ttft_s == pytest.approx(asked_last.first_token_s - 2002.0, abs=2.5)


def test_the_estimate_counts_what_is_loaded(benches: Callable[..., Bench]) -> None:
    bench = benches(cpu_chunks=50, disk_chunks=0, gpu_tokens=100)
    foresight = Foresight(bench.model, bench.tiers)
    bench.serve("a", 100, 0.0)
    bench.serve("b", 100, 50.0)
    asked = request("again", 95, text="a")
    # 80 tokens are loaded in 0.8 s; 15 are computed in 2.5 s.
    assert estimate(foresight, asked, 100.0).ttft_s == pytest.approx(3.3)
    assert estimate(foresight, asked, 100.0).busy_s == pytest.approx(2.3)


def test_of_a_prompt_that_is_on_the_gpu_the_last_block_is_expected() -> None:
    sim = model()
    foresight = Foresight(sim, NoLowerTiers())
    sim.arrive(request("a", 40), 0.0)
    run(sim)
    again = request("b", 40, text="a")
    foresight.expect(again)
    assert foresight.remaining_prefill(again) == 10


def test_a_waiting_prompt_promises_its_blocks_until_it_is_over() -> None:
    foresight = Foresight(model(), NoLowerTiers())
    first, second = request("a", 60), request("b", 65, text="a")
    foresight.expect(first)
    assert foresight.known_tokens(second) == 60
    foresight.forget(first)
    assert foresight.known_tokens(second) == 0
    foresight.check([])
