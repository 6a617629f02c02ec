"""The figures of `bench.nixl`."""

from dataclasses import replace

import pytest

from bench.nixl.__main__ import Sample, Stream, figures, table


def test_gaps_that_begin_or_end_in_the_period_count() -> None:
    """A token that waits for all of a prefill comes after it."""
    stream = Stream(times_s=[0.0, 1.0, 2.0, 7.0, 8.0, 9.0])
    assert stream.gaps_s(2.5, 6.0) == [5.0]
    assert stream.gaps_s(1.5, 7.5) == [1.0, 5.0, 1.0]
    assert stream.gaps_s(20.0, 30.0) == []


def test_figures_are_medians_of_one_kind() -> None:
    one = Sample(kind="local", tpot_mean_s=0.1, longest_gap_s=1.0, long_ttft_s=2.0, equal_answers=4)
    samples = [replace(one, tpot_mean_s=tpot_s) for tpot_s in (0.1, 0.2, 0.9)]
    samples.append(replace(one, kind="split", tpot_mean_s=0.05))
    assert figures(samples, "local")["tpot_mean_s"] == pytest.approx(0.2)
    cells = ["local", "200", "ms", "1000", "ms", "2.00", "s", "4"]
    assert table(samples).splitlines()[1].split() == cells
