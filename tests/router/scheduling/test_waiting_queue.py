"""The order of waiting requests; none waits for ever."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from router.fleet.replica import Replica
from router.index.prompt_keys import PromptKeyCache
from router.priority import Priority
from router.scheduling.request_scheduler import PlacementRequest
from router.scheduling.waiting_queue import WaitingQueue, WaitingRequest
from tests.router.fleet.helpers import candidate
from tests.router.scheduling.helpers import make_learned_fleet

SECONDS = st.floats(min_value=0.01, max_value=100.0)
AGEING = st.floats(min_value=0.05, max_value=5.0)


LONG_S = 1e4
"""Longer than any request here waits or takes."""


def queue(max_waiting: int = 100, ageing: float = 0.5) -> WaitingQueue:
    return WaitingQueue(max_waiting, ageing, LONG_S)


def waiting_request(
    name: str,
    service_s: float,
    now_s: float = 0.0,
    deadline_s: float = 60.0,
    *,
    replica: Replica | None = None,
    prompt: int | None = None,
    priority: Priority = Priority.NORMAL,
) -> WaitingRequest:
    """Return a request whose session is its name."""
    return WaitingRequest(
        request=PlacementRequest(keys=PromptKeyCache(None), session=name, priority=priority),
        arrived_s=now_s,
        deadline_s=deadline_s,
        service_s=service_s,
        replica=replica or candidate("r").replica,
        prompt=prompt,
    )


REPLICAS = tuple(make_learned_fleet(3).replicas.values())


@given(
    asks=st.lists(st.tuples(SECONDS, st.sampled_from(REPLICAS)), min_size=1, max_size=400),
    changes=st.lists(
        st.tuples(st.integers(0, 399), SECONDS, st.sampled_from(REPLICAS)), max_size=60
    ),
    removals=st.lists(st.integers(0, 399), max_size=300),
    newcomers=st.lists(SECONDS, max_size=5),
)
def test_the_work_ahead_is_the_sum_of_those_before(
    asks: list[tuple[float, Replica]],
    changes: list[tuple[int, float, Replica]],
    removals: list[int],
    newcomers: list[float],
) -> None:
    """Sums are kept while requests come, move and leave: long queues have several parts."""
    waiting = queue(max_waiting=1000)
    entries = []
    for number, (service_s, replica) in enumerate(asks):
        entries.append(offer(waiting, "x", service_s, number / 10, replica=replica))
    for at, service_s, replica in changes:
        waiting.revalue(entries[at % len(entries)], service_s, replica)
    for at in removals:
        waiting.remove(entries[at % len(entries)])
    waiting.check()
    now_s = len(asks) / 10
    for service_s in newcomers:
        ahead = waiting.ahead_of(Priority.NORMAL, service_s, now_s)
        key = service_s + 0.5 * now_s
        before = [
            each for each in waiting.in_order() if each.service_s + 0.5 * each.arrived_s < key
        ]
        for replica in REPLICAS:
            there = [each.service_s for each in before if each.replica is replica]
            assert ahead.requests(replica.slot) == len(there)
            assert ahead.work_s(replica.slot) == pytest.approx(sum(there))


def offer(
    to: WaitingQueue,
    name: str,
    service_s: float,
    now_s: float = 0.0,
    deadline_s: float = 60.0,
    *,
    replica: Replica | None = None,
    priority: Priority = Priority.NORMAL,
) -> WaitingRequest:
    made = waiting_request(name, service_s, now_s, deadline_s, replica=replica, priority=priority)
    assert to.add(made)
    return made


def names(waiting: Iterable[WaitingRequest]) -> str:
    return "".join(each.request.session or "" for each in waiting)


def order(of: WaitingQueue) -> str:
    of.check()
    return names(of.in_order())


def test_the_shortest_comes_first_and_equals_in_order_of_arrival() -> None:
    waiting = queue()
    for item, service_s in (("c", 3.0), ("a", 1.0), ("d", 3.0), ("b", 2.0)):
        offer(waiting, item, service_s)
    assert order(waiting) == "abcd"
    assert names(waiting.in_order(2)) == "ab"


def test_waiting_makes_up_for_service() -> None:
    """At 0.5, four seconds of waiting are worth two of service."""
    waiting = queue(ageing=0.5)
    offer(waiting, "l", 3.0, now_s=0.0)
    offer(waiting, "s", 1.0, now_s=3.9)
    offer(waiting, "t", 1.0, now_s=4.1)
    assert order(waiting) == "slt"
    ahead = waiting.ahead_of(Priority.NORMAL, 1.0, 4.05)
    assert (ahead.requests(0), ahead.work_s(0), ahead.requests(1)) == (2, 4.0, 0)


def test_a_long_one_is_passed_for_half_of_its_permitted_wait_at_most() -> None:
    waiting = WaitingQueue(10_000, 0.5, 60.0)
    offer(waiting, "l", 44.0)
    for number in range(600):
        offer(waiting, "s", 0.2, now_s=number / 10)
    assert order(waiting).index("l") <= 300


@given(
    asks=st.lists(st.tuples(SECONDS, st.sampled_from(Priority)), max_size=60),
    newcomer=st.sampled_from(Priority),
)
def test_of_those_that_come_together_the_better_class_goes_first(
    asks: list[tuple[float, Priority]], newcomer: Priority
) -> None:
    """However long its requests and however short the others are."""
    waiting = WaitingQueue(100, 0.5, 60.0)
    for service_s, priority in asks:
        offer(waiting, "x", service_s, priority=priority)
    classes = [each.request.priority for each in waiting.in_order()]
    assert classes == sorted(classes)
    replica = candidate("r").replica
    ahead = waiting.ahead_of(newcomer, 0.001, 0.0).requests(replica.slot)
    assert ahead == sum(each < newcomer for each in classes), "all others here are longer"


@pytest.mark.parametrize("service_s", [0.2, 44.0])
@pytest.mark.parametrize(
    ("priority", "passed_by", "longest_s"),
    [
        (Priority.BATCH, Priority.HIGH, 57.0),
        (Priority.BATCH, Priority.NORMAL, 45.0),
        (Priority.NORMAL, Priority.HIGH, 42.0),
    ],
)
def test_a_better_class_passes_for_a_part_of_the_permitted_wait(
    priority: Priority, passed_by: Priority, longest_s: float, service_s: float
) -> None:
    waiting = WaitingQueue(10_000, 0.5, 60.0)
    offer(waiting, "w", service_s, priority=priority)
    for number in range(601):
        offer(waiting, "b", 0.2, now_s=number / 10, priority=passed_by)
    place = order(waiting).index("w")
    assert place <= longest_s * 10
    if service_s > longest_s / 2:
        assert place >= longest_s * 10 - 5, "the longest one is passed for about that time"


def test_a_full_line_takes_nobody() -> None:
    waiting = queue(max_waiting=1)
    first = offer(waiting, "a", 2.0)
    assert not waiting.add(waiting_request("b", 1.0))
    assert waiting.remove(first) and not waiting.remove(first)
    assert order(waiting) == ""
    offer(waiting, "b", 1.0)


def test_another_service_time_is_another_place() -> None:
    waiting = queue()
    gone, last = offer(waiting, "a", 1.0), offer(waiting, "b", 2.0)
    waiting.revalue(last, 0.5, last.replica)
    assert order(waiting) == "ba"
    waiting.remove(gone)
    waiting.revalue(gone, 0.1, gone.replica)
    assert order(waiting) == "b", "one that waits no more stays out"


def test_those_whose_time_is_over_leave() -> None:
    waiting = queue()
    assert waiting.next_deadline_s == float("inf")
    for item, deadline_s in (("a", 9.0), ("b", 5.0), ("c", 7.0)):
        offer(waiting, item, 1.0, deadline_s=deadline_s)
    assert waiting.next_deadline_s == 5.0
    assert names(waiting.expired(4.9)) == ""
    assert names(waiting.expired(7.0)) == "bc"
    assert order(waiting) == "a"


class Orders(RuleBasedStateMachine):
    """The queue against a plain list that is sorted when it is asked."""

    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue(8, 0.5, LONG_S)
        self.model: list[WaitingRequest] = []
        self.now_s = 0.0

    @rule(
        target=entries,
        service_s=SECONDS,
        patience_s=SECONDS,
        later_s=SECONDS,
        priority=st.sampled_from(Priority),
    )
    def offer(
        self, service_s: float, patience_s: float, later_s: float, priority: Priority
    ) -> WaitingRequest | None:
        self.now_s += later_s
        entry = waiting_request(
            "x", service_s, self.now_s, self.now_s + patience_s, priority=priority
        )
        is_in = self.queue.add(entry)
        assert is_in == (len(self.model) < 8)
        if is_in:
            self.model.append(entry)
        return entry if is_in else None

    @rule(entry=consumes(entries))
    def remove(self, entry: WaitingRequest | None) -> None:
        if entry is not None:
            assert self.queue.remove(entry) == (entry in self.model)
            self.model = [each for each in self.model if each is not entry]

    @rule(entry=entries, service_s=SECONDS)
    def revalue(self, entry: WaitingRequest | None, service_s: float) -> None:
        if entry is not None:
            self.queue.revalue(entry, service_s, entry.replica)

    @rule()
    def expire(self) -> None:
        late = {each for each in self.model if each.deadline_s <= self.now_s}
        assert set(self.queue.expired(self.now_s)) == late
        self.model = [each for each in self.model if each not in late]

    @invariant()
    def is_in_order(self) -> None:
        self.queue.check()
        begins_s = {Priority.HIGH: -0.1 * LONG_S, Priority.NORMAL: 0.0}
        begins_s[Priority.BATCH] = 0.25 * LONG_S
        expected = sorted(
            self.model,
            key=lambda each: (
                begins_s[each.request.priority] + each.service_s + 0.5 * each.arrived_s,
                each.number,
            ),
        )
        assert list(self.queue.in_order()) == expected


TestOrders = Orders.TestCase


@given(
    ageing=AGEING,
    comings=st.lists(st.tuples(SECONDS, st.floats(min_value=0.0, max_value=10.0)), max_size=50),
)
def test_only_those_that_come_soon_after_can_pass(
    ageing: float, comings: list[tuple[float, float]]
) -> None:
    """Whoever is before another came at most ``service / ageing`` seconds after it."""
    waiting = queue(ageing=ageing)
    now_s = 0.0
    for service_s, gap_s in comings:
        now_s += gap_s
        offer(waiting, "x", service_s, now_s)
    entries = waiting.in_order()
    for place, entry in enumerate(entries):
        latest_s = entry.arrived_s + entry.service_s / ageing
        assert all(each.arrived_s <= latest_s + 1e-9 for each in entries[:place])


@given(
    ageing=AGEING,
    long_s=SECONDS,
    shorts_s=st.lists(st.floats(min_value=0.5, max_value=1.0), min_size=1, max_size=9),
    before=st.integers(min_value=0, max_value=20),
)
def test_an_endless_stream_of_short_ones_starves_nobody(
    ageing: float, long_s: float, shorts_s: list[float], before: int
) -> None:
    """Short ones keep the only server busy for ever; the long one still has its turn.

    It waits at most for the work that was there, its ``service / ageing``
    seconds of being passed, and the two that overlap those ends.
    """
    waiting = queue(max_waiting=10_000, ageing=ageing)
    for _ in range(before):
        offer(waiting, "s", 1.0)
    offer(waiting, "l", long_s)
    bound_s = before * 1.0 + long_s / ageing + 2 * max(shorts_s)
    now_s = coming_s = 0.0
    turn = 0
    while True:
        while coming_s <= now_s:
            short_s = shorts_s[turn % len(shorts_s)]
            offer(waiting, "s", short_s, coming_s)
            coming_s, turn = coming_s + short_s, turn + 1
        first = waiting.in_order(1)[0]
        if first.request.session == "l":
            break
        waiting.remove(first)
        now_s += first.service_s
    assert now_s <= bound_s + 1e-6


def test_a_prompt_that_many_wait_for_is_work_once() -> None:
    """A hundred equal prompts are computed once or a few times, and found by the others."""
    waiting, replica = queue(), REPLICAS[0]
    equal = [waiting_request("x", 6.0, replica=replica, prompt=7) for _ in range(20)]
    others = [waiting_request("y", 6.0, replica=replica, prompt=number) for number in (8, 9)]
    for each in (*equal, *others):
        waiting.add(each)

    def ahead_s() -> float:
        waiting.check()
        return waiting.ahead_of(Priority.NORMAL, 6.0, 1.0).work_s(replica.slot)

    assert ahead_s() == 18.0
    assert waiting.ahead_of(Priority.NORMAL, 6.0, 1.0).requests(replica.slot) == 22
    waiting.revalue(equal[0], 5.0, replica)
    assert ahead_s() == 17.0
    waiting.remove(equal[0])  # the replica has it now
    assert ahead_s() == 12.0
