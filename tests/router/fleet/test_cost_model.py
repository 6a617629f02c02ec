"""Predicted seconds, and the rates that replicas measure."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.cost_weights import DEFAULT_WEIGHTS
from router.config.settings import RatesConfig
from router.fleet.cost_model import CostModel, CostPart, Work
from warmroute_common.agent_protocol import ComputeRates

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


def test_start_values_are_used_from_the_first_request() -> None:
    rates = CostModel(CONFIG)
    assert rates.measured() == {}
    assert rates.cost(Work(new_tokens=10_000)).prefill_s > 10.0


def test_running_decodes_lengthen_a_prefill() -> None:
    rates = CostModel(CONFIG)
    alone = rates.cost(Work(new_tokens=100)).prefill_s
    beside = rates.cost(Work(new_tokens=100, decoding=10)).prefill_s
    assert beside == pytest.approx(alone * (1 + 10 * CONFIG.decode_slowdown), rel=0.01)


def compute(**changes: float) -> ComputeRates:
    costs = {"step_s": 0.01, "prefill_token_s": 1e-4, "attended_token_s": 1e-9}
    return ComputeRates(decode_token_s=1e-6, steps=100, tokens=50_000, **(costs | changes))


def test_what_an_engine_measures_is_used() -> None:
    rates = CostModel(CONFIG)
    start = rates.seconds(CostPart.BASE)
    rates.report_compute(compute())
    cost = rates.cost(Work(new_tokens=1000, matched_tokens=1000, decoding=10))
    assert cost.base_s == pytest.approx(start + 0.01)
    assert cost.prefill_s == pytest.approx(0.1 + 1000 * 1500 * 1e-9 + 1000 * 10 * 1e-6)
    assert rates.measured()[CostPart.PREFILL] == pytest.approx(1e4)
    assert rates.measured_on(CostPart.PREFILL) == 50_000
    rates.report_compute(compute(attended_token_s=0.0))
    assert CostPart.ATTENTION not in rates.measured()


@pytest.mark.parametrize("per_second", [0.0, -1.0, inf, nan])
def test_what_is_no_measurement_changes_nothing(per_second: float) -> None:
    rates = CostModel(CONFIG)
    rates.report(CostPart.DISK, per_second, 1e9)
    assert not rates.knows(CostPart.DISK)
    assert rates.per_second(CostPart.DISK) == pytest.approx(1e8)


def test_a_speed_that_is_not_measured_again_is_forgotten() -> None:
    """Else a tier that was slow once would not be used, and so never measured, again."""
    rates = CostModel(CONFIG)
    rates.report(CostPart.DISK, 1e6, 1e9)
    rates.report(CostPart.LOAD, 1e6, 1e9)
    for _ in range(61):
        assert rates.knows(CostPart.DISK)
        rates.report(CostPart.DISK, 1e6, 1e9)  # the agent repeats what it measured then
        rates.tick()
    assert not rates.knows(CostPart.DISK)
    assert rates.per_second(CostPart.DISK) == pytest.approx(1e8)
    assert not rates.knows(CostPart.LOAD), "prompts may go where less is loaded"
    rates.report(CostPart.DISK, 2e8, 2e9)
    assert rates.per_second(CostPart.DISK) == pytest.approx(2e8)


def test_a_speed_of_computing_is_forgotten_only_while_the_replica_is_idle() -> None:
    """A busy server that reports nothing shows it rarely; one that gets no requests never."""
    rates, work = CostModel(CONFIG), Work(new_tokens=4000)
    before_s = rates.cost(work).prefill_s
    for _ in range(9):
        rates.note_alone(work, 100 * before_s)
    for _ in range(200):
        rates.tick(is_idle=False)
    assert rates.cost(work).prefill_s == pytest.approx(100 * before_s, rel=0.01)
    for _ in range(61):
        rates.tick(is_idle=True)
    assert rates.cost(work).prefill_s == before_s
    rates.note_alone(work, 2 * before_s)
    assert rates.cost(work).prefill_s < 2.1 * before_s, "what was seen before is forgotten, too"


def test_later_copies_count_more() -> None:
    rates = CostModel(CONFIG)
    rates.note_copy(10**9, 1.0)
    assert rates.per_second(CostPart.PEER) == pytest.approx(1e9)
    for _ in range(20):
        rates.note_copy(10**9, 10.0)
    assert rates.per_second(CostPart.PEER) == pytest.approx(1e8, rel=0.1)
    assert rates.measured_on(CostPart.PEER) == 21 * 10**9


def test_output_speed_is_measured_on_answers_unless_the_server_reports_it() -> None:
    rates = CostModel(CONFIG)
    assert rates.seconds(CostPart.OUTPUT_TOKEN) == DEFAULT_WEIGHTS.output_token_s
    rates.note_output_tokens(0, 1.0)
    assert not rates.knows(CostPart.OUTPUT_TOKEN)
    rates.note_output_tokens(100, 10.0)
    assert rates.seconds(CostPart.OUTPUT_TOKEN) == pytest.approx(0.1)
    for _ in range(90):
        rates.note_output_tokens(100, 1.0)
    assert rates.seconds(CostPart.OUTPUT_TOKEN) == pytest.approx(0.01, rel=0.05)
    rates.report_output_tokens(40.0, 1000)
    rates.note_output_tokens(100, 1.0)
    assert rates.seconds(CostPart.OUTPUT_TOKEN) == pytest.approx(1 / 40)


def test_an_output_speed_is_forgotten_with_the_answers_that_it_was_measured_on() -> None:
    rates = CostModel(CONFIG)
    rates.note_output_tokens(1000, 1000.0)
    for _ in range(61):
        rates.tick()
    assert rates.seconds(CostPart.OUTPUT_TOKEN) == DEFAULT_WEIGHTS.output_token_s
    rates.note_output_tokens(10, 1.0)
    assert rates.seconds(CostPart.OUTPUT_TOKEN) == pytest.approx(0.1)


def test_a_server_that_reports_nothing_gets_one_number_from_prefills_alone() -> None:
    rates, work = CostModel(CONFIG), Work(new_tokens=4000, decoding=3)
    before = rates.cost(work).prefill_s
    for _ in range(5):
        rates.note_alone(work, 10 * before + rates.seconds(CostPart.BASE))
    rates.note_alone(work, 1000 * before)  # an outlier
    assert rates.cost(work).prefill_s == pytest.approx(10 * before)
    assert rates.measured_on(CostPart.PREFILL) == 6
    rates.report_compute(compute())
    rates.note_alone(work, 10 * before)
    assert rates.seconds(CostPart.PREFILL) == 1e-4


@pytest.mark.parametrize(
    "work",
    [
        Work(new_tokens=100),
        Work(new_tokens=4000, load_bytes=1e9),
        Work(new_tokens=4000, disk_bytes=1),
    ],
)
def test_a_prefill_that_says_little_is_not_used(work: Work) -> None:
    rates = CostModel(CONFIG)
    rates.note_alone(work, 100.0)
    assert rates.measured() == {}


@given(st.lists(st.tuples(st.integers(256, 10**6), st.floats(-1e9, 1e9))))
def test_rates_stay_finite(observed: list[tuple[int, float]]) -> None:
    rates = CostModel(CONFIG)
    for tokens, ttft_s in observed:
        rates.note_alone(Work(new_tokens=tokens), ttft_s)
        assert all(0 < rates.per_second(part) < 1e20 for part in CostPart)


def test_what_one_replica_measured_counts_for_those_that_have_not() -> None:
    known, new = CostModel(CONFIG), CostModel(CONFIG)
    known.report_compute(compute())
    new.take_over(dict.fromkeys(known.measured(), known))
    assert new.seconds(CostPart.PREFILL) == 1e-4 and not new.knows(CostPart.PREFILL)
    new.report_compute(compute(prefill_token_s=2e-4))
    new.take_over(dict.fromkeys(known.measured(), known))
    assert new.seconds(CostPart.PREFILL) == 2e-4
