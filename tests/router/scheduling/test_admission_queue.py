"""Which requests go now and which wait: the admission queue, with exact outcomes.

A thousand tokens take a second here, and a little more: that is attention.
"""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.cost_model import CostPart
from router.fleet.fleet import Fleet
from router.index.prompt_keys import PromptKeyCache
from router.priority import Priority
from router.scheduling.request_scheduler import PlacementRequest
from router.scheduling.waiting_queue import WaitingRequest
from tests.router.fleet.helpers import chunks, info
from tests.router.prompt.prompts_given import text, tokens
from tests.router.scheduling.helpers import Driver, make_learned_fleet
from warmroute_common.agent_protocol import Snapshot, pack_keys
from warmroute_common.api_errors import NoReplicaError, RateLimitedError
from warmroute_common.keys import key64


def test_a_free_replica_gets_its_request_at_once() -> None:
    driver = Driver(make_learned_fleet())
    assert driver.ask("a", 0.4) and driver.ask("b", 3.0)
    assert driver.in_flight() == 2
    assert not driver.ask("c", 0.1), "over three seconds of work lie before it"
    assert driver.in_flight() == 2
    assert driver.admitted["b"].waited_s == 0.0


def test_the_shortest_goes_when_its_replica_is_nearly_done() -> None:
    driver = Driver(make_learned_fleet())
    assert driver.ask("a", 2.0)
    assert not driver.ask("b", 3.0) and not driver.ask("c", 1.0)
    assert driver.queue.next_dispatch_s(0.0) == 0.25, "the queue is checked at least this often"
    ready_s = 2.0 - 0.5 + 0.061
    assert driver.queue.next_dispatch_s(1.5) == pytest.approx(ready_s, abs=0.01)
    assert driver.dispatch(1.5) == ""
    assert driver.dispatch(1.6) == "c"
    assert driver.admitted["c"].waited_s == 1.6
    assert driver.in_flight() == 2
    assert driver.dispatch(1.7) == "", "the one that went counts"


def test_a_prefill_that_ends_early_makes_room() -> None:
    driver = Driver(make_learned_fleet())
    driver.ask("a", 5.0)
    driver.ask("b", 1.0)
    assert driver.dispatch(2.0) == ""
    driver.answer("a", 2.0)
    assert driver.dispatch(2.0) == "b"


def test_a_newcomer_does_not_pass_a_shorter_one() -> None:
    driver = Driver(make_learned_fleet())
    driver.ask("a", 1.0)
    assert not driver.ask("b", 1.0, 0.1)
    driver.answer("a", 0.2)
    assert not driver.ask("c", 2.0, 0.2), "b waits for the same replica"
    assert driver.queue.next_dispatch_s(0.2) == 0.2
    assert driver.dispatch(0.2) == "b"


def test_a_newcomer_that_is_shorter_goes_first() -> None:
    driver = Driver(make_learned_fleet())
    driver.ask("a", 1.0)
    assert not driver.ask("b", 2.0, 0.1)
    driver.answer("a", 0.2)
    assert driver.ask("c", 0.3, 0.2)


def test_waiting_makes_up_for_length() -> None:
    driver = Driver(make_learned_fleet(ageing=0.5))
    driver.ask("a", 10.0)
    driver.ask("b", 3.0, 0.0)
    driver.ask("c", 1.0, 5.0)
    driver.answer("a", 6.0)
    assert driver.dispatch(6.0) == "b"


def test_it_goes_where_the_queue_is_short_by_then() -> None:
    """Bound on arrival, c would have gone to r1, which was to be done first."""
    driver = Driver(make_learned_fleet(2))
    driver.ask("a", 3.0)
    driver.ask("b", 2.0)
    homes = {name: each.decision.replica_id for name, each in driver.admitted.items()}
    driver.ask("c", 1.0)
    assert driver.waiting["c"].replica.id == homes["b"]
    driver.answer("a", 1.0)
    assert driver.dispatch(1.0) == "c"
    assert driver.admitted["c"].decision.replica_id == homes["a"]


