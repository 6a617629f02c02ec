"""The scheduler, to exact times: steps of 1 s, 0.1 s a prefilled token, 0.5 s a decode."""

import pytest

from simulator.model.model_events import GpuBlocksCleared, GpuBlocksRemoved, GpuBlocksStored
from simulator.model.replica_machine import Rates, Shape
from tests.simulator.helpers import keys, model, rates, request, run


def test_one_request_prefills_in_steps_of_the_budget_and_then_decodes() -> None:
    sim = model()
    asked = request("a", 150, 3)
    sim.arrive(asked, 5.0)
    # 1 + 10 s for 100 tokens, 1 + 5 for 50, then two steps of 1.5 s.
    assert run(sim) == [("a", 3, 25.0)]
    assert (asked.arrived_s, asked.first_token_s, asked.finished_s) == (5.0, 22.0, 25.0)
    assert sim.cache.held_blocks == 0


def test_who_streams_hears_of_the_first_token_and_then_of_every_few() -> None:
    sim = model()
    sim.arrive(request("a", 10, 8, emit_every=3), 0.0)
    assert run(sim) == [("a", 1, 2.0), ("a", 4, 6.5), ("a", 7, 11.0), ("a", 8, 12.5)]


def test_prefill_slows_the_decodes_beside_it_and_takes_what_they_leave_of_the_budget() -> None:
    sim = model(max_batched_tokens=51, max_sequences=4)
    sim.arrive(request("a", 10, 3, emit_every=1), 0.0)
    sim.arrive(request("b", 60), 1.0)
    # From 2 s on: a decodes, b prefills 50 (1 + 0.5 + 5 s), then 10 (1 + 0.5 + 1 s).
    assert run(sim) == [("a", 1, 2.0), ("a", 2, 8.5), ("b", 1, 11.0), ("a", 3, 11.0)]


def test_the_queue_is_first_in_first_out_and_one_step_takes_several() -> None:
    sim = model()
    for name in "abc":
        sim.arrive(request(name, 40), 0.0)
    # a begins alone; b, c wait for its step to end, and then go together.
    assert run(sim) == [("a", 1, 5.0), ("b", 1, 14.0), ("c", 1, 14.0)]


def test_an_arrival_cuts_a_run_of_decodes_at_the_end_of_the_present_step() -> None:
    sim = model()
    sim.arrive(request("a", 10, 100), 0.0)  # decodes from 2.0 on, 1.5 s each
    sim.arrive(request("b", 10), 6.0)  # within the third: 5.0 to 6.5
    assert run(sim, 9.1) == [("b", 1, 9.0)]  # 1 + 0.5 + 1 s


def test_a_prefix_that_a_running_request_has_computed_is_hit() -> None:
    sim = model()
    first = request("a", 90, 50)
    second = request("b", 90, text="a")
    sim.arrive(first, 0.0)
    sim.arrive(second, 1.0)
    run(sim)
    assert second.cached.gpu == 80  # of 90 tokens the last must be computed again
    assert sim.totals.prefilled == 90 + 10


def test_even_of_a_prompt_that_is_held_whole_the_last_block_is_computed() -> None:
    sim = model()
    sim.arrive(request("a", 40), 0.0)
    run(sim)
    again = request("b", 40, text="a")
    sim.arrive(again, 100.0)
    assert run(sim) == [("b", 1, 102.0)]
    assert again.cached.gpu == 30


def test_a_burst_of_one_prompt_computes_it_once() -> None:
    sim = model(max_sequences=20)
    for number in range(10):
        sim.arrive(request(f"r{number}", 95, text="same"), 0.0)
    run(sim)
    assert sim.totals.prefilled == 95 + 9 * 5
    assert sim.totals.finished == 10


def test_admission_waits_while_the_blocks_are_referenced() -> None:
    sim = model(gpu_tokens=100)
    first, second = request("a", 60, 11), request("b", 50)
    sim.arrive(first, 0.0)  # 7 blocks of 10
    sim.arrive(second, 1.0)  # 5 blocks
    run(sim, 10.0)
    assert [each.id for each in sim.waiting] == ["b"]
    run(sim)
    assert (first.finished_s, second.first_token_s) == (22.0, 28.0)


