"""What tests of the doctor share."""

import pytest


@pytest.fixture(autouse=True)
def patient_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late answers are not errors; a test in which no answer comes sets its own limit."""
    for name, seconds in (
        ("_CONNECT_S", 20.0),
        ("_REPLAY_S", 20.0),
        ("_FOLLOW_S", 30.0),
        ("_PROBE_EVENTS_S", 30.0),
    ):
        monkeypatch.setattr(f"router.doctor.event_checks.{name}", seconds)
