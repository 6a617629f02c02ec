"""What tests of staging share."""

import pytest


@pytest.fixture(autouse=True)
def patient_feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router's first request finds what agents hold, on a slow machine too."""
    monkeypatch.setattr("router.feeds.feeds._START_WAIT_S", 30.0)
