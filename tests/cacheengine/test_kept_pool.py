"""A CPU pool that outlives its engine: what the next one serves, and what it does not."""

import fcntl
import logging
import os
import random
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cacheengine.bulk import checksum
from cacheengine.kept_pool import (
    KeepDirectoryError,
    PoolSeals,
    Seal,
    check_keep_directory,
    open_pool_file,
    share_pool_file,
)
from cacheengine.residency.decisions import Presence
from cacheengine.settings.engine_config import EngineConfig
from tests.cacheengine.helpers import CHUNK_BYTES, config, key, keys, payload, wait_until
from tests.cacheengine.kept_engine import KeptEngine
from warmroute_common.config_reader import ConfigError

SLOTS = 8


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory in memory."""
    made = Path(f"/dev/shm/test-{uuid.uuid4()}")
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(autouse=True)
def patient_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end an engine waits for its keeper as long as a busy machine may take."""
    monkeypatch.setattr("cacheengine.engine.engine._KEEPER_END_S", 20.0)


Start = Callable[..., KeptEngine]


@pytest.fixture
def start(directory: Path) -> Iterator[Start]:
    """Start an engine over the kept pool, after the one before it has ended or was killed."""
    running: list[KeptEngine] = []

    def make(*, after_kill: bool = False, slots: int = SLOTS, model: str = "m") -> KeptEngine:
        if running:
            running[-1].close(in_order=not after_kill)
        running.append(KeptEngine(directory, slots, model=model))
        return running[-1]

    yield make
    running[-1].close()


