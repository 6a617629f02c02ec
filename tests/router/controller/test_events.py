"""The controller's memory of what it was asked to do."""

from router.controller.events import Event, Events, new_event_id


def test_only_the_latest_are_kept() -> None:
    events = Events(max_events=3)
    for number in range(5):
        events.add(str(number), Event(num_tokens=number))
    assert [events.get(str(number)) for number in range(5)] == [
        None,
        None,
        *(Event(num_tokens=number) for number in (2, 3, 4)),
    ]


def test_event_ids_differ_and_say_what_they_are_of() -> None:
    first, second = new_event_id("Move"), new_event_id("Move")
    assert first != second
    assert first.startswith("Move")
