"""One round of the comparison of cache engines, the same for all of them.

Each engine runs in a process of its own, under its own interpreter, and does a
round when told: `serve` reads one command a line and answers one JSON object a
line. Nothing here imports more than the standard library, since an engine's
environment may have little else.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

LOOKUPS: Final = 200
"""Lookups of the prefix in a round; their median is the round's figure."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every engine moves in a round: ``chunks`` chunks of one prompt, fresh each time."""

    chunks: int = 64
    chunk_bytes: int = 4 << 20
    layers: int = 32
    chunk_tokens: int = 256
    block_tokens: int = 16
    pool_chunks: int = 160
    """Chunks that the CPU tier holds: beyond twice the prompt, so that nothing is dropped."""
    directory: Path = Path()
    """Of the disk tier, empty."""

    @property
    def bytes_moved(self) -> int:
        """Bytes of the prompt."""
        return self.chunks * self.chunk_bytes

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of the serving engine's KV cache in a chunk."""
        return self.chunk_tokens // self.block_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.chunk_bytes // self.blocks_per_chunk // self.layers

    @classmethod
    def of_json(cls, text: str) -> "Workload":
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "directory": Path(fields["directory"])})

    def to_json(self) -> str:
        """Return it as an argument for another process."""
        return json.dumps({**asdict(self), "directory": str(self.directory)})


class Contender(Protocol):
    """A cache engine with a CPU and a disk tier, and the KV cache that it serves.

    The calls come in the order of `run_round`; each returns when it is done.
    """

    @property
    def includes(self) -> dict[str, str]:
        """What a figure of this engine contains that another's may not."""

    def begin(self, number: int) -> None:
        """Have a new prompt: fresh keys, fresh bytes in the KV cache."""

    def store(self) -> None:
        """Copy the prompt from the KV cache into the CPU tier, until it can be found there."""

    def finish_put(self) -> None:
        """Wait until the prompt is on disk too, for whoever looks it up."""

    def lookup(self) -> int:
        """Return how many leading chunks of the prompt can be loaded from the CPU tier."""

    def load(self) -> None:
        """Copy the prompt from the CPU tier into the KV cache."""

    def empty_cpu(self) -> None:
        """Leave the prompt on disk alone."""

    def get(self) -> None:
        """Bring the prompt from disk into the CPU tier, until it can be found there."""

    def blank(self) -> None:
        """Overwrite the KV cache with zeros."""

    def is_intact(self) -> bool:
        """Whether the KV cache holds the prompt's bytes."""

    def forget(self) -> None:
        """Drop the prompt from every tier."""

    def close(self) -> None:
        """Release everything."""


def run_round(
    contender: Contender, workload: Workload, number: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Return the seconds of each step of one round.

    Raises RuntimeError when the engine lost or damaged a byte: a figure from
    such a round would mean nothing.
    """
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began_s = clock()
        yield
        seconds[name] = clock() - began_s

    contender.begin(number)
    os.sync()
    with timed("store_cpu"):
        contender.store()
    with timed("put_disk"):
        contender.finish_put()
    with timed("put_disk_and_sync"):
        _sync(workload.directory)
    seconds["put_disk_and_sync"] += seconds["put_disk"]
    seconds["lookup"] = _median_lookup(contender, workload, clock)
    contender.blank()
    with timed("load_cpu"):
        contender.load()
    _check(contender, "the CPU tier")
    for name, prepare in (("get_disk_warm", _nothing), ("get_disk_cold", drop_page_cache)):
        contender.empty_cpu()
        prepare(workload.directory)
        with timed(name):
            contender.get()
        contender.blank()
        contender.load()
        _check(contender, name)
    contender.forget()
    return seconds


def _median_lookup(contender: Contender, workload: Workload, clock: Callable[[], float]) -> float:
    took_s = []
    for _ in range(LOOKUPS):
        began_s = clock()
        found = contender.lookup()
        took_s.append(clock() - began_s)
        if found != workload.chunks:
            raise RuntimeError(f"lookup: {found} chunks of {workload.chunks}")
    return sorted(took_s)[LOOKUPS // 2]


def _check(contender: Contender, where: str) -> None:
    if not contender.is_intact():
        raise RuntimeError(f"{where}: the bytes that came back are others")


def _nothing(directory: Path) -> None:
    pass


def _sync(directory: Path) -> None:
    """Write a directory's files to the device."""
    for path in files_under(directory):
        with suppress(FileNotFoundError), path.open("rb") as file:
            os.fsync(file.fileno())


def drop_page_cache(directory: Path) -> None:
    """Write a directory's files to the device and drop them from the page cache."""
    for path in files_under(directory):
        with suppress(FileNotFoundError), path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def files_under(directory: Path) -> list[Path]:
    """Return every file of a tree."""
    return [path for path in directory.rglob("*") if path.is_file()]


def serve(make: Callable[[Workload], Contender]) -> None:
    """Run a contender for the process that started this one, until its commands end.

    The first argument is the workload. Standard output is the answers' alone:
    whatever the engine prints goes to standard error.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", type=Workload.of_json)
    workload: Workload = parser.parse_args().workload
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    contender = make(workload)
    try:
        _answer(answers, {"includes": contender.includes})
        for line in sys.stdin:
            _answer(answers, _reply(contender, workload, int(line)))
    finally:
        contender.close()


def _reply(contender: Contender, workload: Workload, number: int) -> dict[str, Any]:
    try:
        return {"seconds": run_round(contender, workload, number, time.perf_counter)}
    except RuntimeError as error:
        return {"error": str(error)}


def _answer(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