@pytest.mark.parametrize("after_kill", [True, False])
def test_the_next_engine_serves_the_chunks(
    start: Start, after_kill: bool, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = keys(*range(5))
    start().store_whole(chunks)
    with caplog.at_level(logging.INFO):
        second = start(after_kill=after_kill)
        second.finish_keeping()
        wait_until(
            lambda: "5 chunks of an earlier run are served again, 0 were damaged" in caplog.text
        )
    assert second.keys() == {*chunks}
    assert second.has_right_bytes(chunks)
    assert second.engine.stats().stores == 0
    second.store_whole(keys(5, 6))
    third = start(after_kill=True)
    third.finish_keeping()
    assert third.has_right_bytes(keys(*range(7)))


def test_the_router_learns_of_kept_chunks(start: Start) -> None:
    start().store_whole(keys(1, 2))
    second = start(after_kill=True)
    second.finish_keeping()
    batch = second.engine.events_after(0)
    assert batch is not None
    assert sum(len(event.keys) // 8 for event in batch.events) == 2
    assert len(second.engine.snapshot().tiers["cpu"]) == 2 * 8


def test_an_orderly_end_seals_what_came_last(start: Start) -> None:
    first = start()
    first.store(keys(*range(SLOTS)))
    second = start()
    second.finish_keeping()
    assert second.keys() == {*keys(*range(SLOTS))}


def test_a_damaged_chunk_is_not_served(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    first = start()
    first.store_whole(keys(1, 2, 3))
    (slot,) = first.engine.hold(keys(2))
    first.pool.view(slot)[CHUNK_BYTES - 1] ^= 1
    with caplog.at_level(logging.INFO):
        second = start(after_kill=True)
        wait_until(lambda: "2 chunks of an earlier run are served again, 1 were" in caplog.text)
    assert second.keys() == {*keys(1, 3)}
    assert second.engine.lookup(key(2)) is Presence.MISS
    assert second.engine.stats().cpu_used_bytes == 2 * CHUNK_BYTES


def test_cleared_chunks_do_not_come_back(start: Start) -> None:
    first = start()
    first.store_whole(keys(1, 2, 3))
    first.engine.clear(["cpu"], keys(2))
    second = start(after_kill=True)
    second.finish_keeping()
    assert second.keys() == {*keys(1, 3)}
    held = second.engine.hold(keys(1))
    assert held, "in use while it is cleared"
    second.engine.clear(["cpu"])
    second.store_whole(keys(4))
    third = start(after_kill=True)
    third.finish_keeping()
    assert third.keys() == {*keys(4)}


def test_chunks_can_be_cleared_before_they_are_checked(start: Start, directory: Path) -> None:
    start().store_whole(keys(*range(SLOTS)))
    second = start(after_kill=True)
    second.engine.clear(["cpu"])
    assert not second.keys()
    wait_until(lambda: second.engine.stats().cpu_used_bytes == 0)
    second.store_whole(keys(9))
    third = start(after_kill=True)
    third.finish_keeping()
    assert third.keys() == {*keys(9)}


def test_an_evicted_chunk_does_not_come_back_with_its_successors_bytes(start: Start) -> None:
    first = start()
    first.store_whole(keys(*range(SLOTS)))
    reservation = first.engine.prepare_store(keys(100))
    assert reservation is not None and len(reservation.evicted) == 1
    first.pool.view(reservation.slots[0])[: CHUNK_BYTES // 2] = bytes(CHUNK_BYTES // 2)
    second = start(after_kill=True)
    second.finish_keeping()
    assert second.keys() == {*keys(*range(SLOTS))} - {*reservation.evicted}
    assert second.has_right_bytes([*second.keys()])


def test_the_order_of_use_is_kept(start: Start) -> None:
    first = start()
    first.store_whole(keys(*range(SLOTS)))
    first.engine.touch(keys(3))
    first.engine.touch(keys(5))
    second = start(after_kill=True)
    second.finish_keeping()
    # Chunks of one store are used backwards: the end of a prefix leaves first.
    expected = [7, 6, 4, 2, 1, 0, 3, 5]
    evicted = [second.engine.prepare_store(keys(100 + i)) for i in range(SLOTS)]
    assert [each.evicted for each in evicted if each] == [(each,) for each in keys(*expected)]


def test_another_model_or_size_frees_the_pool(start: Start, directory: Path) -> None:
    start().store_whole(keys(1, 2))
    other = start(model="other")
    assert not other.keys() and other.engine.stats().cpu_used_bytes == 0
    other.store_whole(keys(3))
    again = start()
    assert again.engine.stats().cpu_used_bytes == 0, "the other model has had the memory"
    again.store_whole(keys(4))
    larger = start(slots=2 * SLOTS)
    assert larger.engine.stats().cpu_used_bytes == 0
    assert [path.name for path in directory.iterdir()] == ["pool"]


def test_a_request_that_waits_has_its_chunks_checked_first(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().store_whole(keys(*range(SLOTS)))
    from cacheengine.engine import pool_keeper

    checked: list[bytes] = []
    may_check = threading.Semaphore(0)

    def slow(payload: memoryview) -> bytes:
        may_check.acquire()
        return checksum(payload)

    monkeypatch.setattr(pool_keeper, "checksum", slow)
    monkeypatch.setattr(pool_keeper, "_BATCH_BYTES", CHUNK_BYTES)
    second = start(after_kill=True)
    assert second.engine.lookup(key(2)) is Presence.PENDING
    promotion = second.engine.promote(keys(2, 3), pin_s=1.0)
    second.engine.add_event_listener(lambda: checked.extend(second.keys() - {*checked}))
    may_check.release(3)
    assert promotion.wait(20)
    assert promotion.counts.resident == 2
    # Who waits for the promotion is woken before the listeners are called.
    wait_until(lambda: {*checked} >= {*keys(2, 3)})
    assert len(checked) <= 3
    may_check.release(1000)
    second.finish_keeping()


def test_a_chunk_that_left_while_it_was_read_gets_no_seal(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cacheengine.engine import pool_keeper

    first = start(slots=1)
    has_read = threading.Event()

    def replace_meanwhile(payload: memoryview) -> bytes:
        digest = checksum(payload)
        if not has_read.is_set():
            first.engine.clear(["cpu"], keys(1))
            assert first.engine.prepare_store(keys(1)) is not None, "the same chunk, the same slot"
            has_read.set()
        return digest

    monkeypatch.setattr(pool_keeper, "checksum", replace_meanwhile)
    first.store(keys(1))
    assert has_read.wait(20)
    second = start(after_kill=True, slots=1)
    assert second.engine.stats().cpu_used_bytes == 0


def test_each_process_of_a_replica_keeps_the_others_out(directory: Path) -> None:
    first = open_pool_file(directory, 4096)
    worker = os.open(f"/proc/{os.getpid()}/fd/{first}", os.O_RDWR)
    share_pool_file(worker)
    os.close(first)
    with pytest.raises(KeepDirectoryError, match="keep_cpu_dir: its pool is in use by another"):
        open_pool_file(directory, 4096, wait_s=0.0)
    os.close(worker)
    second = open_pool_file(directory, 4096, wait_s=0.0)
    fcntl.flock(second, fcntl.LOCK_EX)
    os.close(second)


def test_directories_that_cannot_keep_a_pool(directory: Path, tmp_path: Path) -> None:
    if tmp_path.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("temporary files are in memory here")
    with pytest.raises(KeepDirectoryError, match=r"not in memory; name a directory on a tmpfs"):
        check_keep_directory(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(KeepDirectoryError, match="cannot be created"):
        check_keep_directory(file / "below")
    with pytest.raises(KeepDirectoryError, match=r"MiB free, and the CPU pool .* takes 1099511"):
        open_pool_file(directory, 1 << 60)
    (directory / "pool").chmod(0o622)
    with pytest.raises(KeepDirectoryError, match="can be written by others; remove it"):
        open_pool_file(directory, 4096)
    (directory / "pool").unlink()
    (directory / "pool").symlink_to(file)
    with pytest.raises(KeepDirectoryError, match="remove it"):
        open_pool_file(directory, 4096)
    assert file.stat().st_size == 0


def test_settings_that_do_not_go_together(directory: Path) -> None:
    with pytest.raises(ConfigError, match="keep_cpu_dir: cannot be used with local_cpu_use_huge"):
        EngineConfig(keep_cpu_dir=directory, local_cpu_use_hugepages=True)
    with pytest.raises(ConfigError, match="keep_cpu_dir: is set although local_cpu is false"):
        EngineConfig(keep_cpu_dir=directory, local_cpu=False, remote_url="redis://h:1")
    with pytest.raises(ConfigError, match="keep_cpu_dir: /proc/no cannot be created"):
        EngineConfig(keep_cpu_dir=Path("/proc/no"), max_local_cpu_size=0.001).check_ready()


def test_any_torn_write_of_the_index_is_no_seal() -> None:
    """Stopped at any byte, and with any byte of another seal: never a seal that was not written."""
    slots, chance = 3, random.Random(7)
    size = PoolSeals.size_bytes(slots)
    memory = bytearray(size)
    seals = PoolSeals(memoryview(memory), "i", slots)
    before = bytes(memory)
    written = [Seal(slot, key(slot), payload(key(slot), 16)) for slot in range(slots)]
    for seal in written:
        seals.write(seal)
    after = bytes(memory)
    for cut in range(size):
        for torn in (after[:cut] + before[cut:], before[:cut] + after[cut:]):
            found = PoolSeals(memoryview(bytearray(torn)), "i", slots).kept
            assert {*found} <= {*written}
    for _ in range(2000):
        flipped = bytearray(after)
        flipped[chance.randrange(8, size)] ^= 1 << chance.randrange(8)
        assert {*PoolSeals(memoryview(flipped), "i", slots).kept} <= {*written}
    assert PoolSeals(memoryview(bytearray(after)), "j", slots).kept == []


def test_garbage_is_an_empty_pool() -> None:
    size = PoolSeals.size_bytes(SLOTS)
    seals = PoolSeals(memoryview(bytearray(b"\xff" * size)), "i", SLOTS)
    assert seals.kept == [] and not any(map(seals.has, range(SLOTS)))
    seals.note_use(0)
    seals.drop_all()
    seals.write(Seal(0, key(0), bytes(16)))
    assert [seal.slot for seal in seals.read()] == [0]


def test_keys_that_do_not_fit_are_not_kept() -> None:
    seals = PoolSeals(memoryview(bytearray(PoolSeals.size_bytes(2))), "i", 2)
    seals.write(Seal(0, b"k" * 55, bytes(16)))
    seals.write(Seal(1, b"k" * 56, bytes(16)))
    assert [seal.slot for seal in seals.read()] == [0]


def test_a_disk_tier_below_gets_no_kept_chunk_again(directory: Path, tmp_path: Path) -> None:
    with_disk = config(tmp_path)
    first = KeptEngine(directory, SLOTS, with_disk)
    first.store_whole(keys(1, 2, 3))
    first.finish_puts()
    first.close()
    second = KeptEngine(directory, SLOTS, with_disk)
    second.finish_keeping()
    assert second.engine.match(keys(1, 2, 3)) == ["cpu"] * 3
    assert second.engine.stats().disk.puts == 0
    second.close()


def test_kept_chunks_that_the_disk_does_not_have_are_written_to_it(
    directory: Path, tmp_path: Path
) -> None:
    """Its files were removed, or the process was killed before it had written them."""
    first = KeptEngine(directory, SLOTS, config(tmp_path / "lost"))
    first.store_whole(keys(1, 2, 3))
    first.finish_puts()
    first.close()
    shutil.rmtree(tmp_path / "lost")
    second = KeptEngine(directory, SLOTS, config(tmp_path / "lost"))
    second.finish_keeping()
    second.finish_puts()
    assert second.engine.held_in(keys(1, 2, 3), "disk") == 3
    assert second.engine.stats().disk.puts == 3
    second.close()
