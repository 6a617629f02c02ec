"""The pool's memory: one for all processes, of the pages that were asked for or ordinary ones."""

import logging
import multiprocessing
import os
import shutil
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.huge_pages import counts, free_huge_pages, set_free_huge_pages

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
    # Importing vLLM and its dependencies warns about their own deprecations.
    pytest.mark.filterwarnings("default"),
]

RANKS = 2
PAGE_BYTES = 4096
NUM_CHUNKS = 1024
ROW_BYTES = RANKS * PAGE_BYTES
HUGE_PAGES = 4  # 8 MiB


@pytest.fixture
def engine_id() -> Iterator[str]:
    """A name of its own; none of its files may be left."""
    made = f"test-{uuid.uuid4()}"
    yield made
    assert names_of(made) == []


def names_of(engine_id: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir() if engine_id in path.name]


def open_region(engine_id: str, rank: int | None, **changes: Any) -> Any:
    from cacheengine.connector.pool_region import PoolRegion

    settings = {
        "num_chunks": NUM_CHUNKS,
        "kv_bytes_per_chunk": ROW_BYTES,
        "cpu_page_size": PAGE_BYTES,
        "hugepages": True,
        **changes,
    }
    return PoolRegion(engine_id=engine_id, rank=rank, **settings)


class Worker:
    """A process that maps the region as a rank does, writes its own page of row 5, and waits."""

    def __init__(self, engine_id: str, rank: int, **changes: Any) -> None:
        import cacheengine.connector.pool_region  # noqa: F401  (once, before the fork)

        fork = multiprocessing.get_context("fork")
        self._ours, theirs = fork.Pipe()
        self.process: BaseProcess = fork.Process(
            target=_serve, args=(theirs, engine_id, rank, changes)
        )
        self.process.start()
        theirs.close()

    def go(self) -> None:
        """Let it map the region."""
        self._ours.send("map")

    def has_huge_pages(self) -> bool:
        """Wait until it has mapped the region; whether that has huge pages."""
        if not self._ours.poll(30):
            raise TimeoutError("a rank does not answer")
        answer: bool = self._ours.recv()
        return answer

    def end(self) -> None:
        """Have it end in order."""
        self._ours.send("end")
        self.process.join(30)

    def kill(self) -> None:
        """End it by SIGKILL, if it still runs."""
        self.process.kill()
        self.process.join(30)


def _serve(pipe: Connection, engine_id: str, rank: int, changes: dict[str, Any]) -> None:
    pipe.recv()
    region = open_region(engine_id, rank, **changes)
    region.create_next_worker_view(PAGE_BYTES)[5] = rank + 1
    pipe.send(region.has_huge_pages)
    pipe.recv()
    region.cleanup()


@pytest.fixture
def ranks(engine_id: str) -> Iterator[list[Worker]]:
    """Two ranks that wait for `Worker.go`."""
    workers = [Worker(engine_id, rank) for rank in range(RANKS)]
    yield workers
    for worker in workers:
        worker.kill()


def test_everybody_maps_the_same_huge_pages(engine_id: str, ranks: list[Worker]) -> None:
    with free_huge_pages(HUGE_PAGES + 1):
        for worker in ranks:
            worker.go()
        assert [worker.has_huge_pages() for worker in ranks] == [True, True]
        scheduler = open_region(engine_id, None)
        scheduler.forget_name()
        assert names_of(engine_id) == []
        assert scheduler.has_huge_pages
        assert counts().available == 1
        row = bytes(scheduler.base_tensor.view(NUM_CHUNKS, ROW_BYTES)[5].numpy())
        assert row == b"\x01" * PAGE_BYTES + b"\x02" * PAGE_BYTES
        for worker in ranks:
            worker.kill()
        assert counts().available == 1, "the scheduler still maps them"
        scheduler.cleanup()
        assert counts().available == HUGE_PAGES + 1


@pytest.mark.parametrize("attempt", range(8))
def test_ranks_that_start_at_once_do_not_starve_each_other(
    engine_id: str, ranks: list[Worker], attempt: int
) -> None:
    """There are pages for one pool: who comes second must not take from the first."""
    with free_huge_pages(HUGE_PAGES):
        for worker in ranks:
            worker.go()
        assert [worker.has_huge_pages() for worker in ranks] == [True, True]
        for worker in ranks:
            worker.end()
        assert counts().available == HUGE_PAGES


