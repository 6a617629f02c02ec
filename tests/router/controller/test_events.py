"""The controller's memory of what it was asked to do."""

from cacheengine.wire import MoveStatus
from router.controller.events import Event, Events, Move, new_event_id

STATUS = MoveStatus(event_id="x", state="done", asked_chunks=1, arrived_chunks=1, moved_bytes=1)
MOVE = Move(destination="b", agent_url="http://b", agent_event_id="x", chunk_tokens=64)


def test_only_the_latest_are_kept() -> None:
    events = Events(max_events=3)
    for number in range(5):
        events.add(Event(id=str(number), num_tokens=number))
    assert len(events) == 3
    assert events.get("1") is None
    latest = events.get("4")
    assert latest is not None and latest.num_tokens == 4


def test_how_a_move_ended_is_kept() -> None:
    events = Events()
    events.add(Event(id="m", num_tokens=1, move=MOVE))
    events.finish("m", STATUS)
    event = events.get("m")
    assert event is not None and event.move is not None and event.move.final == STATUS


def test_finishing_what_is_forgotten_does_nothing() -> None:
    events = Events(max_events=1)
    events.add(Event(id="m", num_tokens=1, move=MOVE))
    events.add(Event(id="p", num_tokens=1))
    events.finish("m", STATUS)
    events.finish("p", STATUS)
    assert events.get("m") is None
    assert events.get("p") == Event(id="p", num_tokens=1)


def test_event_ids_differ_and_say_what_they_are_of() -> None:
    first, second = new_event_id("Move"), new_event_id("Move")
    assert first != second
    assert first.startswith("Move")
