"""Percentiles of predicted against observed TTFT, over the last answers only."""

from dataclasses import astuple

import pytest

from router.fleet.cost_model import PredictionErrors


def test_nothing_is_said_of_no_answers() -> None:
    assert PredictionErrors().figures() is None


def test_percentiles_are_of_absolute_errors() -> None:
    errors = PredictionErrors()
    for percent in range(1, 101):  # half of them early, half late
        sign = 1 if percent % 2 else -1
        errors.note(2.0, 2.0 * (1 + sign * percent / 100) + 1e-12)
    figures = errors.figures()
    assert figures is not None
    assert figures.answers == 100
    assert astuple(figures.ratio) == pytest.approx((0.50, 0.90, 0.99))
    assert astuple(figures.seconds) == pytest.approx((1.0, 1.8, 1.98))
    assert figures.bias == pytest.approx(1.0, abs=0.03)


def test_the_bias_says_which_way() -> None:
    late, early = PredictionErrors(), PredictionErrors()
    for _ in range(9):
        late.note(1.0, 1.5)
        early.note(1.0, 0.5)
    late_figures, early_figures = late.figures(), early.figures()
    assert late_figures is not None
    assert early_figures is not None
    assert (late_figures.bias, early_figures.bias) == (1.5, 0.5)
    assert late_figures.ratio == early_figures.ratio


def test_old_answers_are_forgotten() -> None:
    errors = PredictionErrors()
    for _ in range(PredictionErrors.KEPT):
        errors.note(1.0, 100.0)
    for _ in range(PredictionErrors.KEPT):
        errors.note(1.0, 1.0)
        assert len(errors) == PredictionErrors.KEPT
    figures = errors.figures()
    assert figures is not None
    assert (figures.answers, figures.ratio.p99, figures.bias) == (PredictionErrors.KEPT, 0.0, 1.0)


@pytest.mark.parametrize("pair", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_what_is_no_time_is_left_out(pair: tuple[float, float]) -> None:
    errors = PredictionErrors()
    errors.note(*pair)
    assert errors.figures() is None
