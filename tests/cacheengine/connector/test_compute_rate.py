"""How fast prompts are computed, learned from the scheduler's steps."""

import pytest

from cacheengine.connector.manager import ComputeRate


def _steps(rate: ComputeRate, *steps: tuple[float, int]) -> ComputeRate:
    for at_s, tokens in steps:
        rate.begin_step(tokens, at_s)
    return rate


def test_nothing_is_known_before_a_prompt_was_computed() -> None:
    assert ComputeRate().seconds(100) == float("inf")
    decoding = _steps(ComputeRate(), *((float(second), 8) for second in range(10)))
    assert decoding.seconds(100) == float("inf")


def test_a_step_of_prompt_tokens_says_the_rate() -> None:
    rate = _steps(ComputeRate(), (0.0, 1000), (0.5, 0))
    assert rate.seconds(4000) == pytest.approx(2.0)


def test_a_step_that_began_while_another_ran_is_not_taken_for_a_fast_one() -> None:
    """Asynchronous scheduling plans the next step at once, and waits with the one after."""
    rate = _steps(ComputeRate(), (0.0, 0), (0.5, 1000), (0.501, 0))
    assert rate.seconds(1000) == pytest.approx(0.5)


def test_recent_steps_count_more() -> None:
    rate = _steps(ComputeRate(), (0.0, 1000), (1.0, 1000), *((1.0 + n, 2000) for n in range(1, 40)))
    assert rate.seconds(2000) == pytest.approx(1.0, rel=0.01)
