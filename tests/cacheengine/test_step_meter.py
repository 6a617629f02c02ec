"""What steps take, fitted to steps of which the truth is known."""

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheengine.step_meter import StepMeter

BASE_S, PREFILL_S, ATTENTION_S, DECODE_S = 0.006, 1 / 8000, 1 / 8000 / 20_000, 0.0002


def step_s(prefill_tokens: int, context: int, decoding: int) -> float:
    attended = prefill_tokens * (context + prefill_tokens / 2)
    return BASE_S + PREFILL_S * prefill_tokens + ATTENTION_S * attended + DECODE_S * decoding


def add(meter: StepMeter, source: random.Random, count: int, slower: float = 1.0) -> None:
    """Add steps of which half only decode; each is off by some percent."""
    for number in range(count):
        prefill_tokens = source.choice([64, 500, 1000]) if number % 2 else 0
        context, decoding = source.randrange(30_000), source.randrange(1, 60)
        meter.add(
            step_s(prefill_tokens, context, decoding) * slower * source.lognormvariate(0, 0.05),
            prefill_tokens=prefill_tokens,
            attended=prefill_tokens * (context + prefill_tokens / 2),
            decoding=decoding,
        )


def test_the_parts_are_told_apart() -> None:
    meter = StepMeter(1024)
    add(meter, random.Random(1), 400)
    rates = meter.rates()
    assert rates is not None
    assert rates.step_s == pytest.approx(BASE_S, rel=0.1)
    assert rates.prefill_token_s == pytest.approx(PREFILL_S + BASE_S / 1024, rel=0.05)
    assert rates.attended_token_s == pytest.approx(ATTENTION_S, rel=0.1)
    assert rates.decode_token_s == pytest.approx(DECODE_S / 1024, rel=0.1)
    assert rates.steps >= 190 and rates.tokens > 50_000


def test_on_few_steps_only_what_a_prompt_takes_at_most_is_said() -> None:
    """An engine that has just started should not wait for a slow disk longer than that."""
    meter = StepMeter()
    meter.add(2.0, prefill_tokens=0, attended=0.0, decoding=1)  # it warms up
    assert meter.rates() is None and meter.prefill_s(1000) == inf
    meter.add(0.5, prefill_tokens=4000, attended=8e6, decoding=3)
    assert meter.prefill_s(1000) == pytest.approx(0.125)
    meter = StepMeter()
    add(meter, random.Random(1), 46)
    assert meter.rates() is None and step_s(1000, 0, 0) < meter.prefill_s(1000) < 1
    add(meter, random.Random(1), 2)
    assert 0 < meter.prefill_s(1000) < 1


def test_a_model_that_becomes_slower_is_followed_and_a_halt_is_not() -> None:
    meter, source = StepMeter(1024), random.Random(2)
    add(meter, source, 400)
    before = meter.prefill_s(8000)
    meter.add(60.0, prefill_tokens=1000, attended=500_000.0, decoding=1)
    assert meter.prefill_s(8000) < 1.2 * before
    add(meter, source, 1200, slower=20.0)
    assert meter.prefill_s(8000) == pytest.approx(20 * before, rel=0.1)


def test_steps_that_are_all_alike_still_predict_their_own_kind() -> None:
    meter = StepMeter(1024)
    for _ in range(50):
        meter.add(0.2, prefill_tokens=1024, attended=1024 * 512.0, decoding=0)
    assert meter.prefill_s(1024) == pytest.approx(0.2, rel=0.02)


def test_two_steps_in_one_count_the_base_twice() -> None:
    meter, source = StepMeter(1024), random.Random(3)
    for number in range(400):
        tokens, decoding = (0, 500, 1000)[number % 3], source.randrange(1, 60)
        if tokens:
            both_s = step_s(tokens, 0, decoding) + step_s(0, 0, decoding)
            attended = tokens * tokens / 2
            both = 2 * decoding
            meter.add(both_s, prefill_tokens=tokens, attended=attended, decoding=both, steps=2)
        else:
            meter.add(step_s(0, 0, decoding), prefill_tokens=0, attended=0.0, decoding=decoding)
    assert meter.prefill_s(1000) == pytest.approx(step_s(1000, 0, 0), rel=0.05)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e4), st.integers(0, 10**6), st.floats(0, 1e9), st.integers(0, 1000)
        ),
        max_size=40,
    )
)
def test_no_rate_is_negative_or_infinite(steps: list[tuple[float, int, float, int]]) -> None:
    meter = StepMeter()
    for seconds, prefill_tokens, attended, decoding in steps:
        meter.add(seconds, prefill_tokens=prefill_tokens, attended=attended, decoding=decoding)
    if (rates := meter.rates()) is not None:
        for each in (rates.step_s, rates.prefill_token_s, rates.attended_token_s):
            assert 0 <= each < inf