def test_what_it_must_fetch_overlaps_the_work_before_it() -> None:
    """Six seconds of reading from disk: it goes while four seconds of work lie before it."""
    fleet, prompt = make_learned_fleet(), tokens(6400)
    fleet.apply_info("r0", info("r0"))
    fleet.replicas["r0"].rates.report(CostPart.DISK, 1e6, 1e9)
    packed = {"disk": pack_keys(map(key64, chunks(prompt)))}
    fleet.apply_snapshot("r0", Snapshot(incarnation="one", seq=0, tiers=packed))
    driver = Driver(fleet)
    driver.ask("a", 4.0)
    assert driver.ask("b", prompt)
    assert not driver.ask("c", 0.1)


def fetching() -> Driver:
    """Return a driver whose one replica was sent a request that has its KV fetched first."""
    driver, prompt = Driver(make_learned_fleet()), tokens(8192)
    fleet = driver.fleet
    fleet.apply_info("r0", info("r0"))
    packed = {"disk": pack_keys(map(key64, chunks(prompt)))}
    fleet.apply_snapshot("r0", Snapshot(incarnation="one", seq=0, tiers=packed))
    fleet.replicas["r0"].rates.report(CostPart.DISK, 1e9, 1e9)
    assert driver.ask("fetching", prompt)
    assert driver.admitted["fetching"].decision.prefetch_keys
    return driver


def test_a_request_whose_kv_is_fetched_holds_no_other_back_until_it_is_sent() -> None:
    """Its replica has nothing of it to compute meanwhile, and would be idle."""
    driver = fetching()
    assert driver.fleet.replicas["r0"].queue.wait_s(0.0) == 0.0
    assert driver.ask("long", 10.0)
    driver.admitted["fetching"].ticket.sent(0.1)
    assert driver.fleet.replicas["r0"].queue.wait_s(0.1) > 9.0


def test_a_request_that_is_given_up_while_its_kv_is_fetched_leaves_nothing() -> None:
    driver = fetching()
    driver.admitted["fetching"].ticket.finish(0.2, ok=False)
    assert driver.fleet.replicas["r0"].queue.wait_s(0.2) == 0.0
    assert driver.in_flight() == 0


# --- who does not wait


def test_start_values_hold_requests_back_from_the_first_one_on() -> None:
    """A router that has just started, and one whose clients never stream, do not send all."""
    driver = Driver(make_learned_fleet())
    assert [driver.ask(name, 5.0) for name in "abcdef"].count(True) < 6


@pytest.mark.parametrize(
    "fleet",
    [make_learned_fleet(policy="round-robin"), make_learned_fleet(enabled=False)],
    ids=["other-policy", "off"],
)
def test_nobody_waits_where_it_is_off(fleet: Fleet) -> None:
    driver = Driver(fleet)
    assert all(driver.ask(name, 5.0) for name in "abcdef")


def test_some_must_not_wait() -> None:
    driver = Driver(make_learned_fleet())
    driver.ask("a", 5.0)
    assert driver.ask("b", 5.0, at_once=True)


# --- whose waiting ends otherwise


def test_too_late() -> None:
    """The prediction was right, until shorter requests came."""
    driver = Driver(make_learned_fleet(max_wait_s=5.0))
    driver.ask("a", 4.0)
    assert not driver.ask("long", 3.0), "3.6 s, as predicted"
    for name in "bcde":
        assert not driver.ask(name, 0.5, 1.0)
    went = [driver.dispatch(at / 10) for at in range(10, 50)]
    assert "".join(went) == "bcd"
    assert driver.queue.next_dispatch_s(4.9) == 5.0
    driver.dispatch(5.0)
    late = driver.refused["long"]
    assert isinstance(late, RateLimitedError)
    assert late.message.startswith("no replica could take the request within 5 s")
    # What is left at the replica, and e; the request itself does not count.
    assert (late.status, late.cause, late.retry_after_s) == (429, "deadline", 2)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("is_probed", [True, False], ids=["probed", "just-started"])
def test_a_request_that_would_wait_too_long_is_refused_at_once(
    streamed: bool, is_probed: bool
) -> None:
    """By start values alone: nothing was answered, and whole answers show no first token."""
    driver = Driver(make_learned_fleet(max_wait_s=60.0, is_probed=is_probed))
    assert driver.ask("a", 10.0, streamed=streamed)
    with pytest.raises(RateLimitedError, match=r"within 2 s, .* but in 11\.\d s") as caught:
        driver.ask("b", 3.0, max_wait_s=2.0, streamed=streamed)
    assert (caught.value.cause, caught.value.retry_after_s) == ("deadline", 10)
    assert not driver.ask("c", 3.0, max_wait_s=12.0, streamed=streamed)
    with pytest.raises(RateLimitedError):
        driver.ask("d", 3.5, max_wait_s=12.0, streamed=streamed)
    assert not driver.ask("e", 2.0, max_wait_s=12.0, streamed=streamed), "it goes before c"
    assert len(driver.queue) == 2 and driver.in_flight() == 1
    assert driver.ask("f", 50.0, at_once=True, max_wait_s=0.0, streamed=streamed)


