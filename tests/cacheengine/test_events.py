"""The event log: numbered, bounded, and honest about what it forgot."""

from cacheengine.record import EventLog, KeyEventRecord, to_wire
from tests.cacheengine.helpers import keys
from warmroute_common.agent_protocol import unpack_keys
from warmroute_common.keys import key64


def _log(events: int, history: int = 4) -> EventLog:
    log = EventLog(history)
    for number in range(1, events + 1):
        log.append("cpu", stored=True, keys=tuple(keys(number)))
    return log


def test_after_gives_exactly_what_followed() -> None:
    log = _log(3)
    assert [record.keys for record in log.after(1) or []] == [tuple(keys(2)), tuple(keys(3))]
    assert log.after(3) == []


def test_after_knows_when_it_has_forgotten() -> None:
    log = _log(10, history=4)
    assert log.after(5) is None
    assert len(log.after(6) or []) == 4


def test_a_number_from_the_future_is_not_known() -> None:
    """A client of an earlier incarnation must not believe it is up to date."""
    assert _log(3).after(4) is None


def test_take_gives_each_event_once_and_counts_what_was_lost() -> None:
    log = _log(6, history=4)
    assert len(log.take()) == 4
    assert log.take() == []
    assert log.untaken_dropped == 2


def test_no_keys_make_no_event() -> None:
    log = EventLog()
    log.append("cpu", stored=True, keys=())
    assert log.last_seq == 0


def test_on_the_wire_keys_are_the_low_64_bits() -> None:
    event = to_wire(KeyEventRecord("disk", False, tuple(keys(1, 2))))
    assert (event.tier, event.stored) == ("disk", False)
    assert unpack_keys(event.keys) == [key64(chunk) for chunk in keys(1, 2)]
