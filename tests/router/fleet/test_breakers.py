"""Replicas whose breaker is open: what they get while others answer, and when none does."""

from router.fleet.fleet import Fleet
from router.fleet.in_flight import Ticket
from router.index.prompt_keys import KvTier
from tests.router.fleet.helpers import blocks, chunks, fail_at, make_fleet, place, snapshot, stored
from tests.router.prompt.prompts_given import tokens
from tests.router.scheduling.helpers import make_copying_fleet

PROMPT = tokens(640)


def start(fleet: Fleet, now_s: float = 0.0, **more: object) -> Ticket:
    return fleet.start(place(fleet, PROMPT, now_s, **more), now_s)


def held_at_r0() -> Fleet:
    """Two replicas, of which the first holds the prompt: everything goes there."""
    fleet = make_fleet(2)
    stored(fleet, "r0", KvTier.GPU, blocks(PROMPT))
    assert place(fleet, PROMPT).replica_id == "r0"
    return fleet


def test_an_open_one_gets_nothing_while_another_can_answer() -> None:
    fleet = held_at_r0()
    fail_at(fleet, "r0")
    assert place(fleet, PROMPT).replica_id == "r1"
    assert place(fleet, PROMPT, bound_to="r0").replica_id == "r0", "no other can answer"
    fleet.down("r1")
    assert place(fleet, PROMPT).replica_id == "r0"


def test_where_all_are_open_the_best_is_asked() -> None:
    fleet = held_at_r0()
    fail_at(fleet, "r1")
    fail_at(fleet, "r0")
    assert place(fleet, PROMPT).replica_id == "r0"


def test_after_its_time_it_gets_one_request_at_a_time() -> None:
    fleet = held_at_r0()
    fail_at(fleet, "r0")
    assert place(fleet, PROMPT, 4.9).replica_id == "r1"
    trial = start(fleet, 5.0)
    assert trial.replica.id == "r0"
    assert place(fleet, PROMPT, 5.0).replica_id == "r1"
    assert fleet.note_result(trial, 6.0, ok=True)
    assert place(fleet, PROMPT, 6.0).replica_id == "r0"
    trial.finish(7.0, ok=True)
    assert place(fleet, PROMPT, 7.0).replica_id == "r0"


def test_a_trial_that_fails_keeps_it_open_for_longer() -> None:
    fleet = held_at_r0()
    fail_at(fleet, "r0")
    trial = start(fleet, 5.0)
    assert fleet.note_result(trial, 5.0, ok=False)
    trial.finish(5.0, ok=False)
    assert place(fleet, PROMPT, 14.9).replica_id == "r1"
    assert place(fleet, PROMPT, 15.0).replica_id == "r0"


def test_a_trial_whose_client_leaves_makes_room_for_the_next() -> None:
    fleet = held_at_r0()
    fail_at(fleet, "r0")
    start(fleet, 5.0).finish(5.5, ok=False)
    assert place(fleet, PROMPT, 5.5).replica_id == "r0"


def test_a_replica_that_was_down_is_tried_when_it_is_up() -> None:
    fleet = held_at_r0()
    fail_at(fleet, "r0")
    fleet.down("r0")
    fleet.up("r0")
    stored(fleet, "r0", KvTier.GPU, blocks(PROMPT))
    assert place(fleet, PROMPT, 1.0).replica_id == "r0"


def test_what_goes_well_changes_nothing() -> None:
    fleet = held_at_r0()
    before = fleet.replicas.version
    ticket = start(fleet)
    assert not fleet.note_result(ticket, 1.0, ok=True)
    ticket.finish(1.0, ok=True)
    assert fleet.replicas.version == before


def test_a_draining_replica_that_does_not_answer_gives_no_kv() -> None:
    fleet, prompt = make_copying_fleet(3), tokens(6400)
    snapshot(fleet, "r0", cpu=chunks(prompt))
    fleet.drain("r0")
    assert place(fleet, prompt).copy is not None
    fleet.down("r0")
    assert place(fleet, prompt).copy is None
    fleet.up("r0")
    snapshot(fleet, "r0", cpu=chunks(prompt))
    assert place(fleet, prompt).copy is not None


def test_a_session_leaves_a_draining_home_with_its_kv() -> None:
    fleet, prompt = make_copying_fleet(3), tokens(6400)
    snapshot(fleet, "r0", cpu=chunks(prompt))
    home = place(fleet, prompt, session="s")
    assert home.replica_id == "r0"
    fleet.start(home, 0.0).finish(1.0, ok=True)
    fleet.drain("r0")
    turn = place(fleet, prompt, 1.0, session="s")
    assert turn.replica_id != "r0"
    assert turn.copy is not None and turn.copy.source_id == "r0"
    fleet.start(turn, 1.0).finish(2.0, ok=True)
    assert place(fleet, prompt, 2.0, session="s").replica_id == turn.replica_id
