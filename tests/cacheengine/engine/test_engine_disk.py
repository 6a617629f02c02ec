"""The engine with a real disk tier: restarts, kills, damage, a disk that goes away."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cacheengine.engine.engine import CacheEngine
from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.residency.decisions import Presence
from cacheengine.residency.eviction_policies import POLICY_NAMES
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.tier import Chunk, PutOutcome
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import (
    CHUNK_BYTES,
    config,
    key,
    keys,
    layout,
    tier_stack,
    wait_until,
)
from tests.cacheengine.tiers.disk_chunks import (
    ITEM_BYTES,
    break_disk,
    bytes_under,
    flip,
    place_of,
)
from tests.stored_chunks import stored_chunks
from warmroute_common.config_reader import ConfigError

_PROGRAM = """
import itertools, sys, time
from pathlib import Path
from tests.cacheengine.helpers import Bench, config, keys
bench = Bench(64, config(Path(sys.argv[1])), clock=time.monotonic)
told = False
for number in itertools.cycle(range(0, 400, 8)):
    bench.store(keys(*range(number, number + 8)))
    if not told and bench.engine.stats().lower_tiers.puts > 20:
        print("storing", flush=True)
        told = True
"""


def test_a_restart_serves_what_the_disk_holds(make_bench: MakeBench, tmp_path: Path) -> None:
    first = make_bench(8, config(tmp_path))
    first.store(keys(1, 2, 3))
    first.engine.close()
    second = make_bench(8, config(tmp_path))
    assert second.engine.incarnation != first.engine.incarnation
    assert second.engine.match(keys(1, 2, 3, 4)) == ["disk"] * 3
    assert len(second.engine.snapshot().tiers["disk"]) == 3 * 8
    assert second.promote(keys(1, 2, 3)) == (0, 3, 0)
    assert second.has_right_bytes(keys(1, 2, 3))


def test_a_restart_after_kill_9_serves_only_whole_chunks(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, os.fspath(tmp_path)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"storing\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait(20)
    bench = make_bench(8, config(tmp_path))
    assert list(tmp_path.rglob("*.tmp")) == []
    found = [key(number) for number in range(400) if bench.engine.match(keys(number))]
    assert found
    for chunk in found:
        assert bench.promote([chunk], pin_s=0) == (0, 1, 0)
        assert bench.has_right_bytes([chunk])
    assert bench.engine.stats().lower_tiers.corrupt == 0


def test_a_smaller_limit_at_restart_keeps_the_most_recent(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    first = make_bench(8, config(tmp_path))
    for number in (1, 2, 3, 4):
        first.store(keys(number))
        first.finish_puts()
    first.engine.touch(keys(1, 2))
    first.engine.close()
    second = make_bench(8, config(tmp_path, disk_items=2))
    assert [bool(second.engine.match(keys(number))) for number in (1, 2, 3, 4)] == [
        True,
        True,
        False,
        False,
    ]
    assert bytes_under(tmp_path) == 2 * ITEM_BYTES


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_after_a_restart_what_was_used_in_ram_leaves_last(
    make_bench: MakeBench, tmp_path: Path, policy: str
) -> None:
    settings = replace(config(tmp_path, disk_items=4), cache_policy=policy)
    first = make_bench(8, settings)
    first.store(keys(1, 2, 3, 4))
    first.finish_puts()
    for _ in range(5):
        first.engine.touch(keys(1))
    first.engine.close()
    second = make_bench(8, settings)
    for number in (11, 12, 13):
        second.store(keys(number))
        second.finish_puts()
    assert second.engine.match(keys(1)) == ["disk"]
    assert [second.engine.match(keys(number)) for number in (2, 3, 4)] == [[]] * 3


def test_the_order_of_use_survives_a_kill(make_bench: MakeBench, tmp_path: Path) -> None:
    """It is kept every few minutes while chunks are written; later chunks are the most recent."""
    first = make_bench(8, config(tmp_path, disk_items=4))
    first.store(keys(1, 2))
    first.finish_puts()
    first.engine.touch(keys(1))
    first.clock.advance(301)
    first.store(keys(3))
    index = tmp_path / layout().fingerprint() / ".index"
    wait_until(index.exists)
    first.store(keys(4))
    first.finish_puts()
    kept = index.read_bytes()
    first.engine.close()
    index.write_bytes(kept)
    second = make_bench(8, config(tmp_path, disk_items=4))
    for number in (11, 12):
        second.store(keys(number))
        second.finish_puts()
    found = [bool(second.engine.match(keys(number))) for number in (1, 2, 3, 4)]
    assert found[1] is False
    assert found[3] is True
    assert sum(found) == 2


def test_a_chunk_cleared_just_before_the_end_is_not_in_the_index(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    first = make_bench(8, config(tmp_path))
    first.store(keys(1, 2))
    first.finish_puts()
    first.engine.clear(["disk"], keys(1))
    first.engine.close()
    second = make_bench(8, config(tmp_path))
    assert [bool(second.engine.match(keys(number))) for number in (1, 2)] == [False, True]


def test_one_flipped_byte_is_a_miss(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(8, config(tmp_path))
    bench.keep_below_only(keys(1, 2, 3))
    tier = tier_stack(bench.engine).local
    assert isinstance(tier, DiskTier)
    flip(place_of(tier, key(2)), CHUNK_BYTES - 1)
    assert bench.promote(keys(1, 2, 3)) == (0, 2, 1)
    assert bench.engine.lookup(key(2)) is Presence.MISS
    assert bench.engine.match(keys(1, 2, 3)) == ["cpu"]
    assert bench.engine.stats().lower_tiers.corrupt == 1
    assert key(2) not in stored_chunks(tmp_path)
    # It is stored and put again as if it had never been there.
    assert bench.store(keys(2)) == tuple(keys(2))
    bench.finish_puts()
    bench.engine.clear(["cpu"])
    bench.promote(keys(1, 2, 3))
    assert bench.has_right_bytes(keys(1, 2, 3))


def test_a_directory_that_vanishes_is_a_miss(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(8, config(tmp_path))
    bench.keep_below_only(keys(1))
    shutil.rmtree(tmp_path / layout().fingerprint())
    assert bench.promote(keys(1)) == (0, 0, 1)
    assert bench.engine.stats().lower_tiers.get_misses == 1
    bench.keep_below_only(keys(1))
    assert bench.promote(keys(1)) == (0, 1, 0)


def test_no_descriptor_left_costs_no_chunk(
    make_bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are open are read. A process without descriptors says nothing about others."""
    chunks = keys(*range(32))
    bench = make_bench(64, config(tmp_path))
    bench.keep_below_only(chunks)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _no_descriptor_left)
        assert bench.promote(chunks) == (0, 32, 0)
    assert bench.has_right_bytes(chunks)