def test_a_request_that_one_replica_can_take_in_time_is_not_refused() -> None:
    """The replica with its KV would take it too late, so it waits for the other one."""
    driver, known = Driver(make_learned_fleet(2, max_wait_s=60.0)), text(80_000)
    assert driver.ask("a", known)
    home = driver.admitted["a"].decision.replica_id
    assert driver.ask("b", 5.0)
    assert driver.admitted["b"].decision.replica_id != home
    assert not driver.ask("c", known, max_wait_s=10.0)
    assert driver.waiting["c"].replica.id != home
    with pytest.raises(RateLimitedError):
        driver.ask("d", known, max_wait_s=1.0)


def test_a_full_queue_refuses_without_a_placing() -> None:
    """The more are refused, the less each may cost."""
    driver = Driver(make_learned_fleet(max_waiting=1))
    driver.ask("a", 10.0)
    driver.ask("b", 5.0)
    placings = driver.scheduler.placings
    for _ in range(3):
        with pytest.raises(RateLimitedError):
            driver.ask("c", 5.0)
    assert driver.scheduler.placings == placings
    with pytest.raises(RateLimitedError):
        driver.queue.refuse_if_full(None, Priority.NORMAL, 0.0)
    assert driver.ask("d", 5.0, at_once=True)


def test_a_full_queue_refuses_nobody_who_need_not_wait() -> None:
    fleet = make_learned_fleet(2, max_waiting=1)
    driver = Driver(fleet)
    for name in "abc":
        driver.ask(name, 10.0)
    assert len(driver.queue) == 1
    idle = next(
        each
        for each in fleet.replicas.values()
        if driver.admitted["a"].decision.replica_id == each.id
    )
    driver.answer("a", 1.0)
    driver.admitted["a"].ticket.finish(1.0, ok=True)
    assert idle.queue.wait_s(1.0) == 0.0
    driver.queue.refuse_if_full(None, Priority.NORMAL, 1.0)


def test_the_key_that_holds_most_places_makes_room_for_others() -> None:
    driver = Driver(make_learned_fleet(max_waiting=3))
    driver.ask("a", 10.0, client="greedy")
    for name in "bcd":
        assert not driver.ask(name, 5.0, client="greedy")
    with pytest.raises(RateLimitedError):
        driver.ask("e", 5.0, client="greedy")
    assert not driver.ask("f", 5.0, client="other")
    driver.dispatch(0.01)
    assert set(driver.refused) == {"d"} and set(driver.waiting) == {"b", "c", "f"}
    refusal = driver.refused["d"]
    assert isinstance(refusal, RateLimitedError) and refusal.cause == "full"
    with pytest.raises(RateLimitedError):
        driver.ask("g", 5.0, client="other")


def test_a_better_class_goes_first_and_a_newcomer_of_it_waits_for_no_other() -> None:
    driver = Driver(make_learned_fleet())
    driver.ask("a", 5.0)
    assert not driver.ask("b", 0.5, priority=Priority.BATCH)
    assert not driver.ask("n", 2.0)
    assert not driver.ask("h", 3.0, priority=Priority.HIGH)
    driver.answer("a", 1.0)
    assert driver.dispatch(1.0) == "h"
    driver.answer("h", 4.0)
    assert driver.ask("g", 1.0, 4.0, priority=Priority.HIGH), "n and b wait, and h is done"
    driver.answer("g", 5.0)
    assert driver.dispatch(5.0) == "n"
    driver.answer("n", 7.0)
    assert driver.dispatch(7.0) == "b"


