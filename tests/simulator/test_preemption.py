"""Running requests that find no block: 10 blocks of 10 tokens, steps as in `test_model`."""

from simulator.model.replica_model import ReplicaModel
from simulator.model.sim_request import SimRequest
from tests.simulator.helpers import model, request, run


def two_that_do_not_fit() -> tuple[ReplicaModel, SimRequest, SimRequest]:
    """Each needs 7 of the 10 blocks at its end; a is admitted a step before b."""
    sim = model(gpu_tokens=100)
    first, second = request("a", 40, 30), request("b", 40, 30)
    sim.arrive(first, 0.0)
    sim.arrive(second, 0.0)
    return sim, first, second


def test_a_decode_without_a_block_preempts_the_request_admitted_last() -> None:
    sim, first, second = two_that_do_not_fit()
    sim.arrive(request("c", 40), 1.0)
    run(sim, 40.0)
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert [each.id for each in sim.running] == ["a"]
    assert [each.id for each in sim.waiting] == ["b", "c"]
    assert sim.totals.preempted == 1


def test_one_that_was_preempted_computes_anew_only_what_was_evicted() -> None:
    sim, first, second = two_that_do_not_fit()
    run(sim, 40.0)
    given = second.generated
    assert 0 < given < 30
    run(sim)
    # a ends with 7 blocks, so that 3 of b's full ones are left.
    assert sim.totals.prefilled == 40 + 40 + (40 + given - 30)
    assert (first.generated, second.generated) == (30, 30)
    assert second.computed == second.total_tokens
    assert second.cached.total == 0


def test_preemption_leaves_nothing_behind() -> None:
    sim, *_ = two_that_do_not_fit()
    run(sim)
    assert (len(sim.running), len(sim.waiting), sim.cache.held_blocks) == (0, 0, 0)
    assert (sim.totals.finished, sim.totals.generated) == (2, 60)
    assert sim.blocks.clear()


def test_its_first_token_is_told_once_however_often_it_is_preempted() -> None:
    sim = model(gpu_tokens=100)
    told = []
    for name in "abc":
        sim.arrive(request(name, 20, 60, emit_every=10**9), 0.0)
    told += [(name, tokens) for name, tokens, _ in run(sim)]
    assert sim.totals.preempted > 1
    assert sorted(told) == [(name, tokens) for name in "abc" for tokens in (1, 60)]


def test_one_that_was_preempted_can_be_cancelled() -> None:
    sim, first, second = two_that_do_not_fit()
    run(sim, 40.0)
    assert not second.num_blocks
    sim.cancel(second, 40.0)
    assert [name for name, *_ in run(sim)] == ["a"]
    assert first.generated == 30
    assert sim.cache.held_blocks == 0


def test_a_prompt_in_the_midst_of_its_prefill_gives_way_to_decodes_before_it() -> None:
    sim = model(gpu_tokens=100, max_batched_tokens=6, max_sequences=4)
    early, late = request("a", 30, 31), request("b", 60)
    sim.arrive(early, 0.0)
    sim.arrive(late, 0.0)
    run(sim)
    assert (early.preemptions, late.preemptions) == (0, 1)
    # b had 5 tokens of each step, until a took its fifth block in the eleventh; a's sixth
    # was the last block that b had filled.
    assert sim.totals.prefilled == 30 + 50 + (60 - 40)
