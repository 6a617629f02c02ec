"""Growing pauses after failures."""

from warmroute_common.backoff import Backoff


def test_pauses_double_up_to_the_longest_until_a_reset() -> None:
    backoff = Backoff(0.2, 1.0)
    assert [backoff.next_s() for _ in range(4)] == [0.2, 0.4, 0.8, 1.0]
    assert backoff.is_failing
    backoff.reset()
    assert not backoff.is_failing
    assert backoff.next_s() == 0.2


def test_a_pause_ends_by_itself() -> None:
    backoff = Backoff(1.0, 60.0)
    assert not backoff.is_on(0.0)
    backoff.failed(10.0)
    assert backoff.is_on(10.9)
    assert backoff.left_s(10.25) == 0.75
    assert not backoff.is_on(11.0)
    assert backoff.left_s(12.0) == 0.0


def test_failures_during_a_pause_are_one_failure() -> None:
    backoff = Backoff(1.0, 60.0)
    backoff.failed(0.0)
    backoff.failed(0.5)
    assert not backoff.is_on(1.0)
    backoff.failed(1.0)
    assert backoff.left_s(1.0) == 2.0


def test_calls_that_began_before_the_last_failure_do_not_count_again() -> None:
    backoff = Backoff(1.0, 60.0)
    backoff.failed(5.0, began_s=0.0)
    backoff.failed(6.5, began_s=5.0)
    assert not backoff.is_on(6.5)
    backoff.failed(7.0, began_s=6.5)
    assert backoff.left_s(7.0) == 2.0


def test_after_a_pause_one_caller_tries_and_the_others_wait_for_it() -> None:
    backoff = Backoff(1.0, 60.0)
    assert backoff.may_try(0.0)
    assert backoff.may_try(0.0)
    backoff.failed(0.0)
    assert not backoff.may_try(0.9)
    assert backoff.may_try(1.0)
    assert not backoff.may_try(1.5)
    assert backoff.may_try(2.0), "the caller that tried never reported a result"
    backoff.reset()
    assert backoff.may_try(2.0)


def test_a_success_makes_the_next_pause_short_and_ends_none() -> None:
    backoff = Backoff(1.0, 60.0)
    backoff.failed(0.0)
    backoff.failed(1.0)
    backoff.succeeded()
    assert backoff.is_on(2.9)
    backoff.failed(3.0)
    assert backoff.left_s(3.0) == 1.0


def test_a_pause_need_not_grow() -> None:
    backoff = Backoff(1.0, 60.0)
    backoff.failed(0.0, grows=False)
    backoff.failed(1.0, grows=False)
    assert backoff.left_s(1.0) == 1.0


def test_a_pause_can_be_shortened() -> None:
    backoff = Backoff(1.0, 60.0)
    backoff.failed(0.0, shortened_by=0.25)
    assert backoff.left_s(0.0) == 0.75
