"""The schedule, the clients, the ledger and the verdicts of the router's soak."""

import time
from collections import Counter
from itertools import pairwise
from typing import Any, Final

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from bench.soak.answers import Answers
from bench.soak.clients import (
    Client,
    Conversations,
    Ended,
    Ledger,
    Manner,
    Outcome,
    Poisoned,
    client_session,
)
from bench.soak.faulty_proxy import (
    COMMENT,
    COMMENTED,
    COMMENTS_ONLY,
    ERROR_FIRST,
    ERROR_LATER,
    RESET,
    STREAM_ERROR,
)
from bench.soak.fleet import ReplicaFault, replica_faults
from bench.soak.harness import Sample, growth, more_fds, of_processes
from bench.soak.router import FULL, of_faults, of_reloads, of_requests, of_the_end
from simulator.openai_server import serve_app

SEEN: Final = (FULL, RESET, COMMENTED, COMMENTS_ONLY, ERROR_FIRST, ERROR_LATER)
OF_NO_REPLICA: Final = (ReplicaFault.POISON, ReplicaFault.NO_FILES)


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
    assert all(each.lasts_s < 20.0 for each in found)
    hit = [each for each in found if each.kind not in OF_NO_REPLICA]
    assert all(0 <= each.target < replicas for each in hit)


def test_each_kind_of_fault_comes_within_five_minutes_and_often_within_thirty() -> None:
    for minutes, times in ((5, 1), (30, 9)):
        faults = replica_faults(seed=1, duration_s=60.0 * minutes, replicas=4, every_s=20.0)
        counts = Counter(each.kind for each in faults)
        assert all(counts[kind] >= times for kind in ReplicaFault)


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


def refusals(names: str) -> str:
    return f"502 every replica tried failed or broke off before its answer began ({names})"


def test_two_deaths_by_poison_explain_an_error_that_names_both() -> None:
    ledger, began_s = Ledger(), time.monotonic()
    with ledger.fault(None, ReplicaFault.POISON) as period:
        period.replicas.add(0)
        assert ledger.had_fault("sim1", began_s, began_s)
        assert not ledger.had_fault("sim2", began_s, began_s)
        assert not ledger.explains(502, refusals("sim1: cut"), began_s, began_s)
        period.replicas.add(1)
        assert ledger.explains(502, refusals("sim2: cut; sim1: cut"), began_s, began_s)
        assert ledger.explains(503, "retried and the latest reset reason", began_s, began_s)
        assert not ledger.explains(502, refusals("sim1: cut"), began_s, began_s)
        assert not ledger.explains(502, refusals("sim1: cut; sim3: cut"), began_s, began_s)
        assert not ledger.explains(None, "ServerDisconnectedError", began_s, began_s)
    late_s = time.monotonic() + 5.0
    assert not ledger.explains(502, refusals("sim2: cut; sim1: cut"), late_s, late_s)


def test_an_answer_of_comments_that_breaks_off_inside_envoy_explains_its_502() -> None:
    ledger, began_s = Ledger(), time.monotonic()
    told = "502 upstream connect error or disconnect/reset before headers. reset reason: "
    with ledger.fault(1, ReplicaFault.COMMENTS):
        assert ledger.explains(502, told + "protocol error", began_s, began_s)
        assert not ledger.explains(502, told + "connection termination", began_s, began_s)
    late_s = time.monotonic() + 5.0
    assert not ledger.explains(502, told + "protocol error", late_s, late_s)


def test_a_router_without_files_explains_503_and_a_refused_connection_at_that_time() -> None:
    ledger, began_s = Ledger(), time.monotonic()
    with ledger.fault(None, ReplicaFault.NO_FILES):
        assert ledger.explains(503, "", began_s, began_s)
        assert ledger.explains(None, "", began_s, began_s)
        assert not ledger.explains(502, "", began_s, began_s)
        assert not ledger.had_fault("sim1", began_s, began_s)
    late_s = time.monotonic() + 5.0
    assert not ledger.explains(503, "", late_s, late_s)


def a_poisoned(**changed: Any) -> Poisoned:
    given = {"request_id": "p", "killed": {0, 1}, "status": 502, "text": "an error"}
    return Poisoned(**{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({}, []),
        ({"poisoned": [a_poisoned(killed={0, 1, 2})]}, ["a poison request kills"]),
        ({"poisoned": [a_poisoned(status=None)]}, ["each poison request gets"]),
        ({"poisoned": [a_poisoned(status=200)]}, ["each poison request gets"]),
        ({"poisoned": [a_poisoned(text="")]}, ["each poison request gets"]),
        ({"poisoned": [a_poisoned(killed=())]}, ["replicas killed by poison"]),
        ({"put_out": ["sim1"]}, ["a replica with flapping"]),
        ({"called_down": ["sim1 is down: nothing listens"]}, ["no replica called down"]),
    ],
)
def test_each_verdict_on_a_fault_can_fail(changed: dict[str, Any], failing: list[str]) -> None:
    ledger = Ledger(**{"poisoned": [a_poisoned()], **changed})
    for kind in ReplicaFault:
        with ledger.fault(0, kind):
            pass
    found = of_faults(ledger, dict.fromkeys(SEEN, 1))
    failed = [each.what for each in found if not each.holds]
    assert len(failed) == len(failing)
    assert all(what.startswith(name) for what, name in zip(failed, failing, strict=True))


@pytest.mark.parametrize("missing", SEEN)
def test_a_fault_without_an_effect_has_shown_nothing(missing: str) -> None:
    ledger = Ledger(poisoned=[a_poisoned()])
    for kind in ReplicaFault:
        with ledger.fault(0, kind):
            pass
    found = of_faults(ledger, dict.fromkeys(SEEN, 1) | {missing: 0})
    assert [each.what for each in found if not each.holds] == [missing]
    assert all(each.holds for each in of_faults(Ledger(), {}))


@pytest.mark.parametrize("by_envoy", [False, True])
async def test_an_error_before_content_could_have_been_answered_elsewhere(by_envoy: bool) -> None:
    """Only Envoy passes it on: a router that does has lost the request."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if not (await request.json())["stream"]:
            return web.Response(status=500, text="no content")
        response = web.StreamResponse(headers={"x-warmroute-replica": "sim1"})
        await response.prepare(request)
        await response.write(COMMENT + STREAM_ERROR)
        return response

    app, ledger = web.Application(), Ledger()
    app.add_routes([web.post("/{path:.*}", answer)])
    runner, url = await serve_app(app, "127.0.0.1", 0)
    async with client_session() as session:
        client = Client(
            url=url,
            conversations=Conversations(client=1, seed=1),
            answers=Answers(),
            ledger=ledger,
            until_s=time.monotonic() + 0.01,
            session=session,
            by_envoy=by_envoy,
        )
        while (request := client.conversations.next()).manner is not Manner.PLAIN or (
            not request.streamed
        ):
            pass
        client.conversations.next = lambda: request  # type: ignore[method-assign]
        with ledger.fault(0, ReplicaFault.STREAM_ERRORS):
            await client.run()
    await runner.cleanup()
    assert ledger.total(Outcome.CUT if by_envoy else Outcome.LOST) == 1


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
