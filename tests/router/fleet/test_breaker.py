"""A replica's circuit breaker: exact tables, and a model of it against every order of events."""

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.config.settings import BreakerConfig
from router.fleet.breaker import TRANSITIONS, Breaker, Circuit, Sign

CONFIG = BreakerConfig(failures_in_a_row=3, window_s=10.0, open_s=4.0, max_open_s=32.0)


def noting(breaker: Breaker, results: str, now_s: float = 0.0) -> bool:
    """Note a result for each letter: ``x`` is a failure. Return whether the last changed it."""
    return [breaker.note(each != "x", now_s, CONFIG) for each in results][-1]


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    assert noting(breaker, "xxx", now_s)
    return breaker


def half_open(now_s: float = 4.0) -> Breaker:
    breaker = opened(now_s - 4.0)
    assert breaker.pass_time(now_s)
    return breaker


@pytest.mark.parametrize("state", Circuit)
@pytest.mark.parametrize("sign", Sign)
def test_the_table_of_transitions(state: Circuit, sign: Sign) -> None:
    moves = {
        ("closed", "tripped"): "open",
        ("open", "due"): "half-open",
        ("open", "taken back"): "closed",
        ("half-open", "succeeded"): "closed",
        ("half-open", "failed"): "open",
    }
    found = TRANSITIONS.get((state, sign))
    assert (None if found is None else found.value) == moves.get((state.value, sign.value))


@pytest.mark.parametrize(
    ("results", "state"),
    [
        ("xx", "closed"),
        ("xxx", "open"),
        ("xx.xx.xx", "closed"),  # never three in a row, and too few to be a share
        ("x.x.x.x.x.", "closed"),  # the tenth succeeds, and only a failure opens
        (".x.x.x.x.x", "open"),  # half of ten
        ("x" + "..." * 3 + "xx" + ".x", "closed"),
        ("." * 100 + "xx", "closed"),
    ],
)
def test_what_opens_it(results: str, state: str) -> None:
    breaker = Breaker()
    noting(breaker, results)
    assert breaker.state == state
    assert breaker.admits is (state == "closed")
    breaker.check()


def test_it_says_why_it_is_open() -> None:
    assert opened().why == "3 requests in a row failed"
    breaker = Breaker()
    noting(breaker, ".x.x.x.x.x")
    assert breaker.why == "5 of 10 requests failed within 10 s"


def test_failures_of_long_ago_do_not_count() -> None:
    breaker = Breaker()
    noting(breaker, "x.x.x.x.", now_s=0.0)
    noting(breaker, ".x.x", now_s=20.0)
    assert breaker.state == "closed"
    noting(breaker, ".x.x.x", now_s=21.0)
    assert breaker.state == "open"


@pytest.mark.parametrize("results", ["xxx", ".x.x.x.x.x"])
def test_a_failure_that_is_taken_back_does_not_count(results: str) -> None:
    breaker = Breaker()
    noting(breaker, results[:-1])
    assert not breaker.take_back(0.0, CONFIG)
    noting(breaker, results[-1])
    assert breaker.state == "closed"
    noting(breaker, results[-1])
    assert breaker.state == "open"
    breaker.check()


def test_one_that_opened_only_for_what_is_taken_back_closes() -> None:
    breaker = opened()
    assert breaker.take_back(1.0, CONFIG)
    assert (breaker.state, breaker.why) == (Circuit.CLOSED, "")
    breaker.check()
    assert noting(breaker, "x", 1.0)
    assert breaker.due_s == 5.0, "not as one that opens again soon after a trial"


def test_after_a_trial_that_is_taken_back_the_next_goes_at_once() -> None:
    breaker = half_open()
    breaker.note(False, 4.0, CONFIG, trial=breaker.begin(4.0))
    assert breaker.take_back(5.0, CONFIG)
    assert breaker.pass_time(5.0) and breaker.state == "half-open"
    breaker.check()
    breaker.note(False, 5.0, CONFIG, trial=breaker.begin(5.0))
    assert breaker.due_s - 5.0 == 8.0


def test_one_that_is_switched_off_stays_closed() -> None:
    breaker, off = Breaker(), BreakerConfig(enabled=False)
    assert not any(breaker.note(False, 0.0, off) for _ in range(100))
    assert breaker.admits


def test_it_is_open_for_its_time_and_then_lets_one_through() -> None:
    breaker = opened(now_s=100.0)
    assert breaker.due_s == 104.0
    assert not breaker.pass_time(103.9)
    assert not breaker.admits
    assert breaker.pass_time(104.0)
    assert (breaker.state, breaker.admits) == (Circuit.HALF_OPEN, True)
    trial = breaker.begin(104.0)
    assert trial and not breaker.admits
    assert not breaker.begin(104.0), "one at a time"
    assert breaker.note(True, 105.0, CONFIG, trial=trial)
    assert (breaker.state, breaker.admits, breaker.why) == (Circuit.CLOSED, True, "")
    breaker.check()


def test_each_failed_trial_doubles_its_time_up_to_a_bound() -> None:
    breaker, now_s, times = half_open(), 4.0, []
    for _ in range(5):
        trial = breaker.begin(now_s)
        assert breaker.note(False, now_s, CONFIG, trial=trial)
        times.append(breaker.due_s - now_s)
        now_s = breaker.due_s
        assert breaker.pass_time(now_s)
    assert times == [8.0, 16.0, 32.0, 32.0, 32.0]
    assert breaker.openings == 6


