"""What is said about a server that fails."""

import pytest

from cacheengine.tiers.remote import OutageLog
from cacheengine.tiers.store import StoreError
from tests.cacheengine.helpers import FakeClock


def test_a_server_that_fails_every_other_call_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    log = OutageLog("redis://h", clock)
    for _ in range(59):
        log.failed(StoreError("gone"))
        log.answered()
        clock.advance(1)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "remote tier: redis://h fails",
        "remote tier: redis://h answers again after 0.0 s",
    ]
    log.failed(StoreError("gone for good"))
    clock.advance(1)
    log.failed(StoreError("gone for good"))
    clock.advance(9)
    log.answered()
    messages = [record.message for record in caplog.records[2:]]
    assert [message.rpartition("h ")[2] for message in messages] == [
        "fails, and its chunks count as misses: gone for good",
        "answers again after 10.0 s",
    ]