def test_without_pages_the_pool_is_ordinary_and_says_so(
    engine_id: str, ranks: list[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    with free_huge_pages(HUGE_PAGES - 1), caplog.at_level(logging.WARNING):
        first = open_region(engine_id, 0)
        assert not first.has_huge_pages
        assert "local_cpu_use_hugepages: 4 huge pages of 2 MiB are needed" in caplog.text
        assert "uses ordinary pages instead" in caplog.text
        # Pages that come too late do not part the processes.
        set_free_huge_pages(HUGE_PAGES)
        caplog.clear()
        ranks[1].go()
        assert ranks[1].has_huge_pages() is False
        scheduler = open_region(engine_id, None)
        assert not scheduler.has_huge_pages
        assert not caplog.records, "one process says it"
        assert scheduler.base_tensor[5 * ROW_BYTES + PAGE_BYTES] == 2
        assert counts().available == HUGE_PAGES
        scheduler.forget_name()
        scheduler.cleanup()
        first.cleanup()


def test_pages_lost_between_promise_and_use_are_no_sigbus(
    engine_id: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with free_huge_pages(HUGE_PAGES), caplog.at_level(logging.WARNING):
        region = open_region(engine_id, 0)
        assert not region.has_huge_pages
        assert "hugetlb.2MB.max" in caplog.text
        assert counts().available == HUGE_PAGES
        region.cleanup()


def test_a_start_that_fails_leaves_nothing(engine_id: str) -> None:
    with free_huge_pages(HUGE_PAGES):
        region = open_region(engine_id, 0)
        assert names_of(engine_id) == [f"vllm_offload_{engine_id}.mmap"]
        region.cleanup()
        assert names_of(engine_id) == []
        assert counts().available == HUGE_PAGES


def test_killed_before_the_name_is_forgotten_the_pages_come_back(
    engine_id: str, ranks: list[Worker]
) -> None:
    with free_huge_pages(HUGE_PAGES):
        ranks[0].go()
        assert ranks[0].has_huge_pages()
        assert counts().available == 0
        ranks[0].kill()
        assert counts().available == HUGE_PAGES
    assert_link_to_nowhere(engine_id)


def test_killed_before_the_name_is_forgotten_ordinary_memory_comes_back(engine_id: str) -> None:
    """While vLLM compiles and captures graphs: the pool must not stay for each killed start."""
    worker = Worker(engine_id, 0, hugepages=False)
    worker.go()
    assert not worker.has_huge_pages()
    worker.kill()
    assert_link_to_nowhere(engine_id)


def assert_link_to_nowhere(engine_id: str) -> None:
    link = Path(f"/dev/shm/vllm_offload_{engine_id}.mmap")
    try:
        assert not link.exists()
    finally:
        link.unlink()


def test_a_pool_larger_than_dev_shm_is_refused(engine_id: str) -> None:
    with pytest.raises(RuntimeError, match=r"space in /dev/shm for .* \(max_local_cpu_size\)"):
        open_region(engine_id, 0, hugepages=False, num_chunks=1 << 40)


def test_a_kept_pool_outlives_its_processes(engine_id: str) -> None:
    """All of them map one file, and nobody else does until the last of them has ended."""
    from cacheengine.kept_pool import KeepDirectoryError, PoolSeals, Seal, open_pool_file

    directory = Path(f"/dev/shm/{engine_id}-kept")
    size = NUM_CHUNKS * ROW_BYTES + PoolSeals.size_bytes(NUM_CHUNKS)
    kept: dict[str, Any] = {"hugepages": False, "keep": directory}
    seal = Seal(5, b"key", b"d" * 16)
    try:
        workers = [Worker(engine_id, rank, **kept) for rank in range(RANKS)]
        for worker in workers:
            worker.go()
            assert not worker.has_huge_pages()
        scheduler = open_region(engine_id, None, **kept)
        scheduler.forget_name()
        seals = scheduler.seals("identity")
        seals.write(seal)
        seals.close()
        del seals
        workers[0].kill()
        scheduler.cleanup()
        with pytest.raises(KeepDirectoryError, match="in use by another replica"):
            open_pool_file(directory, size, wait_s=0.0)
        workers[1].kill()

        again = open_region(engine_id, None, **kept)
        row = bytes(again.base_tensor.view(NUM_CHUNKS, ROW_BYTES)[5].numpy())
        assert row == b"\x01" * PAGE_BYTES + b"\x02" * PAGE_BYTES
        assert again.seals("identity").kept == [seal]
        assert again.seals("another").kept == []
        again.cleanup()
        with pytest.raises(KeepDirectoryError, match="takes 4247552"):
            open_region(engine_id, 0, num_chunks=1 << 29, **kept)
    finally:
        shutil.rmtree(directory)


def test_a_last_page_that_is_not_full(engine_id: str) -> None:
    """The kernel unmaps only whole huge pages: they come back with the process."""
    with free_huge_pages(HUGE_PAGES):
        worker = Worker(engine_id, 0, num_chunks=NUM_CHUNKS - 1)
        worker.go()
        assert worker.has_huge_pages()
        assert counts().available == 0
        worker.end()
        assert counts().available == HUGE_PAGES


def test_ordinary_pages_unless_asked(engine_id: str) -> None:
    with free_huge_pages(HUGE_PAGES):
        region = open_region(engine_id, 0, hugepages=False)
        assert not region.has_huge_pages
        assert counts().available == HUGE_PAGES
        region.cleanup()