def test_a_disk_that_fails_for_a_moment_loses_no_chunk(
    make_bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = keys(*range(32))
    bench = make_bench(64, config(tmp_path))
    bench.keep_below_only(chunks)
    with monkeypatch.context() as patch:
        break_disk(patch, tmp_path, errno.EIO, "preadv")
        assert bench.promote(chunks) == (0, 0, 32)
    bench.clock.advance(60)
    assert bench.promote(chunks) == (0, 32, 0)
    assert bench.has_right_bytes(chunks)


def _no_descriptor_left(*args: object, **options: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_disk_that_is_away_for_a_moment_loses_no_chunk(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    chunks = keys(*range(8))
    bench = make_bench(16, config(tmp_path / "mount"))
    bench.keep_below_only(chunks)
    (tmp_path / "mount").rename(tmp_path / "away")
    # Its files are open.
    assert bench.promote(chunks) == (0, 8, 0)
    (tmp_path / "away").rename(tmp_path / "mount")
    bench.engine.clear(["cpu"])
    assert bench.promote(chunks) == (0, 8, 0)


def test_a_disk_that_fills_up_costs_nothing_but_puts(
    make_bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: list[memoryview], offset: int) -> int:
        raise OSError(28, "No space left on device")

    bench = make_bench(8, config(tmp_path))
    bench.store(keys(1))
    bench.finish_puts()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        bench.store(keys(2, 3))
        bench.finish_puts()
    assert bench.has_right_bytes(keys(1, 2, 3))
    assert bench.engine.match(keys(1, 2, 3)) == ["cpu"] * 3
    bench.engine.clear(["cpu"])
    assert bench.promote(keys(1)) == (0, 1, 0)


def test_another_model_does_not_see_the_chunks(tmp_path: Path) -> None:
    pool = Pool.allocate(4, CHUNK_BYTES)
    engine = CacheEngine(config(tmp_path), layout(), pool)
    engine.prepare_store(keys(1))
    engine.complete_store(keys(1))
    engine.close()
    other: ChunkLayout = layout(model="other")
    engine = CacheEngine(config(tmp_path), other, Pool.allocate(4, CHUNK_BYTES))
    assert engine.lookup(key(1)) is Presence.MISS
    engine.close()


class _SlowDisk(DiskTier):
    """Writes when told."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            (directory,), layout().fingerprint(), CHUNK_BYTES, 100 * (CHUNK_BYTES + 4096)
        )
        self.may_write = threading.Event()

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        assert self.may_write.wait(20)
        return super().put_many(chunks)


def test_a_disk_that_is_too_slow_gets_what_is_used_again(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    """The last of the queue's four places is for a chunk that comes back."""
    disk = _SlowDisk(tmp_path)
    bench = make_bench(8, config(Path("unused"), share=0.5), tier=disk)
    bench.store(keys(*range(8)))
    bench.store(keys(*range(10, 15)))  # 3 to 7 leave CPU RAM
    assert bench.engine.stats().put_queue_bytes == 3 * CHUNK_BYTES
    bench.store(keys(3))
    assert bench.engine.stats().put_queue_bytes == 4 * CHUNK_BYTES
    disk.may_write.set()
    bench.finish_puts()
    bench.engine.clear(["cpu"])
    assert bench.engine.match(keys(0, 1, 2, 3, 4)) == ["disk"] * 4
    assert bench.promote(keys(3)) == (0, 1, 0)
    assert bench.has_right_bytes(keys(3))


def test_a_limit_below_one_chunk_is_refused(make_bench: MakeBench, tmp_path: Path) -> None:
    tiny = EngineConfig(local_disk=(tmp_path,), max_local_disk_size=1e-6, source="a.yaml")
    with pytest.raises(
        ConfigError, match=r"a.yaml: max_local_disk_size: .* smaller than one chunk"
    ):
        make_bench(4, tiny)
