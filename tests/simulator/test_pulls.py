"""KV that one replica lends and another pulls, in the model."""

from simulator.model.replica_model import ReplicaModel
from simulator.model.sim_request import SimRequest
from tests.simulator.helpers import model, rates, request, run


def lending(sim: ReplicaModel, tokens: int = 100) -> SimRequest:
    """A request that has computed a prompt and lends it."""
    first = request("first", tokens, text="t")
    first.lends = True
    sim.arrive(first, 0.0)
    run(sim)
    return first


def test_lent_blocks_are_held_until_the_loan_ends() -> None:
    sim = model(gpu_tokens=120)
    first = lending(sim)
    assert first.is_over and sim.lent == {first} and sim.cache.held_blocks == 10
    assert not sim.clear_gpu()
    other = request("other", 50)
    sim.arrive(other, 20.0)
    run(sim, 50.0)
    assert other.first_token_s is None, "what is lent leaves no room"
    assert sim.end_loan(first, 60.0) and not sim.end_loan(first, 60.0)
    run(sim)
    assert other.finished_s is not None and sim.cache.held_blocks == 0


def test_a_cancelled_request_lends_nothing() -> None:
    sim = model()
    first = request("first", 500)
    first.lends = True
    sim.arrive(first, 0.0)
    sim.cancel(first, 5.0)
    assert not sim.lent and sim.cache.held_blocks == 0
    sim.check()


def test_a_pull_takes_its_time_and_no_step() -> None:
    """100 tokens at 10/s: until then another request computes as if it were alone."""
    sim = model(speeds=rates(pull_tokens_per_s=10.0))
    second = request("second", 101, text="t")
    second.pull_tokens = 101
    sim.arrive(second, 0.0)
    alone = request("alone", 20)
    sim.arrive(alone, 0.0)
    assert run(sim, 9.0) == [("alone", 1, 3.0)]
    assert sim.take_pulled() == []
    # At 10 s the pull ends; the last token takes a step of its own.
    assert run(sim) == [("second", 1, 11.1)]
    assert sim.take_pulled() == [(second, 100)]
    assert (sim.totals.pulled, sim.totals.prefilled) == (100, 21)


def test_only_what_the_gpu_lacks_is_pulled() -> None:
    sim = model()
    sim.arrive(request("before", 60, text="t"), 0.0)
    run(sim)
    second = request("second", 101, text="t")
    second.pull_tokens = 101
    sim.arrive(second, 100.0)
    run(sim)
    assert sim.take_pulled() == [(second, 40)]
    third = request("third", 101, text="t")
    third.pull_tokens = 101
    sim.arrive(third, 200.0)
    run(sim)
    assert sim.take_pulled() == [(third, 0)], "the lender is told all the same"


def test_a_request_that_leaves_during_its_pull_leaves_nothing() -> None:
    sim = model(speeds=rates(pull_tokens_per_s=10.0))
    second = request("second", 101)
    second.pull_tokens = 101
    sim.arrive(second, 0.0)
    sim.cancel(second, 3.0)
    assert run(sim) == [] and sim.take_pulled() == []
    assert sim.cache.held_blocks == 0
