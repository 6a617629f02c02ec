"""When the next turn of a session is expected."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.rhythm import Expected, Rhythms


def after(pauses_s: Sequence[float], answer_s: float = 5.0) -> Expected | None:
    """Return what is expected after a session's answers with these pauses between them."""
    rhythms, now_s = Rhythms(10, ttl_s=10_000.0), 100.0
    expected = None
    for pause_s in (0.0, *pauses_s):
        now_s += pause_s
        rhythms.came("s", now_s)
        now_s += answer_s
        expected = rhythms.ended("s", now_s)
        rhythms.check()
    return expected


def test_a_regular_session_is_expected_shortly_before_its_turn() -> None:
    expected = after([20.0, 20.0, 20.0])
    assert expected is not None
    assert expected.in_s == pytest.approx(20.0 - 3.0 - 2.0)
    assert expected.in_s + expected.pin_s == pytest.approx(20.0 + 3.0)


def test_the_less_even_the_pauses_the_earlier_and_the_longer() -> None:
    even, uneven = after([20.0] * 5), after([16.0, 20.0, 24.0, 18.0, 22.0])
    assert even is not None and uneven is not None
    assert uneven.in_s < even.in_s
    assert uneven.pin_s > even.pin_s


@pytest.mark.parametrize(
    "pauses_s",
    [(), (20.0,), (20.0, 20.0), (1.0, 30.0, 200.0, 5.0, 90.0), (300.0, 310.0, 290.0, 280.0, 320.0)],
    ids=["first", "one", "two", "irregular", "too-wide-a-time"],
)
def test_other_sessions_are_not(pauses_s: Sequence[float]) -> None:
    assert after(pauses_s) is None


def test_one_long_pause_changes_little() -> None:
    expected = after([20.0, 20.0, 500.0, 20.0, 20.0])
    assert expected is not None
    assert expected.in_s == pytest.approx(15.0)


def test_short_pauses_are_prefetched_for_at_once() -> None:
    expected = after([1.0, 1.0, 1.0])
    assert expected is not None
    assert expected.in_s == 0.0


def test_a_session_with_several_requests_at_once_is_expected_after_the_last() -> None:
    rhythms = Rhythms(10, ttl_s=1000.0)
    for turn in range(4):
        rhythms.came("s", 100.0 * turn)
        rhythms.came("s", 100.0 * turn + 1)
        assert rhythms.ended("s", 100.0 * turn + 5) is None
        last = rhythms.ended("s", 100.0 * turn + 80)
        rhythms.check()
    assert last is not None
    assert last.in_s == pytest.approx(20.0 - 3.0 - 2.0)


def test_sessions_are_forgotten() -> None:
    rhythms = Rhythms(2, ttl_s=50.0)
    for now_s, session in enumerate("abc"):
        rhythms.came(session, float(now_s))
    assert len(rhythms) == 2
    assert rhythms.ended("a", 3.0) is None
    rhythms.came("d", 100.0)
    assert len(rhythms) == 1


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 100)), max_size=60),
    st.integers(1, 3),
)
def test_any_order_of_turns_and_ends(
    steps: list[tuple[str, bool, float]], max_sessions: int
) -> None:
    rhythms, now_s = Rhythms(max_sessions, ttl_s=200.0), 0.0
    for session, is_turn, passed_s in steps:
        now_s += passed_s
        if is_turn:
            rhythms.came(session, now_s)
        else:
            expected = rhythms.ended(session, now_s)
            assert expected is None or (expected.in_s >= 0 and expected.pin_s > 0)
        rhythms.check()
