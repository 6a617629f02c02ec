"""The schedule, the clients, the ledger and the verdicts of the router's soak."""

import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bench.soak.clients import Conversations, Ended, Ledger, Manner, Outcome
from bench.soak.fleet import ReplicaFault, replica_faults
from bench.soak.harness import Sample, growth, more_fds, of_processes
from bench.soak.router import of_reloads, of_requests, of_the_end


@given(seed=st.integers(), minutes=st.integers(1, 60), replicas=st.integers(2, 8))
def test_each_kind_of_fault_comes_as_often_as_the_others(
    seed: int, minutes: int, replicas: int
) -> None:
    given = {"duration_s": 60.0 * minutes, "replicas": replicas, "every_s": 20.0}
    found = list(replica_faults(seed=seed, **given))  # type: ignore[arg-type]  # each is of its own type
    assert len(found) == 3 * minutes - 1
    assert found == list(replica_faults(seed=seed, **given))  # type: ignore[arg-type]
    counts = [sum(each.kind is kind for each in found) for kind in ReplicaFault]
    assert max(counts) - min(counts) <= 1
    assert all(later.at_s - each.at_s == 20.0 for each, later in pairwise(found))
    assert all(0 <= each.target < replicas and each.lasts_s < 20.0 for each in found)


def test_clients_ask_in_every_manner_and_a_third_is_not_streamed() -> None:
    talks = [Conversations(client=number, seed=1) for number in range(20)]
    asked = [each.next() for each in talks for _ in range(50)]
    assert {each.manner for each in asked} == set(Manner)
    assert len({each.request_id for each in asked}) == len(asked)
    plain = [each for each in asked if each.manner is Manner.PLAIN]
    assert 0.25 < sum(not each.streamed for each in plain) / len(plain) < 0.42


def test_a_conversation_grows_by_what_was_answered() -> None:
    talk = Conversations(client=1, seed=1)
    while "messages" not in (first := talk.next()).body:
        pass
    talk.answered("bcde fghi")
    while "messages" not in (second := talk.next()).body:
        pass
    messages = first.body["messages"]
    assert second.body["messages"][: len(messages)] == messages
    assert second.body["messages"][len(messages)]["content"] == "bcde fghi"


def test_a_cut_is_explained_only_by_a_fault_of_its_own_replica() -> None:
    ledger, began_s = Ledger(), time.monotonic()
    with ledger.fault(1, ReplicaFault.KILL):
        assert ledger.had_fault("sim2", began_s, began_s)
        assert ledger.had_fault(None, began_s, began_s)
        assert not ledger.had_fault("sim1", began_s, began_s)
    assert not ledger.had_fault("sim2", time.monotonic() + 5.0, time.monotonic() + 6.0)
    assert not ledger.had_fault("sim2", began_s - 6.0, began_s - 5.0)


def test_one_bad_request_fails_the_soak() -> None:
    request = Conversations(client=1, seed=1).next()
    for outcome in Outcome:
        ledger = Ledger()
        with ledger.fault(1, ReplicaFault.KILL):
            pass
        for each in (Outcome.WHOLE, outcome):
            ledger.note(Ended(request=request, outcome=each))
        is_bad = outcome in (Outcome.LOST, Outcome.WRONG, Outcome.UNEXPLAINED, Outcome.HELD)
        assert all(each.holds for each in of_requests(ledger)) is not is_bad
        assert bool(ledger.bad) is is_bad


def samples(*figures: tuple[int, int]) -> list[Sample]:
    return [
        Sample(at_s=5.0 * at, rss_bytes=10_000 - own, own_bytes=own, fds=fds)
        for at, (own, fds) in enumerate(figures)
    ]


def test_memory_that_only_goes_up_and_down_is_flat() -> None:
    flat = samples(*((100 + 3 * (at % 2), 20) for at in range(100)))
    assert abs(growth(flat)) < 0.01
    assert all(each.holds for each in of_processes({"router": flat}, 100.0))


def test_a_leak_is_found_after_the_settling_only() -> None:
    leak = samples(*((1000 + at, 20 + at) for at in range(100)))
    assert abs(growth(leak) - 0.099) < 1e-6
    assert more_fds(leak) == 75
    assert not any(each.holds for each in of_processes({"router": leak}, 0.0))
    filling = samples(*((1000 + min(at, 50) * 10, 20) for at in range(100)))
    assert all(each.holds for each in of_processes({"router": filling}, 260.0))


def test_memory_that_was_never_measured_does_not_hold() -> None:
    verdicts = of_processes({"router": samples((1, 1))}, 100.0)
    assert not verdicts[0].holds


def test_reloads_hold_where_all_were_taken_on_and_bad_ones_refused() -> None:
    assert all(each.holds for each in of_reloads(9, 9, 3, 3))
    assert [each.holds for each in of_reloads(9, 8, 3, 2)] == [False, False]


def test_requests_left_in_flight_are_reported_by_replica() -> None:
    left, busy = of_the_end({"sim1": 0.0, "sim2": 2.0}, ["sim3"])
    assert not left.holds and "sim2" in left.found
    assert not busy.holds and "sim3" in busy.found
