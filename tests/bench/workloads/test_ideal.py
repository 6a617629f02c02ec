"""The ideal run: what an infinite cache finds, and when a turn is due."""

import pytest

from bench.workloads.ideal import IdealRun, SeenPrompts
from bench.workloads.session import Session, Span, Turn
from simulator.model.replica_machine import Rates, Shape


def test_seen_prompts_match_up_to_the_first_difference() -> None:
    seen = SeenPrompts()
    assert seen.add([Span(1, 512), Span(2, 100)]) == 0
    assert seen.add([Span(1, 512), Span(2, 40)]) == 552
    assert seen.add([Span(1, 512), Span(2, 300)]) == 612
    assert seen.add([Span(1, 512), Span(3, 10), Span(2, 300)]) == 512
    assert seen.add([Span(2, 300)]) == 0
    # The beginning of a text, then another one.
    assert seen.add([Span(1, 200), Span(9, 10)]) == 200


def test_a_turn_is_due_a_pause_after_the_answer_before() -> None:
    rates = Rates(prefill_tokens_per_s=1000.0, step_s=0.0, decode_s_per_sequence=0.01)
    run = IdealRun(rates, Shape(block_tokens=64))
    turns = (Turn((Span(1, 640),), 65), Turn((Span(2, 100),), 1, 5.0))
    first, second = run.answer(Session(3.0, turns))
    assert (first.offset_s, first.ttft_s, first.total_s) == pytest.approx((0.0, 0.64, 1.28))
    assert second.offset_s == pytest.approx(1.28 + 5.0)
    assert (second.prompt_tokens, second.matched_tokens) == (805, 704)


def test_a_long_context_makes_an_answer_longer() -> None:
    rates = Rates(step_s=0.0, decode_s_per_sequence=0.0, decode_s_per_context_token=1e-6)
    (turn,) = IdealRun(rates, Shape()).answer(Session(0.0, (Turn((Span(1, 950),), 101),)))
    assert turn.total_s - turn.ttft_s == pytest.approx(100 * 1e-3)


def test_what_one_session_sent_the_next_one_finds() -> None:
    run = IdealRun(Rates(), Shape(block_tokens=64))
    session = Session(0.0, (Turn((Span(1, 640), Span(2, 100)), 5),))
    other = Session(1.0, (Turn((Span(1, 640), Span(3, 100)), 5),))
    assert [run.answer(each)[0].matched_tokens for each in (session, other)] == [0, 640]
    # The last token is always computed: eleven blocks of 740 tokens, not 740.
    assert run.answer(session)[0].matched_tokens == 704
