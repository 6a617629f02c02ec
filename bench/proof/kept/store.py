"""Result files in a directory, written whole or not at all, and runs kept until a case is done."""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.proof.kept.records import Columns, unpacked
from bench.proof.kept.result import Definition, Result, decoded, encoded
from bench.proof.run import Ran, Task
from bench.ttft import BenchError


@dataclass(frozen=True)
class Store:
    """The results, a JSON file for each case with its records beside."""

    directory: Path

    def names(self) -> list[str]:
        """Return the cases that are there."""
        return sorted(each.stem for each in self.directory.glob("*.json"))

    def has(self, definition: Definition) -> bool:
        """Whether this very result is there; raise `BenchError` where its file was changed."""
        made = self.find(definition.case.name)
        return made is not None and made.definition == definition.digest

    def find(self, name: str) -> Result | None:
        """Return a case's result, None without one; raise `BenchError` where it was changed."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            made = decoded(path.read_bytes())
        except BenchError as error:
            raise BenchError(f"{path} {error}") from None
        if made.case.name != name:
            raise BenchError(f"{path} is the result of {made.case.name}: give it its name back")
        return made

    def read(self, name: str) -> Result:
        """Return a case's result; raise `BenchError` without one."""
        made = self.find(name)
        if made is None:
            raise BenchError(
                f"{self._path(name)} is not there: python -m bench.proof make --only {name}"
            )
        return made

    def records(self, made: Result) -> list[Columns]:
        """Return the records beside a result; raise `BenchError` where they were changed."""
        if made.records is None:
            return []
        path = self.directory / made.records.file
        data = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(data).hexdigest() != made.records.sha256:
            raise BenchError(f"{path} is missing or was changed: {made.command}")
        return unpacked(data)

    def write(self, made: Result, records: bytes) -> Path:
        """Write a result, its records first: a result that is there is complete."""
        self.directory.mkdir(parents=True, exist_ok=True)
        beside = self.directory / f"{made.case.name}.jsonl.xz"
        if records:
            write_whole(beside, records)
        else:
            beside.unlink(missing_ok=True)
        write_whole(self._path(made.case.name), encoded(made))
        return self._path(made.case.name)

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.json"


@dataclass(frozen=True)
class FinishedRuns:
    """Runs of one definition, in a directory that is removed when its case is written."""

    directory: Path

    def get(self, task: Task) -> Ran | None:
        """Return what became of a task, if it has run."""
        try:
            return msgspec.json.decode(self._path(task).read_bytes(), type=Ran)
        except FileNotFoundError:
            return None

    def put(self, task: Task, ran: Ran) -> None:
        """Keep it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(task), msgspec.json.encode(ran))

    def remove(self) -> None:
        """Forget them."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _path(self, task: Task) -> Path:
        return self.directory / f"{task.seed}-{task.contender}.json"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file such that it is never seen half written."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
