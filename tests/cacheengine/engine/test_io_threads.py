"""The I/O threads: bad jobs do not kill them, stopping is bounded."""

import logging
import threading
from collections.abc import Callable
from functools import partial

import pytest

from cacheengine.engine.tier_io import IoThreads, QueueJobs


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


class QueueOfTen:
    """Ten items, of which a batch takes one, and the jobs that were submitted for them."""

    def __init__(self) -> None:
        self.waiting = 10
        self.fails = False
        self.submitted: list[Callable[[], None]] = []
        self.jobs = QueueJobs(self, 2, self._batch)

    def submit(self, job: Callable[[], None]) -> bool:
        self.submitted.append(job)
        return True

    def stop(self) -> None:
        raise NotImplementedError

    def join(self, timeout_s: float) -> bool:
        raise NotImplementedError

    def _batch(self) -> bool:
        if self.fails:
            raise ZeroDivisionError
        self.waiting -= 1
        return self.jobs.goes_on(self.waiting)


def test_a_queue_has_no_more_jobs_than_threads_and_is_done_to_its_end() -> None:
    queue = QueueOfTen()
    for _ in range(10):
        queue.jobs.start(1)
    assert len(queue.submitted) == 2
    while queue.submitted and queue.waiting:
        queue.submitted.pop(0)()
    assert queue.waiting == 0
    assert len(queue.submitted) == 1, "the other job looks once more"


def test_what_is_queued_after_the_last_job_has_ended_starts_another() -> None:
    queue = QueueOfTen()
    queue.waiting = 1
    queue.jobs.start(1)
    queue.submitted.pop()()
    assert not queue.submitted
    queue.jobs.start(1)
    assert len(queue.submitted) == 1


def test_a_job_that_fails_makes_way_for_others() -> None:
    queue = QueueOfTen()
    queue.jobs.start(5)
    queue.fails = True
    for job in [queue.submitted.pop(), queue.submitted.pop()]:
        with pytest.raises(ZeroDivisionError):
            job()
    queue.jobs.start(5)
    assert len(queue.submitted) == 2


def _fail() -> None:
    raise ZeroDivisionError


def _wait(event: threading.Event) -> None:
    assert event.wait(20)