def test_a_full_queue_makes_room_for_a_better_class() -> None:
    """Whichever key asks; and none of a better class makes room for a worse one."""
    driver = Driver(make_learned_fleet(max_waiting=2))
    driver.ask("a", 10.0)
    driver.ask("b", 1.0, client="two", priority=Priority.BATCH)
    driver.ask("c", 2.0, client="two", priority=Priority.BATCH)
    assert not driver.ask("n", 5.0, client="one")
    driver.dispatch(0.01)
    assert set(driver.refused) == {"c"}, "the last one of the worst class"
    assert not driver.ask("h", 5.0, client="one", priority=Priority.HIGH)
    driver.dispatch(0.02)
    assert set(driver.refused) == {"b", "c"} and set(driver.waiting) == {"n", "h"}
    with pytest.raises(RateLimitedError):
        driver.ask("d", 0.1, client="two", priority=Priority.BATCH)
    with pytest.raises(RateLimitedError):
        driver.ask("e", 0.1, client="two")
    driver.queue.refuse_if_full("two", Priority.HIGH, 0.03)


def test_a_full_queue() -> None:
    driver = Driver(make_learned_fleet(max_waiting=1))
    driver.ask("a", 10.0)
    driver.ask("b", 1.0)
    with pytest.raises(
        RateLimitedError, match=r"the router's queue is full \(1 request, admission"
    ) as caught:
        driver.ask("c", 2.0)
    assert (caught.value.cause, caught.value.retry_after_s) == ("full", 13)
    assert len(driver.queue) == 1 and driver.in_flight() == 1


def test_when_no_replica_is_left_all_are_told() -> None:
    driver = Driver(make_learned_fleet())
    for name in "abc":
        driver.ask(name, 2.0)
    driver.fleet.down("r0")
    driver.dispatch(0.1)
    assert all(isinstance(driver.refused[name], NoReplicaError) for name in "bc")
    with pytest.raises(NoReplicaError):
        driver.ask("d", 1.0)


def test_they_go_elsewhere_when_their_replica_is_gone() -> None:
    driver = Driver(make_learned_fleet(2))
    driver.ask("a", 4.0)
    driver.ask("b", 2.0)
    driver.ask("c", 1.0)
    wanted = driver.waiting["c"].replica
    driver.fleet.down(wanted.id)
    assert driver.dispatch(0.1) == ""
    assert driver.waiting["c"].replica is not wanted


def test_a_replica_that_is_up_again_gets_those_who_wait_for_another() -> None:
    driver = Driver(make_learned_fleet(2))
    driver.fleet.down("r1")
    driver.ask("a", 10.0)
    for name in "bc":
        assert not driver.ask(name, 2.0)
    assert driver.dispatch(0.25) == ""
    driver.fleet.up("r1")
    assert driver.dispatch(0.5) == "b"
    assert driver.admitted["b"].decision.replica_id == "r1"


class FailingKeys(PromptKeyCache):
    """A prompt that cannot be placed from some time on."""

    error: Exception | None = None

    def affinity(self, session: str | None) -> bytes:
        if self.error is not None:
            raise self.error
        return super().affinity(session)


def test_a_defect_fails_one_request_only() -> None:
    driver = Driver(make_learned_fleet())
    driver.ask("a", 1.0)
    keys = FailingKeys(text(400))
    waiting = driver.queue.arrive(PlacementRequest(keys=keys), 0.0)
    assert isinstance(waiting, WaitingRequest)
    driver.waiting["x"] = waiting
    driver.ask("b", 2.0)
    keys.error = ZeroDivisionError()
    driver.answer("a", 0.5)
    assert driver.dispatch(0.5) == "b"
    assert driver.refused["x"] is keys.error


def test_one_that_left_is_forgotten() -> None:
    driver = Driver(make_learned_fleet())
    driver.ask("a", 1.0)
    driver.ask("b", 1.0)
    driver.queue.leave(driver.waiting.pop("b"))
    driver.answer("a", 1.0)
    assert driver.dispatch(1.0) == "" and not len(driver.queue)
    assert driver.queue.next_dispatch_s(1.0) == float("inf")


# --- many


def test_a_long_line_for_one_replica_does_not_hide_the_others() -> None:
    """Fifty short ones that know r0 stand before one that may as well go to r1."""
    driver = Driver(make_learned_fleet(2, max_wait_s=1000.0))
    known = text(400_000)
    driver.ask("a", known)
    home = driver.admitted["a"].decision.replica_id
    for number in range(50):
        assert not driver.ask(f"k{number}", known), "100 s to compute elsewhere"
    other = driver.ask("b", 90.0)
    assert other and driver.admitted["b"].decision.replica_id != home
    assert not driver.ask("c", 120.0)
    driver.answer("b", 1.0)
    assert driver.dispatch(1.0) == "c"


