"""The I/O threads: bad jobs do not kill them, stopping is bounded."""

import logging
import threading
from functools import partial

import pytest

from cacheengine.engine.tier_io import IoThreads


def test_runs_what_was_queued_before_stop_and_refuses_what_comes_after() -> None:
    done: list[int] = []
    threads = IoThreads("test", 1)
    for number in range(10):
        assert threads.submit(partial(done.append, number))
    threads.stop()
    assert not threads.submit(lambda: done.append(99))
    assert threads.join(10)
    assert done == list(range(10))


def test_a_job_that_raises_is_logged_and_the_thread_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = threading.Event()
    threads = IoThreads("test", 1)
    with caplog.at_level(logging.ERROR):
        threads.submit(_fail)
        threads.submit(done.set)
        assert done.wait(10)
    assert "ZeroDivisionError" in caplog.text
    threads.stop()
    assert threads.join(10)


def test_join_gives_up_on_a_job_that_hangs() -> None:
    release = threading.Event()
    threads = IoThreads("test", 1)
    threads.submit(partial(_wait, release))
    threads.stop()
    assert not threads.join(0.0)
    release.set()
    assert threads.join(10)


def _fail() -> None:
    raise ZeroDivisionError


def _wait(event: threading.Event) -> None:
    assert event.wait(20)
