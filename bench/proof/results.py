"""A case's result file with its checksum, and the store of all result files.

Files are written whole or not at all; finished runs are kept until their case is complete.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson

from bench.proof.case import OURS, Case, is_peer
from bench.proof.figures import Clustered, Estimate, Figures, geometric, within_seed
from bench.proof.records import Columns, unpacked
from bench.proof.run import Ran, Task, Workload
from bench.ttft import BenchError

_DIGITS: Final = 6
"""Of every number in a file: more would be noise, and the same run gives the same ones."""
_WHAT: Final = (
    "contenders in a fleet of discrete events; times in model seconds, null is infinite; "
    "made by python -m bench.proof make, never edited"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One play of one contender."""

    contender: str
    seed: int
    label: float
    figures: Figures


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A workload's file."""

    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Of what a result is: equal definitions, equal results."""

    case: Case
    sources: str
    """Digest of the sources that a run uses."""
    traces: dict[str, Trace]
    """Files that the case reads, by workload."""

    @property
    def digest(self) -> str:
        """One name for all of it."""
        return _sha256(orjson.dumps(asdict(self), option=orjson.OPT_SORT_KEYS))


@dataclass(frozen=True, kw_only=True)
class KeptRecords:
    """The file with the records of a result."""

    file: str
    sha256: str
    contenders: list[str]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case's file."""

    what: str
    command: str
    case: Case
    definition: str
    sources: str
    traces: dict[str, Trace]
    machine: dict[str, Any]
    """Where, when and from which commit it was made."""
    replica: dict[str, Any]
    """The sizes and rates of each replica."""
    workloads: list[Workload]
    """What was offered, by seed and label."""
    within_seed: dict[str, Estimate]
    """Ours over a contender: p90 of TTFT in the first seed, its interval by drawing sessions."""
    records: KeptRecords | None
    runs: list[Row]
    checksum: str = ""


def result(
    definition: Definition, rans: Sequence[Ran], *, machine: Mapping[str, Any], records: bytes
) -> Result:
    """Return what is kept of a case's runs; ``records`` is the file with its records, or empty.

    Raises `BenchError` where a workload was not the same for all contenders.
    """
    case = definition.case
    kept = kept_columns(case, rans)
    file = KeptRecords(
        file=f"{case.name}.jsonl.xz",
        sha256=_sha256(records),
        contenders=[each.contender for each in kept],
    )
    return Result(
        what=_WHAT,
        command=f"python -m bench.proof make --only {case.name}",
        case=case,
        definition=definition.digest,
        sources=definition.sources,
        traces=definition.traces,
        machine=dict(machine),
        replica=asdict(case.machine),
        workloads=_workloads(rans),
        within_seed=_within_seed(kept),
        records=file if records else None,
        runs=[
            Row(
                contender=ran.contender,
                seed=ran.seed,
                label=played.workload.label,
                figures=played.figures,
            )
            for ran in rans
            for played in ran.plays
        ],
    )


def kept_columns(case: Case, rans: Sequence[Ran]) -> list[Columns]:
    """Return the records that are kept: all of a headline, else ours, best peer and bounds."""
    there = [each.columns for each in rans if each.columns is not None]
    if case.set == "headline":
        return there
    best = _best_peer(rans)
    without = {each for each in case.contenders if is_peer(each) and each != best}
    wanted = {*case.contenders} - without - {"no-queue"}
    if case.set == "ablations":
        wanted = {OURS}
    return [each for each in there if each.contender in wanted]


def _best_peer(rans: Sequence[Ran]) -> str | None:
    by_peer: dict[str, list[float | None]] = {}
    for ran in rans:
        if is_peer(ran.contender):
            by_peer.setdefault(ran.contender, []).append(ran.plays[0].figures.ttft_p90_s)
    known = {name: geometric(values) for name, values in by_peer.items()}
    return min(known, key=lambda name: getattr(known[name], "value", math.inf), default=None)


def _workloads(rans: Sequence[Ran]) -> list[Workload]:
    seen: dict[tuple[int, float], Workload] = {}
    for each in (played.workload for ran in rans for played in ran.plays):
        if seen.setdefault((each.seed, each.label), each) != each:
            raise BenchError(
                f"seed {each.seed}, load {each.label:g}: the workload is not the same for all "
                "contenders; it must follow from its arguments alone"
            )
    return [seen[key] for key in sorted(seen)]


def _within_seed(there: Sequence[Columns]) -> dict[str, Estimate]:
    runs = {
        each.contender: Clustered(values=each.ttfts_s, clusters=each.sessions) for each in there
    }
    mine = runs.pop(OURS, None)
    if mine is None:
        return {}
    found = {name: within_seed(mine, each, share=0.9, seed=1) for name, each in runs.items()}
    return {name: each for name, each in found.items() if each is not None}


def encoded(made: Result) -> bytes:
    """Return a file's text: each run on a line of its own, its checksum last."""
    content: dict[str, Any] = _rounded(msgspec.to_builtins(made))
    del content["checksum"]
    content["checksum"] = checksum(content)
    lines = ",\n".join(f"{_json(key)}: {_pretty(value)}" for key, value in content.items())
    return f"{{\n{lines}\n}}\n".encode()


def decoded(data: bytes) -> Result:
    """Read a file; raise `BenchError` where it says something else than what was made."""
    try:
        content = orjson.loads(data)
        made = msgspec.convert(content, Result)
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise BenchError(f"is not a result of bench.proof: {error}") from None
    stated = content.pop("checksum")
    if stated != checksum(content):
        raise BenchError(
            "was changed after it was made (its checksum differs): make it again with "
            f"{made.command}"
        )
    return made


def checksum(content: Mapping[str, Any]) -> str:
    """Return the digest of all that a file says, but for the checksum itself."""
    return _sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _pretty(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return _json(value)
    return "[\n" + ",\n".join(f"  {_json(each)}" for each in value) + "\n]"


@dataclass(frozen=True)
class Store:
    """The results: for each case a JSON file, and a file with its records."""

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
        """Return the records of a result; raise `BenchError` where they were changed."""
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

    def remove_others(self, names: Iterable[str]) -> list[str]:
        """Remove the results of all cases but these; return whose."""
        others = sorted({*self.names()} - {*names})
        for name in others:
            self._path(name).unlink()
            (self.directory / f"{name}.jsonl.xz").unlink(missing_ok=True)
        return others

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
