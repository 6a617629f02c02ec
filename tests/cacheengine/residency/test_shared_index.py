"""What is known of a shared tier, to exact outcomes."""

from cacheengine.residency.shared_index import SharedIndex
from cacheengine.tiers.tier import GetOutcome
from tests.cacheengine.helpers import key, keys

NOW_S = 100.0


def _index(*held: int, max_held: int = 100, max_absent: int = 100) -> SharedIndex:
    index = SharedIndex(max_held=max_held, max_absent=max_absent)
    for number in held:
        assert index.ask(key(number), NOW_S)
    taken = index.take_questions(100)
    assert index.answered(taken, [True] * len(taken), NOW_S) == keys(*held)
    return index


def test_a_question_is_asked_once_and_in_one_batch() -> None:
    index = _index()
    for number in (1, 2, 1, 3):
        assert index.ask(key(number), NOW_S)
    assert index.take_questions(2) == keys(1, 2)
    assert index.ask(key(1), NOW_S)  # still without an answer: joined, not asked again
    assert index.take_questions(10) == keys(3)
    assert index.answered(keys(1, 2), [True, False], NOW_S) == keys(1)
    assert key(1) in index
    assert key(2) not in index
    index.check()


def test_what_is_absent_is_not_asked_again_for_a_while() -> None:
    index = _index()
    index.ask(key(1), NOW_S)
    index.answered(index.take_questions(1), [False], NOW_S)
    assert not index.ask(key(1), NOW_S + 1.4)
    assert index.ask(key(1), NOW_S + 1.5)
    assert index.take_questions(1) == keys(1)
    index.check()


def test_absences_that_are_over_are_forgotten() -> None:
    """Each is of use for a second and a half; there may be a hundred thousand in that time."""
    index = _index(max_absent=1000)
    for number in range(300):
        index.ask(key(number), NOW_S)
    index.answered(index.take_questions(300), [False] * 300, NOW_S)
    now_s = NOW_S + 60
    for number in range(300, 600):
        index.ask(key(number), now_s)
        index.answered(index.take_questions(1), [False], now_s)
    assert list(index._absent) == keys(*range(300, 600))
    index.check()


def test_absences_are_bounded() -> None:
    index = _index(max_absent=2)
    for number in (1, 2, 3):
        index.ask(key(number), NOW_S)
    index.answered(index.take_questions(3), [False] * 3, NOW_S)
    index.check()
    assert [index.ask(key(number), NOW_S) for number in (1, 2, 3)] == [True, False, False]


def test_what_is_known_is_bounded_and_forgetting_is_told() -> None:
    index = _index(1, 2, max_held=2)
    index.touch(key(1))
    index.reserve(key(3))
    assert index.publish(key(3))
    assert index.take_forgotten() == keys(2)
    assert index.keys() == keys(1, 3)
    assert index.ask(key(2), NOW_S)  # forgotten is unknown, not absent
    index.check()


def test_what_is_being_read_is_not_forgotten() -> None:
    index = _index(1, 2, max_held=2)
    index.begin_read(key(1))
    index.begin_read(key(2))
    index.end_read(key(2), GetOutcome.OK, NOW_S)
    index.reserve(key(3))
    index.publish(key(3))
    assert index.take_forgotten() == keys(2)
    assert not index.end_read(key(1), GetOutcome.OK, NOW_S)
    index.check()


def test_a_tier_that_does_not_answer_is_left_alone_until_a_ping_is_answered() -> None:
    """Questions and reads of requests would wait to find out."""
    index = _index(9)
    assert index.ask(key(1), NOW_S) and not index.wants_ping(NOW_S)
    assert index.answered(index.take_questions(1), None, NOW_S) == []
    for second in range(1, 4):
        now_s = NOW_S + second
        assert not index.wants_ping(now_s - 0.1)
        assert index.wants_ping(now_s) and index.take_ping() and not index.take_ping()
        index.pinged(is_answered=False)
        assert not index.ask(key(2), now_s) and not index.can_read(key(9), now_s)
        assert key(9) in index  # known all the same
    assert index.wants_ping(NOW_S + 4) and index.take_ping()
    index.pinged(is_answered=True)
    assert index.ask(key(2), NOW_S + 4) and index.can_read(key(9), NOW_S + 4)
    assert not index.wants_ping(NOW_S + 9)


def _renew(index: SharedIndex, now_s: float, *, found: bool | None = True) -> list[bytes]:
    """Use chunk 1 elsewhere; return what is asked for, and answer it."""
    index.renew(key(1), now_s)
    asked = index.take_questions(100)
    index.answered(asked, None if found is None else [found] * len(asked), now_s)
    return asked


def test_a_used_chunk_is_asked_for_again_every_ten_minutes() -> None:
    index = _index(1)
    assert _renew(index, NOW_S + 599) == []
    assert _renew(index, NOW_S + 600) == keys(1)
    assert _renew(index, NOW_S + 1199) == []
    assert _renew(index, NOW_S + 1200, found=False) == keys(1)
    assert index.take_lost() == keys(1)
    index.check()


def test_after_an_outage_a_used_chunk_is_asked_for_again() -> None:
    """A server that was restarted may be empty."""
    index = _index(1)
    assert _renew(index, NOW_S + 600, found=None) == keys(1)
    assert _renew(index, NOW_S + 601) == []
    index.pinged(is_answered=True)
    assert _renew(index, NOW_S + 602) == keys(1)
    assert _renew(index, NOW_S + 603) == []
    index.check()