def test_a_burst_of_equal_prompts_is_computed_once() -> None:
    """The others wait for the one that computes what they share, and then all go at once."""
    driver = Driver(make_learned_fleet(4))
    names = [f"n{number}" for number in range(16)]
    gone = [name for name in names if driver.ask(name, text(8192))]
    assert gone == ["n0"]
    driver.answer("n0", 2.1)
    while len(driver.queue):
        driver.dispatch(2.1)
    assert set(driver.admitted) == set(names)
    assert {each.decision.replica_id for each in driver.admitted.values()} == {
        driver.admitted["n0"].decision.replica_id
    }


def test_a_burst_spreads_where_replicas_differ_a_little() -> None:
    """A request that prefers one replica also counts the requests that wait for others."""
    driver = Driver(make_learned_fleet(4))
    for number, each in enumerate(driver.fleet.replicas.values()):
        each.rates.report(CostPart.PREFILL, 1000.0 + 5.0 * number, 1e9)
    prompt = text(8 * 1024 + 400)  # the last 100 tokens are each one's own to compute
    for number in range(40):
        driver.ask(f"n{number}", prompt, number * 1e-6)
    wanted = Counter(each.replica for each in driver.waiting.values())
    assert len(driver.admitted) == 4
    assert max(wanted.values()) <= 15


SECONDS = st.floats(min_value=0.05, max_value=5.0)


@given(
    asks=st.lists(
        st.tuples(SECONDS, st.floats(min_value=0.0, max_value=2.0), st.floats(0.5, 2.0)),
        min_size=1,
        max_size=30,
    ),
    replicas=st.integers(min_value=1, max_value=3),
)
def test_nobody_is_lost_and_no_replica_idles_while_one_waits(
    asks: Sequence[tuple[float, float, float]], replicas: int
) -> None:
    """A plain event loop drives the queue; real prefills take other times than predicted."""
    driver = Driver(make_learned_fleet(replicas, max_wait_s=1000.0))
    coming = []
    at_s = 0.0
    for number, (seconds, gap_s, truth) in enumerate(asks):
        at_s += gap_s
        coming.append((at_s, f"{number}", seconds, truth))
    truths = {name: seconds * truth for _, name, seconds, truth in coming}
    free_s = dict.fromkeys(driver.fleet.replicas, 0.0)
    ends: dict[str, float] = {}

    def begin(names: Sequence[str], now_s: float) -> None:
        for name in names:
            replica = driver.admitted[name].decision.replica_id
            free_s[replica] = ends[name] = max(free_s[replica], now_s) + truths[name]

    now_s = 0.0
    while coming or ends or len(driver.queue):
        comes_s = coming[0][0] if coming else float("inf")
        now_s = min(comes_s, driver.queue.next_dispatch_s(now_s), *ends.values())
        for name in [name for name, end_s in ends.items() if end_s <= now_s]:
            del ends[name]
            driver.answer(name, now_s)
            driver.admitted[name].ticket.finish(now_s, ok=False)
        if coming and coming[0][0] <= now_s:
            _, name, seconds, _ = coming.pop(0)
            if driver.ask(name, seconds, now_s):
                begin([name], now_s)
        before = set(driver.admitted)
        driver.dispatch(now_s)
        begin([name for name in driver.admitted if name not in before], now_s)
        idle = [each.id for each in driver.fleet.replicas.values() if not each.in_flight]
        assert not (idle and len(driver.queue)), "these prompts have nothing in common"
    assert len(driver.admitted) == len(asks) and not driver.refused
    assert driver.in_flight() == 0


def test_a_free_replica_of_another_model_lets_no_request_be_placed_anew() -> None:
    driver = Driver(make_learned_fleet(2, max_wait_s=1000.0))
    for name, model in (("r0", "m"), ("r1", "other")):
        driver.fleet.set_models(name, {model: None})
    assert driver.ask("a", 9.0, model="m")
    for number in range(20):
        assert not driver.ask(f"b{number}", 1.0 + number, model="m")
    before = driver.scheduler.placings
    driver.dispatch(1.0)
    assert driver.scheduler.placings == before
    driver.fleet.set_models("r1", {"m": None})
    driver.dispatch(1.0)
    assert driver.scheduler.placings > before
