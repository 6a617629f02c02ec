"""Homes of sessions: kept, moved after repeated spills, bounded in number and time."""

from hypothesis import given
from hypothesis import strategies as st

from router.sessions import Sessions


def test_a_new_session_is_at_home_where_it_goes_first() -> None:
    sessions = Sessions(10, ttl_s=100.0)
    assert sessions.home("a", 0.0) is None
    sessions.note("a", 3, 0.0)
    assert sessions.home("a", 1.0) == 3


def test_one_spill_keeps_the_home_and_two_in_a_row_move_it() -> None:
    sessions = Sessions(10, ttl_s=100.0)
    for replica in (0, 1, 0, 1):
        sessions.note("a", replica, 0.0)
    assert sessions.home("a", 0.0) == 0
    sessions.note("a", 1, 0.0)
    assert sessions.home("a", 0.0) == 1


def test_an_idle_session_is_forgotten() -> None:
    sessions = Sessions(10, ttl_s=5.0)
    sessions.note("a", 0, 0.0)
    assert sessions.home("a", 4.9) == 0
    assert sessions.home("a", 5.0) is None
    sessions.note("b", 0, 5.0)
    assert len(sessions) == 1
    assert sessions.evicted == 0


def test_an_expired_session_begins_anew() -> None:
    sessions = Sessions(10, ttl_s=5.0)
    sessions.note("a", 0, 0.0)
    sessions.note("a", 1, 6.0)
    assert sessions.home("a", 6.0) == 1


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2), st.integers(0, 3)), max_size=60))
def test_the_table_stays_whole_and_bounded(turns: list[tuple[int, int, int]]) -> None:
    sessions = Sessions(4, ttl_s=6.0)
    now_s = 0.0
    for name, replica, step_s in turns:
        now_s += step_s
        sessions.note(str(name), replica, now_s)
        sessions.check()
        assert sessions.home(str(name), now_s) is not None