@pytest.mark.parametrize(("after_s", "open_s"), [(1.0, 8.0), (33.0, 4.0)])
def test_opening_soon_after_it_was_closed_counts_as_a_failed_trial(
    after_s: float, open_s: float
) -> None:
    breaker = half_open()
    breaker.note(True, 4.0, CONFIG, trial=breaker.begin(4.0))
    noting(breaker, "xxx", 4.0 + after_s)
    assert breaker.due_s - (4.0 + after_s) == open_s


def test_chance_takes_a_quarter_of_the_time_at_most() -> None:
    breaker = Breaker()
    for _ in range(3):
        breaker.note(False, 0.0, CONFIG, jitter=1.0)
    assert breaker.due_s == 3.0


def test_a_trial_without_a_verdict_lets_the_next_one_go() -> None:
    breaker = half_open()
    assert breaker.end_trial(breaker.begin(4.0))
    assert breaker.admits
    breaker.check()


def test_a_trial_that_takes_long_lets_the_next_one_go_and_still_counts() -> None:
    breaker = half_open()
    first = breaker.begin(4.0)
    assert not breaker.pass_time(8.9)
    assert breaker.pass_time(9.0) and breaker.admits
    second = breaker.begin(9.0)
    assert not breaker.end_trial(first), "the second is under way"
    assert breaker.note(True, 10.0, CONFIG, trial=first)
    assert breaker.state is Circuit.CLOSED
    assert not breaker.end_trial(second)
    breaker.check()


def test_what_began_before_it_opened_says_nothing() -> None:
    breaker = half_open()
    trial = breaker.begin(4.0)
    breaker.note(False, 4.0, CONFIG, trial=trial)
    assert not breaker.note(True, 5.0, CONFIG)
    assert not breaker.note(True, 5.0, CONFIG, trial=trial)
    breaker.pass_time(12.0)
    assert not breaker.note(True, 12.0, CONFIG, trial=trial)
    assert not breaker.note(True, 12.0, CONFIG)
    assert breaker.state is Circuit.HALF_OPEN


def test_a_replica_that_is_up_again_is_tried_at_once() -> None:
    breaker = opened()
    assert breaker.came_back()
    assert breaker.admits
    assert not breaker.came_back()
    assert not Breaker().came_back()


@settings(max_examples=200, stateful_step_count=60)
class AnyOrder(RuleBasedStateMachine):
    """Requests begin and end in any order, with any verdict or none, while time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker()
        self.now_s = 0.0
        self.under_way: list[int] = []
        """The trials among them by their numbers, the others as 0."""

    @rule()
    def a_failure_is_taken_back(self) -> None:
        was = self.breaker.state
        if self.breaker.take_back(self.now_s, CONFIG):
            assert was is Circuit.OPEN
            assert self.breaker.admits or self.breaker.due_s == self.now_s
        else:
            assert self.breaker.state is was

    @rule(seconds=st.floats(0.0, 40.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        due_s = self.breaker.due_s
        assert self.breaker.pass_time(self.now_s) == (self.now_s >= due_s)
        assert self.breaker.due_s > self.now_s

    @rule()
    def a_request_begins(self) -> None:
        admitted, state = self.breaker.admits, self.breaker.state
        trial = self.breaker.begin(self.now_s)
        assert bool(trial) == (admitted and state is Circuit.HALF_OPEN)
        assert not trial or not self.breaker.admits
        self.under_way.append(trial)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), ok=st.sampled_from([True, False, None]), jitter=st.floats(0, 1))
    def a_request_ends(self, data: st.DataObject, ok: bool | None, jitter: float) -> None:
        at = data.draw(st.integers(0, len(self.under_way) - 1))
        trial, before = self.under_way.pop(at), self.breaker.state
        if ok is not None:
            changed = self.breaker.note(ok, self.now_s, CONFIG, trial=trial, jitter=jitter)
            assert changed == (self.breaker.state is not before)
            if changed:
                assert (self.breaker.state is Circuit.CLOSED) == ok
                assert before is not Circuit.OPEN
        self.breaker.end_trial(trial)

    @rule()
    def it_comes_back(self) -> None:
        was_open = self.breaker.state is Circuit.OPEN
        assert self.breaker.came_back() is was_open
        assert not was_open or self.breaker.admits

    @invariant()
    def it_is_in_order(self) -> None:
        self.breaker.check()
        if self.breaker.state is Circuit.OPEN:
            assert self.breaker.due_s <= self.now_s + CONFIG.max_open_s

    def teardown(self) -> None:
        """However it went on, a replica that answers is back in the end."""
        for trial in self.under_way:
            self.breaker.end_trial(trial)
        while self.breaker.state is not Circuit.CLOSED:
            if self.breaker.due_s < inf:
                self.now_s = max(self.now_s, self.breaker.due_s)
                self.breaker.pass_time(self.now_s)
            trial = self.breaker.begin(self.now_s)
            self.breaker.note(True, self.now_s, CONFIG, trial=trial)


TestAnyOrder = AnyOrder.TestCase
