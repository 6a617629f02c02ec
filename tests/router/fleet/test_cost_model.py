"""Predicted seconds, and rates that learn from what was observed."""

import random
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.cost_weights import LearningWeights
from router.config.settings import RatesConfig
from router.fleet.cost_model import CostModel, CostPart, Work

CONFIG = RatesConfig(
    prefill_tokens_per_s=1000.0,
    cpu_load_bytes_per_s=1e9,
    disk_bytes_per_s=1e8,
    remote_bytes_per_s=1e7,
)


def test_the_fetch_overlaps_the_queue_and_nothing_else_does() -> None:
    rates = CostModel(CONFIG)
    work = Work(new_tokens=10, load_bytes=2e9, disk_bytes=3e8, queue_s=1.0)
    cost = rates.cost(work)
    assert cost.fetch_s == pytest.approx(3.0)
    assert cost.load_s == pytest.approx(2.0)
    assert cost.ttft_s == pytest.approx(cost.base_s + 3.0 + 2.0 + cost.prefill_s)
    queued = rates.cost(Work(new_tokens=10, load_bytes=2e9, disk_bytes=3e8, queue_s=7.0))
    assert queued.ttft_s == pytest.approx(cost.base_s + 7.0 + 2.0 + cost.prefill_s)


def test_context_makes_a_prefill_longer() -> None:
    rates = CostModel(CONFIG)
    alone = rates.cost(Work(new_tokens=100)).prefill_s
    behind = rates.cost(Work(new_tokens=100, matched_tokens=32_000)).prefill_s
    assert alone == pytest.approx(0.1, rel=0.01)
    assert behind > 1.5 * alone


def test_running_decodes_lengthen_a_prefill() -> None:
    rates = CostModel(CONFIG)
    alone = rates.cost(Work(new_tokens=100)).prefill_s
    beside = rates.cost(Work(new_tokens=100, decoding=10)).prefill_s
    assert beside == pytest.approx(alone * (1 + 10 * CONFIG.decode_slowdown), rel=0.01)


TRUE_S = {
    CostPart.BASE: 0.05,
    CostPart.PREFILL: 1 / 4000,
    CostPart.ATTENTION: 1 / 4000 / 6000,
    CostPart.DECODE: 0.01 / 4000,
    CostPart.LOAD: 1 / 3e8,
    CostPart.DISK: 1 / 4e8,
}
"""A replica unlike the configured one."""


def true_ttft_s(work: Work) -> float:
    fetch_s = TRUE_S[CostPart.DISK] * work.disk_bytes
    return (
        TRUE_S[CostPart.BASE]
        + max(work.queue_s, fetch_s)
        + TRUE_S[CostPart.LOAD] * work.load_bytes
        + TRUE_S[CostPart.PREFILL] * work.new_tokens
        + TRUE_S[CostPart.ATTENTION] * work.attended
        + TRUE_S[CostPart.DECODE] * work.new_tokens * work.decoding
    )


