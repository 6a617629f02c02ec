"""One of two paths of the disk tier hangs: the chunks of the other are read and written."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.disk import DiskTier
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import Bench, disk_items_gb, keys, tier_stack, wait_until
from tests.cacheengine.tiers.disk_chunks import held_under

ITEMS = 120
OLD = keys(*range(ITEMS))
NEW = keys(*range(1000, 1060))


def _path_of(file: Any) -> str:
    """The path of a file that is given by its path or by a descriptor."""
    return str(Path(f"/proc/self/fd/{file}").readlink() if isinstance(file, int) else file)


class HangingPath:
    """System calls on files below ``root`` do not return between `begin` and `end`."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root = f"{root}/"
        self._answers = threading.Event()
        self._answers.set()
        self.begun = threading.Event()
        for name in ("open", "replace", "unlink", "stat", "lstat", "preadv", "pwritev"):
            patch.setattr(os, name, self._waiting(getattr(os, name)))

    def _waiting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, *args: Any, **options: Any) -> Any:
            if not self._answers.is_set() and _path_of(file).startswith(self._root):
                self.begun.set()
                self._answers.wait(60)
            return real(file, *args, **options)

        return call

    def begin(self) -> None:
        self._answers.clear()

    def end(self) -> None:
        self._answers.set()


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


@pytest.fixture
def hanging(roots: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingPath]:
    path = HangingPath(roots[0], monkeypatch)
    yield path
    path.end()


@pytest.fixture
def bench(make_bench: MakeBench, roots: list[Path], hanging: HangingPath) -> Iterator[Bench]:
    """A full disk tier of two paths below a large pool, which is empty.

    One thread takes at most 32 reads at once, fewer than there are of a path.
    """
    config = EngineConfig(
        local_disk=tuple(roots),
        max_local_disk_size=disk_items_gb(ITEMS),
        put_queue_share=1.0,
        disk_read_threads=1,
    )
    bench = make_bench(400, config)
    bench.store(OLD)
    bench.finish_puts()
    bench.engine.clear(["cpu"])
    yield bench
    hanging.end()


def _on(bench: Bench, root: Path, chunks: list[bytes]) -> list[bytes]:
    tier = tier_stack(bench.engine).local
    assert isinstance(tier, DiskTier)
    held = held_under(tier, root)
    return [chunk for chunk in chunks if chunk in held]


def test_chunks_of_the_other_path_are_read(
    bench: Bench, roots: list[Path], hanging: HangingPath
) -> None:
    lost, found = (_on(bench, root, OLD) for root in roots)
    hanging.begin()
    stuck = bench.engine.promote(lost, pin_s=0)
    assert hanging.begun.wait(20)
    promotion = bench.engine.promote(found, pin_s=0)
    assert promotion.wait(20)
    assert promotion.counts.promoted == len(found)
    assert bench.has_right_bytes(found)
    assert stuck.counts.promoted == 0
    hanging.end()
    assert stuck.wait(20)
    assert stuck.counts.promoted == len(lost)
    assert bench.has_right_bytes(lost)


def test_chunks_of_the_other_path_are_written_and_evicted(
    bench: Bench, roots: list[Path], hanging: HangingPath
) -> None:
    """Each write of a full tier removes a chunk: one of the same path."""
    hanging.begin()
    bench.store(NEW)
    assert hanging.begun.wait(20)
    tier = tier_stack(bench.engine).local

    def are_counted() -> bool:
        return bench.engine.stats().disk.puts == ITEMS + len(_on(bench, roots[1], NEW)) > ITEMS

    wait_until(are_counted)
    written = _on(bench, roots[1], NEW)
    wait_until(lambda: len(_on(bench, roots[1], NEW)) >= len(NEW) // 4)
    assert _on(bench, roots[0], NEW) == []
    bench.engine.clear(["disk"], written[:2])
    wait_until(lambda: set(_on(bench, roots[1], written)) == set(written[2:]))
    hanging.end()
    bench.finish_puts()
    assert sum(len(_on(bench, root, OLD + NEW)) for root in roots) <= ITEMS
    assert bench.engine.held_in(_on(bench, roots[0], NEW), "disk") > 0
    assert tier.capacity_bytes >= ITEMS * tier.item_bytes


def test_only_the_chunks_of_the_path_that_hangs_are_not_found(
    bench: Bench, roots: list[Path], hanging: HangingPath
) -> None:
    lost, found = (_on(bench, root, OLD) for root in roots)
    hanging.begin()
    stuck = bench.engine.promote(lost, pin_s=0)
    assert hanging.begun.wait(20)
    bench.clock.advance(60)
    bench.engine.expire_pins()
    assert bench.engine.match(lost[-1:]) == []
    assert bench.engine.match(found) == ["disk"] * len(found)
    assert stuck.counts.missing > 0, "reads that have not begun have given their slots back"
    hanging.end()
    assert stuck.wait(20)
    bench.engine.expire_pins()
    assert bench.promote(lost[-1:]) == (0, 1, 0)
    bench.engine.check()
