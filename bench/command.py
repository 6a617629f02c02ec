"""What the benches' command lines have in common.

Not used by `bench.ttft`, which must work alone, away from its package.
"""

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.proof.tree import Tree
from bench.ttft import machine

_ROOT: Final = Path(__file__).resolve().parents[1]


def positive(text: str) -> int:
    """Return an argument's whole number, for argparse; one below 1 is refused."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def shown_command(prog: str, argv: Sequence[str]) -> str:
    """Return a command as results show it: without directories outside of the tree."""
    return shlex.join(["python", "-m", prog, *map(_shown, argv)])


def _shown(argument: str) -> str:
    option, equals, value = "", "", argument
    if argument.startswith("--"):
        option, equals, value = argument.partition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path.name
    return f"{option}{equals}{shown}"


def origin(prog: str, argv: Sequence[str], json_path: Path | None) -> dict[str, object]:
    """Return what a result says of where it comes from: its command and the machine.

    Raises `BenchError` where it is to be written and the tree is not clean.
    """
    if json_path is not None:
        Tree(_ROOT).require_clean()
    return {"command": shown_command(prog, argv), "machine": machine()}


@contextmanager
def work_directory(given: Path | None) -> Iterator[Path]:
    """Make the directory that is given, or one that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="warmroute-bench-") as made:
        directory = (given or Path(made)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        yield directory


def write_report(path: Path, report: Mapping[str, object]) -> None:
    """Write a report as JSON, its directory made where it is missing, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")