def some_work(source: random.Random) -> Work:
    prompt = source.randrange(100, 16_000)
    matched = source.choice([0, prompt // 2, prompt - 20])
    tier = source.choice(["gpu", "cpu", "disk"])
    return Work(
        new_tokens=prompt - matched,
        matched_tokens=matched,
        load_bytes=0.0 if tier == "gpu" else matched * 32_768.0,
        disk_bytes=matched * 32_768.0 if tier == "disk" else 0.0,
        queue_s=source.choice([0.0, 0.0, source.uniform(0, 3)]),
        decoding=source.randrange(0, 64),
    )


def learned(
    rates: CostModel, source: random.Random, count: int, outliers: float = 0.0
) -> list[float]:
    """Let rates learn; return by how much each prediction was wrong, 0.1 for 10%."""
    errors = []
    for _ in range(count):
        work = some_work(source)
        observed_s = true_ttft_s(work) * source.lognormvariate(0, 0.1)
        if source.random() < outliers:
            observed_s *= 10
        errors.append(abs(rates.cost(work).ttft_s / true_ttft_s(work) - 1))
        rates.observe(work, observed_s)
    return errors


@pytest.mark.parametrize("outliers", [0.0, 0.05])
@pytest.mark.parametrize("start", [500.0, 4000.0, 40_000.0])
def test_all_rates_are_learned_together(start: float, outliers: float) -> None:
    """From ten times wrong, and with every twentieth answer ten times too late."""
    rates = CostModel(RatesConfig(prefill_tokens_per_s=start, decode_slowdown=0.1))
    errors = learned(rates, random.Random(4), 3000, outliers)
    assert median(errors[300:]) < 0.06
    for part, seconds in TRUE_S.items():
        assert rates.per_second(part) == pytest.approx(1 / seconds, rel=0.35), part


def test_a_decode_slowdown_is_found_where_none_was_configured() -> None:
    rates = CostModel(RatesConfig(prefill_tokens_per_s=4000.0, decode_slowdown=0.0))
    learned(rates, random.Random(4), 3000)
    assert rates.per_second(CostPart.DECODE) == pytest.approx(1 / TRUE_S[CostPart.DECODE], rel=0.35)


def test_a_replica_that_changes_is_followed() -> None:
    """Though robust: one that is three times slower for good is not an outlier."""
    rates, work = CostModel(CONFIG), Work(new_tokens=2000)
    for _ in range(500):
        rates.observe(work, 1.0)
    for _ in range(60):
        rates.observe(work, 3.0)
    assert rates.cost(work).ttft_s == pytest.approx(3.0, rel=0.15)


def test_an_outlier_moves_little() -> None:
    rates = CostModel(CONFIG)
    work = Work(new_tokens=1000)
    for _ in range(50):
        rates.observe(work, 1.0)
    before_s = rates.cost(work).ttft_s
    for factor in (10.0, 0.1, 500.0, 1e-6):
        rates.observe(work, factor)
        assert rates.cost(work).ttft_s == pytest.approx(before_s, rel=0.08), factor


def test_a_rate_that_had_no_part_is_left_alone() -> None:
    rates = CostModel(CONFIG)
    before = {part: rates.per_second(part) for part in CostPart}
    rates.observe(Work(new_tokens=1000, queue_s=2.0, disk_bytes=1e6), 60.0)
    moved = {part for part in CostPart if rates.per_second(part) != before[part]}
    assert moved == {CostPart.BASE, CostPart.PREFILL, CostPart.ATTENTION}
    assert rates.per_second(CostPart.PREFILL) < 1000


def test_a_long_queue_teaches_little() -> None:
    """A request that waited says little about computing, however wrong the queue was."""
    rates = CostModel(CONFIG)
    rates.observe(Work(new_tokens=1000, queue_s=50.0), 500.0)
    assert rates.per_second(CostPart.PREFILL) == pytest.approx(1000, rel=0.15)


LOADING = Work(new_tokens=10, load_bytes=1e9)
COMPUTING = Work(new_tokens=1000)
READING = Work(new_tokens=10, load_bytes=1e6, disk_bytes=1e8)


@pytest.mark.parametrize(
    ("part", "alone", "waiting"),
    [
        (CostPart.LOAD, LOADING, replace(LOADING, queue_s=10.0)),
        (CostPart.PREFILL, COMPUTING, replace(COMPUTING, queue_s=10.0)),
    ],
)
def test_the_error_of_a_queue_is_not_taken_for_a_rates(
    part: CostPart, alone: Work, waiting: Work
) -> None:
    """A second too late: without a queue it was the second that was predicted; behind ten it may
    be the queue's."""

    def slowed(work: Work, queue_noise: float) -> float:
        rates = CostModel(CONFIG, LearningWeights(queue_noise=queue_noise))
        before = rates.per_second(part)
        rates.observe(work, rates.cost(work).ttft_s + 1.0)
        return before / rates.per_second(part)

    assert slowed(alone, 1.0) == slowed(alone, 0.0) == pytest.approx(1.89, abs=0.01)
    assert slowed(waiting, 0.0) == pytest.approx(1.09, abs=0.01)
    assert slowed(waiting, 1.0) == pytest.approx(1.01, abs=0.001)


def test_a_fetch_that_hides_the_queue_teaches_as_if_there_were_none() -> None:
    hidden, none = CostModel(CONFIG), CostModel(CONFIG)
    for rates, work in ((hidden, replace(READING, queue_s=0.9)), (none, READING)):
        rates.observe(work, 2.0)
    assert hidden.learned() == none.learned() != {}


@pytest.mark.parametrize(("queue_noise", "slowest"), [(0.0, 0.46), (1.0, 0.81)])
def test_queues_that_are_always_underestimated_leave_a_rate_about_right(
    queue_noise: float, slowest: float
) -> None:
    """Three of four requests wait, for three times the predicted time."""
    rates, source = CostModel(CONFIG, LearningWeights(queue_noise=queue_noise)), random.Random(4)
    seen = []
    for _ in range(400):
        queue_s = source.choice([0.0, 10.0, 10.0, 10.0])
        rates.observe(replace(LOADING, queue_s=queue_s), 1.02 + 3 * queue_s)
        seen.append(rates.per_second(CostPart.LOAD) / 1e9)
    assert min(seen) == pytest.approx(slowest, abs=0.01)


def test_what_the_engine_measured_is_taken_over() -> None:
    rates = CostModel(CONFIG)
    assert not rates.knows(CostPart.DISK)
    rates.measured(CostPart.DISK, 0.0)
    assert not rates.knows(CostPart.DISK)
    rates.measured(CostPart.DISK, 5e8)
    assert rates.knows(CostPart.DISK)
    assert rates.per_second(CostPart.DISK) == pytest.approx(5e8)
    rates.measured(CostPart.DISK, 1e3)  # however far from the start
    assert rates.per_second(CostPart.DISK) == pytest.approx(1e3)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e12), st.floats(1e-9, 1e9))))
def test_rates_stay_positive_and_finite(observed: list[tuple[int, float, float]]) -> None:
    rates = CostModel(CONFIG)
    for tokens, load_bytes, ttft_s in observed:
        rates.observe(Work(new_tokens=tokens, load_bytes=load_bytes), ttft_s)
        assert all(0 < rates.per_second(part) < 1e20 for part in CostPart)


def test_rates_converge_monotonously_from_far_away() -> None:
    rates, work = CostModel(CONFIG), Work(new_tokens=10_000)
    gaps = []
    for _ in range(12):
        rates.observe(work, 0.5)
        gaps.append(abs(rates.cost(work).ttft_s - 0.5))
    assert all(after <= before for before, after in pairwise(gaps))
    assert gaps[-1] < 0.1