def test_a_read_that_is_given_up_says_nothing_about_the_chunk() -> None:
    index = _index(1)
    index.begin_read(key(1))
    index.end_read(key(1), GetOutcome.OK, NOW_S + 599)
    assert _renew(index, NOW_S + 600) == keys(1)


def test_what_is_known_of_chunks_that_are_never_used_is_bounded() -> None:
    index = _index(max_held=4, max_absent=4)
    for number in range(20):
        index.reserve(key(number))
        index.publish(key(number))
        index.ask(key(100 + number), NOW_S)
        index.answered(index.take_questions(1), [True], NOW_S)
        index.begin_read(key(number))
        index.end_read(key(number), GetOutcome.OK, NOW_S)
    index.take_forgotten()
    index.check()


def test_a_read_that_fails_begins_a_rest_and_one_that_misses_an_absence() -> None:
    index = _index(1, 2)
    index.begin_read(key(1))
    assert not index.end_read(key(1), GetOutcome.FAILED, NOW_S)
    assert key(1) in index
    assert not index.can_read(key(2), NOW_S + 5)
    index.pinged(is_answered=True)
    assert index.can_read(key(2), NOW_S + 5)
    index.begin_read(key(2))
    assert not index.end_read(key(2), GetOutcome.MISSING, NOW_S + 5)
    assert key(2) not in index
    assert not index.ask(key(2), NOW_S + 6)
    index.check()


def test_an_answer_does_not_overrule_a_write_made_since() -> None:
    index = _index()
    index.ask(key(1), NOW_S)
    taken = index.take_questions(1)
    index.reserve(key(1))
    index.publish(key(1))
    assert index.answered(taken, [False], NOW_S) == []
    assert key(1) in index
    index.check()


def test_an_answer_of_before_a_clear_is_void() -> None:
    index = _index()
    index.ask(key(1), NOW_S)
    taken = index.take_questions(1)
    assert index.hide(keys(1)) == []
    assert index.answered(taken, [True], NOW_S) == []
    assert key(1) not in index
    assert index.ask(key(1), NOW_S + 2)  # the others' chunks are found again by asking again
    index.answered(index.take_questions(1), [True], NOW_S + 2)
    assert key(1) in index
    index.check()


def test_an_answer_stays_true_when_nothing_is_cleared() -> None:
    index = _index()
    index.ask(key(1), NOW_S)
    taken = index.take_questions(1)
    assert index.hide([]) == []
    assert index.answered(taken, [True], NOW_S) == keys(1)
    index.check()


def test_clear_deletes_what_is_known_and_idle() -> None:
    index = _index(1, 2, 3)
    index.begin_read(key(2))
    index.reserve(key(4))
    assert index.hide(keys(1, 3, 2, 4)) == keys(1, 3)
    assert index.keys() == []
    assert index.is_known(key(1))  # on its way out: not to be put
    assert not index.ask(key(1), NOW_S)
    index.check()
    for number in (1, 3):
        index.forget(key(number))
    assert index.end_read(key(2), GetOutcome.OK, NOW_S)
    assert not index.publish(key(4))
    for number in (2, 4):
        index.forget(key(number))
    assert not any(index.is_known(key(number)) for number in (1, 2, 3, 4))
    index.check()


def test_clear_by_keys_leaves_the_others() -> None:
    index = _index(1, 2)
    assert index.hide(keys(2, 7)) == keys(2)
    assert index.keys() == keys(1)
    index.check()


def test_a_slow_answer_is_not_waited_for() -> None:
    index = _index()
    assert not index.is_late(NOW_S)
    index.ask(key(1), NOW_S)
    index.ask(key(2), NOW_S + 0.5)
    assert not index.is_late(NOW_S + 0.9)
    assert index.is_late(NOW_S + 1.0)
    index.answered(index.take_questions(1), [False], NOW_S + 1.0)
    assert not index.is_late(NOW_S + 1.4)
    assert index.is_late(NOW_S + 1.5)


def test_nothing_can_be_pinned() -> None:
    index = _index(1)
    assert not index.operator_pin(key(1))
    assert not index.operator_unpin(key(1))


def test_clearing_all_hides_all_in_one_step() -> None:
    index = _index(1, 2, 3)
    index.begin_read(key(2))
    index.reserve(key(4))
    index.ask(key(5), NOW_S)
    index.hide_all()
    assert index.keys() == []
    assert all(map(index.is_known, keys(1, 2, 3, 4)))
    index.check()
    assert index.take_hidden(keys(1, 2)) == keys(1)
    assert index.end_read(key(2), GetOutcome.OK, NOW_S)
    assert not index.publish(key(4))
    assert index.answered(index.take_questions(1), [True], NOW_S) == []
    index.check()
    assert index.take_hidden(keys(3, 3)) == keys(3)
    for number in (1, 2, 3, 4):
        index.forget(key(number))
    assert not any(map(index.is_known, keys(1, 2, 3, 4)))
    index.check()


def test_forgetting_all_deletes_nothing_and_ends_nothing() -> None:
    index = _index(1, 2)
    index.begin_read(key(2))
    index.reserve(key(3))
    index.forget_all()
    assert index.keys() == []
    assert index.ask(key(1), NOW_S)
    assert index.answered(index.take_questions(1), [True], NOW_S) == keys(1)
    assert not index.end_read(key(2), GetOutcome.OK, NOW_S)
    assert index.publish(key(3))
    assert index.take_hidden(keys(1, 2)) == []
    assert index.keys() == keys(1, 3)
    index.check()
