"""Predicted seconds, and rates that learn from what was observed."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import RatesConfig
from router.costs import Part, PrefillLine, Rates, Work

CONFIG = RatesConfig(
    prefill_tokens_per_s=1000.0,
    cpu_load_bytes_per_s=1e9,
    disk_bytes_per_s=1e8,
    remote_bytes_per_s=1e7,
)


def test_the_fetch_overlaps_the_queue_and_nothing_else_does() -> None:
    rates = Rates(CONFIG)
    work = Work(new_tokens=10, load_bytes=2e9, disk_bytes=3e8, queue_s=1.0)
    cost = rates.cost(work)
    assert cost.fetch_s == pytest.approx(3.0)
    assert cost.load_s == pytest.approx(2.0)
    assert cost.ttft_s == pytest.approx(cost.base_s + 3.0 + 2.0 + cost.prefill_s)
    queued = rates.cost(Work(new_tokens=10, load_bytes=2e9, disk_bytes=3e8, queue_s=7.0))
    assert queued.ttft_s == pytest.approx(cost.base_s + 7.0 + 2.0 + cost.prefill_s)


def test_context_makes_a_prefill_longer() -> None:
    rates = Rates(CONFIG)
    alone = rates.cost(Work(new_tokens=100)).prefill_s
    behind = rates.cost(Work(new_tokens=100, matched_tokens=32_000)).prefill_s
    assert alone == pytest.approx(0.1, rel=0.01)
    assert behind > 1.5 * alone


def test_running_decodes_stretch_a_prefill() -> None:
    rates = Rates(CONFIG)
    assert rates.stretch(0) == 1.0
    stretched = rates.cost(Work(new_tokens=100, stretch=rates.stretch(10)))
    alone = rates.cost(Work(new_tokens=100))
    assert stretched.prefill_s == pytest.approx(alone.prefill_s * (1 + 10 * CONFIG.decode_slowdown))


def true_ttft_s(work: Work) -> float:
    """A replica unlike the configured one: slower, with its own attention term."""
    attended = work.new_tokens * (work.matched_tokens + work.new_tokens / 2)
    prefill_s = work.new_tokens / 4000 + attended / 4000 / 4000
    return 0.05 + prefill_s + work.load_bytes / 3e8


def test_all_rates_are_learned_together() -> None:
    """After 200 requests of all kinds the mean error is a few percent, from 5x wrong."""
    source = random.Random(4)
    rates = Rates(RatesConfig(prefill_tokens_per_s=20_000.0))
    errors = []
    for _ in range(300):
        prompt = source.randrange(500, 16_000)
        matched = source.choice([0, prompt // 2, prompt - 20])
        in_cpu = matched * source.choice([0.0, 1.0])
        work = Work(new_tokens=prompt - matched, matched_tokens=matched, load_bytes=in_cpu * 8192)
        truth_s = true_ttft_s(work) * source.lognormvariate(0, 0.1)
        errors.append(abs(rates.cost(work).ttft_s / truth_s - 1))
        rates.observe(work, truth_s)
    assert sum(errors[:5]) / 5 > 0.3
    assert sum(errors[-100:]) / 100 < 0.15


def test_an_outlier_moves_little() -> None:
    rates = Rates(CONFIG)
    work = Work(new_tokens=1000)
    for _ in range(50):
        rates.observe(work, 1.0)
    before_s = rates.cost(work).ttft_s
    rates.observe(work, 500.0)
    assert rates.cost(work).ttft_s < 1.2 * before_s
    rates.observe(work, 1e-6)
    assert rates.cost(work).ttft_s > 0.8 * before_s


def test_a_rate_that_had_no_part_is_left_alone() -> None:
    rates = Rates(CONFIG)
    rates.observe(Work(new_tokens=1000, queue_s=2.0, disk_bytes=1e6), 60.0)
    assert rates.per_second(Part.DISK) == pytest.approx(1e8)
    assert rates.per_second(Part.LOAD) == pytest.approx(1e9)
    assert rates.per_second(Part.PREFILL) < 1000


def test_what_the_engine_measured_is_taken_over() -> None:
    rates = Rates(CONFIG)
    assert not rates.knows(Part.DISK)
    rates.measured(Part.DISK, 0.0)
    assert not rates.knows(Part.DISK)
    rates.measured(Part.DISK, 5e8)
    assert rates.knows(Part.DISK)
    assert rates.per_second(Part.DISK) == pytest.approx(5e8)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e12), st.floats(1e-9, 1e9))))
def test_rates_stay_positive_and_finite(observed: list[tuple[int, float, float]]) -> None:
    rates = Rates(CONFIG)
    for tokens, load_bytes, ttft_s in observed:
        rates.observe(Work(new_tokens=tokens, load_bytes=load_bytes), ttft_s)
        assert all(0 < rates.per_second(part) < 1e20 for part in Part)


def test_a_line_queues_one_prefill_behind_another() -> None:
    line = PrefillLine()
    line.join(2.0, 10.0)
    assert line.queue_s(10.0) == pytest.approx(2.0)
    line.join(3.0, 11.0)
    assert line.queue_s(11.0) == pytest.approx(4.0)
    assert line.queue_s(20.0) == 0.0


def test_an_empty_line_has_no_queue_whatever_was_expected() -> None:
    line = PrefillLine()
    token = line.join(50.0, 0.0)
    line.leave(token, 1.0)
    assert line.queue_s(1.0) == 0.0


def test_who_ends_early_lets_those_behind_come_earlier_once() -> None:
    line = PrefillLine()
    first, second, _third = (line.join(10.0, 0.0) for _ in range(3))
    line.leave(first, 4.0)  # 6 s early: the rest is expected at 14 and 24
    assert line.queue_s(4.0) == pytest.approx(20.0)
    line.leave(second, 14.0)  # on its new time
    assert line.queue_s(14.0) == pytest.approx(10.0)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 10), st.floats(0, 5)), max_size=40))
def test_a_line_is_empty_when_all_have_left(steps: list[tuple[bool, float, float]]) -> None:
    line, now_s = PrefillLine(), 0.0
    waiting: list[float] = []
    for joins, work_s, pause_s in steps:
        now_s += pause_s
        if joins or not waiting:
            waiting.append(line.join(work_s, now_s))
        else:
            line.leave(waiting.pop(0), now_s)
        assert 0 <= line.queue_s(now_s) <= 10 * len(steps)
    for token in waiting:
        line.leave(token, now_s)
    if waiting:
        assert line.queue_s(now_s) == 0.0


def test_rates_converge_monotonously_from_far_away() -> None:
    rates, work = Rates(CONFIG), Work(new_tokens=10_000)
    gaps = []
    for _ in range(12):
        rates.observe(work, 0.5)
        gaps.append(abs(rates.cost(work).ttft_s - 0.5))
    assert all(after <= before for before, after in pairwise(gaps))
    assert gaps[-1] < 0.1
