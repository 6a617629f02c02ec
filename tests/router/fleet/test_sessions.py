"""Homes of sessions: kept, moved after repeated spills, bounded in number and time."""

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.sessions import Sessions


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


def test_the_least_recently_used_go_first_when_there_is_no_room() -> None:
    sessions = Sessions(3, ttl_s=100.0)
    for session in ("a", "b", "c", "a", "d"):
        sessions.note(session, 1, 0.0)
    assert [sessions.home(each, 1.0) for each in "abcd"] == [1, None, 1, 1]
    assert sessions.evicted == 1


def test_a_full_table_forgets_sessions_of_the_key_that_has_most() -> None:
    """So a client that invents names flushes only sessions of its own key."""
    sessions = Sessions(10, ttl_s=100.0)
    for number in range(4):
        sessions.note(f"a/{number}", 1, 0.0)
    for number in range(50):
        sessions.note(f"b/{number}", 1, 0.0)
        sessions.check()
    assert all(sessions.home(f"a/{number}", 1.0) == 1 for number in range(4))
    assert [number for number in range(50) if sessions.home(f"b/{number}", 1.0)] == [*range(44, 50)]
    for number in range(50):
        sessions.note(f"plain {number}", 1, 0.0)
    assert all(sessions.home(f"a/{number}", 1.0) == 1 for number in range(1, 4))
    assert sessions.evicted == 94
    sessions.check()


def test_names_of_keys_that_clients_invent_do_not_make_it_slow() -> None:
    """Without keys the least recently used goes first, whatever its name."""
    sessions = Sessions(5000, ttl_s=100.0)
    for number in range(5001):
        sessions.note(f"{number}/s", 1, 0.0)
    sessions.check()
    assert sessions.home("0/s", 0.0) is None
    assert sessions.home("5000/s", 0.0) == 1


def test_however_many_expire_at_once_none_has_a_home_any_more() -> None:
    """They leave the table by and by, and before any that has a home."""
    sessions = Sessions(10_000, ttl_s=5.0)
    for number in range(9_000):
        sessions.note(f"old {number}", 0, 0.0)
    for number in range(3_000):
        sessions.note(f"new {number}", 1, 5.0)
        assert sessions.home(f"old {number}", 5.0) is None
        assert sessions.home(f"new {number}", 5.0) == 1
    sessions.check()
    assert len(sessions) == 3_000
    assert sessions.evicted == 0


def test_homes_of_late_sessions_at_high_slots_are_kept_whole() -> None:
    sessions = Sessions(10, ttl_s=10.0)
    now_s = 40 * 365 * 86400.0
    for replica in (0, 1, 999, 2**31 - 1):
        sessions.note(f"{replica}", replica, now_s)
        assert sessions.home(f"{replica}", now_s + 9.99) == replica
        assert sessions.home(f"{replica}", now_s + 10.0) is None


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2), st.integers(0, 3)), max_size=60))
def test_the_table_stays_whole_and_bounded(turns: list[tuple[int, int, int]]) -> None:
    sessions = Sessions(4, ttl_s=6.0)
    now_s = 0.0
    for name, replica, step_s in turns:
        now_s += step_s
        session = f"{name % 3}/{name}" if name % 4 else str(name)
        sessions.note(session, replica, now_s)
        sessions.check()
        assert sessions.home(session, now_s) is not None