def test_answers_are_hit_by_the_next_turn_but_for_the_token_that_was_never_run() -> None:
    sim = model()
    sim.arrive(request("a", 20, 21), 0.0)
    run(sim)
    turn = request("b", 60, text="a")
    sim.arrive(turn, 100.0)
    run(sim)
    assert turn.cached.gpu == 40


def test_events_tell_what_comes_and_goes_in_order() -> None:
    sim = model(gpu_tokens=40)
    one, two = request("a", 25), request("b", 25)
    sim.arrive(one, 0.0)
    run(sim)
    sim.arrive(two, 10.0)
    run(sim)
    last = keys("a", 2)[1]
    assert sim.take_events() == [
        GpuBlocksStored(one, 0, 2),
        GpuBlocksRemoved([last]),
        GpuBlocksStored(two, 0, 2),
    ]
    assert sim.take_events() == []
    assert sim.clear_gpu()
    assert sim.take_events() == [GpuBlocksCleared()]


def test_what_was_computed_twice_is_told_once() -> None:
    sim = model()
    base = keys("base", 3)
    one = request("a", 45, shared=base)
    two = request("b", 45, shared=base)
    sim.arrive(one, 0.0)
    sim.cancel(one, 0.5)
    sim.arrive(two, 1.0)
    run(sim)
    events = sim.take_events()
    assert [each for each in events if isinstance(each, GpuBlocksStored)] == [
        GpuBlocksStored(one, 0, 4),
        GpuBlocksStored(two, 3, 4),
    ]


@pytest.mark.parametrize("when_s", [0.0, 3.0, 12.0, 13.0])
def test_a_cancelled_request_leaves_nothing_behind(when_s: float) -> None:
    sim = model(max_sequences=1)
    gone, waiting = request("a", 90, 50), request("b", 10)
    sim.arrive(gone, 0.0)
    sim.arrive(waiting, 0.0)
    sim.cancel(gone, when_s)
    sim.cancel(gone, when_s)
    assert [name for name, *_ in run(sim)] == ["b"]
    assert (sim.totals.cancelled, sim.cache.held_blocks) == (1, 0)


def test_one_that_waits_can_be_cancelled_too() -> None:
    sim = model(max_sequences=1)
    sim.arrive(request("a", 10), 0.0)
    waiting = request("b", 10)
    sim.arrive(waiting, 0.0)
    sim.cancel(waiting, 0.0)
    assert run(sim) == [("a", 1, 2.0)]


def test_a_prompt_larger_than_the_gpu_is_refused() -> None:
    sim = model(gpu_tokens=50)
    with pytest.raises(ValueError, match="60 tokens do not fit on a GPU for 50"):
        sim.arrive(request("a", 60), 0.0)


def test_attention_makes_late_tokens_dearer() -> None:
    sim = model(speeds=rates(attention_tokens=100.0))
    sim.arrive(request("a", 200), 0.0)
    # 100 tokens around position 50, then 100 around 150: 10 * 1.5 + 10 * 2.5 s.
    assert run(sim) == [("a", 1, 42.0)]


def test_late_looks_change_nothing() -> None:
    """Steps end at their own times, however rarely someone looks."""
    outcomes = []
    for looks_s in ([], [1.0, 2.0, 3.3, 7.7, 8.0, 20.0]):
        sim = model()
        asked = [request("a", 70, 5), request("b", 90, 3)]
        for each in asked:
            sim.arrive(each, 0.0)
        for at_s in looks_s:
            sim.poke(at_s)
            sim.check()
        run(sim)
        outcomes.append([time for each in asked for time in (each.first_token_s, each.finished_s)])
    assert outcomes[0] == pytest.approx(outcomes[1])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chunk_tokens": 25}, "make chunk_tokens a multiple"),
        ({"max_batched_tokens": 8}, "nothing would be left for prefill"),
        ({"block_tokens": 0}, "block_tokens is 0"),
    ],
)
def test_a_shape_that_cannot_be_says_why(changes: dict[str, int], said: str) -> None:
    sizes = {"block_tokens": 10, "chunk_tokens": 20, "max_batched_tokens": 100, "max_sequences": 8}
    with pytest.raises(ValueError, match=said):
        Shape(**(sizes | changes))


def test_the_defaults_make_a_decode_of_so_many_tokens_a_second() -> None:
    assert Rates().decode_s(10) == pytest.approx(0.008)
