"""What is kept of the requests that have ended: bounded, and right after any time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.decision import Reason
from router.index.prompt_keys import KvTier
from router.ui.recent import (
    KEPT,
    KEPT_REFUSED,
    KEPT_SPILLS,
    SHOWN,
    SLICE_S,
    SLICES,
    Durations,
    Recent,
    Sums,
)
from tests.router.ui.recording import ended, matched


def test_the_last_requests_are_kept_with_their_numbers() -> None:
    recent = Recent(0.0)
    for number in range(SHOWN + 5):
        recent.observe(ended(float(number)))
    numbers = [number for number, _ in recent.requests]
    assert numbers == list(range(6, SHOWN + 6))
    assert recent.requests[-1][1].ended_s == SHOWN + 4
    assert recent.count == SHOWN + 5


def test_records_are_found_by_their_ids_as_long_as_they_are_kept() -> None:
    recent = Recent(0.0)
    for number in range(KEPT + 5):
        recent.observe(ended(1.0, request_id=f"r{number}"))
        recent.observe(ended(1.0, request_id=f"refused{number}", is_admitted=False))
    recent.observe(ended(2.0, request_id="r5"))
    assert recent.find("r4") is None and recent.find("nothing") is None
    again = recent.find("r5")
    assert again is not None and again.ended_s == 2.0
    assert recent.find("refused0") is None and recent.find(f"refused{KEPT}") is not None
    assert len(recent) == KEPT + KEPT_REFUSED


def test_tokens_are_summed_up_by_replica_and_tier() -> None:
    recent = Recent(0.0)
    recent.observe(ended(1.0, matched_tokens=matched(gpu=60, cpu=20)))
    recent.observe(ended(2.0, matched_tokens=matched(gpu=10)))
    recent.observe(ended(3.0, replica_id="two"))
    recent.observe(ended(3.0, replica_id=None))
    recent.observe(ended(3.0, prompt_tokens=None))
    one, two = recent.window.tokens["one"], recent.window.tokens["two"]
    assert (one.prompt, one.matched, one.warmth) == (200, {KvTier.GPU: 70, KvTier.CPU: 20}, 0.45)
    assert (two.prompt, two.warmth) == (100, 0.0)
    assert recent.window.all_tokens.warmth == pytest.approx(0.3)
    assert set(recent.window.tokens) == {"one", "two"}
    assert recent.window.requests == 5


def test_half_of_the_prompt_makes_a_request_warm() -> None:
    recent = Recent(0.0)
    recent.observe(ended(1.0, matched_tokens=matched(gpu=30, cpu=20), ttft_s=0.1))
    recent.observe(ended(1.0, matched_tokens=matched(gpu=49), ttft_s=0.9))
    warm, cold = recent.window.warm, recent.window.cold
    assert (warm.count, cold.count) == (1, 1)
    assert warm.quantile_s(0.5) == pytest.approx(0.1, rel=0.03)
    assert cold.quantile_s(0.5) == pytest.approx(0.9, rel=0.03)


@pytest.mark.parametrize(
    "known",
    [{"streamed": False}, {"prompt_tokens": None}, {"prompt_tokens": 0}, {"prompt_tokens": 63}],
)
def test_what_is_no_time_to_a_first_token_does_not_count(known: dict[str, object]) -> None:
    recent = Recent(0.0)
    recent.observe(ended(1.0, **known))
    assert recent.window.cold.count == recent.window.warm.count == 0
    assert recent.window.requests == 1


def test_a_session_that_leaves_its_home_has_spilled() -> None:
    recent = Recent(0.0)
    recent.observe(ended(1.0))
    recent.observe(ended(1.0, home="one", reason=Reason.SESSION_HOME))
    for _ in range(KEPT_SPILLS + 3):
        recent.observe(ended(1.0, home="one", replica_id="two", reason=Reason.SESSION_SPILL))
    assert (recent.window.turns, recent.window.spills) == (KEPT_SPILLS + 4, KEPT_SPILLS + 3)
    assert len(recent.spills) == KEPT_SPILLS


def test_the_window_moves_on() -> None:
    recent = Recent(0.0)
    recent.observe(ended(5.0, home="one", reason=Reason.SESSION_SPILL))
    recent.pass_time(SLICES * SLICE_S - 0.1)
    assert recent.window.requests == 1
    recent.pass_time(SLICES * SLICE_S)
    assert recent.window == Sums()
    assert len(recent.requests) == 1


def test_requests_per_second_are_those_of_the_last_minute() -> None:
    recent = Recent(100.0)
    assert recent.requests_per_s(100.0) == 0.0
    for second in range(100, 120):
        recent.observe(ended(float(second)))
    assert recent.requests_per_s(120.0) == pytest.approx(1.0)
    assert recent.requests_per_s(170.0) == pytest.approx(10 / 60)
    assert recent.requests_per_s(400.0) == 0.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["one", "two", "three"]),
            st.integers(0, 100),
            st.floats(1e-6, 1e4),
            st.floats(0, 400),
            st.integers(0, 3),
        ),
        max_size=60,
    )
)
def test_the_window_is_the_sum_of_its_slices(
    ends: list[tuple[str, int, float, float, int]],
) -> None:
    recent, now_s = Recent(0.0), 0.0
    for replica_id, gpu, ttft_s, step_s, answer_tokens in ends:
        now_s += step_s
        tokens = matched(gpu=gpu)
        recent.observe(
            ended(
                now_s,
                replica_id=replica_id,
                matched_tokens=tokens,
                ttft_s=ttft_s,
                answer_tokens=answer_tokens,
            )
        )
        recent.check()
        assert len(recent.slices) <= SLICES


@given(st.lists(st.floats(1e-4, 1e3), min_size=1), st.floats(0.01, 1.0))
def test_quantiles_are_right_to_a_step(times: list[float], share: float) -> None:
    ttfts = Durations()
    for each in times:
        ttfts.note(each)
    found = ttfts.quantile_s(share)
    assert found is not None
    low, high = found * 0.974, found * 1.026
    assert sum(each <= high for each in times) >= share * len(times) - 1e-6
    assert sum(each < low for each in times) <= share * len(times) + 1e-6


def test_no_times_have_no_quantile() -> None:
    assert Durations().quantile_s(0.5) is None
