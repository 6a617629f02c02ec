"""What the real replicas did, kept in a file: simulated ones can be compared with it again.

Real replicas want an idle machine and minutes; another rate of the simulated ones, or
another model of them, does not. Compressed JSON.
"""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.calibration.under_load.stage import Played
from bench.ttft import BenchError


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """Two real replicas: their times, and what became of the sessions of each seed."""

    machine: Mapping[str, Any]
    """Where and when, and from which commit."""
    load: float
    requests: int
    rounds: int
    times: Mapping[str, Any]
    rates: Mapping[str, float]
    """That follow from the times, and as KV was moved under load."""
    played: Mapping[int, Played]
    """By seed."""


def write_real(path: Path, run: RealRun) -> None:
    """Write a run; the directory is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(msgspec.json.encode(run), mtime=0))


def read_real(path: Path) -> RealRun:
    """Return a run that was written. Raises `BenchError` for a file that holds none."""
    try:
        return msgspec.json.decode(gzip.decompress(path.read_bytes()), type=RealRun)
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise BenchError(f"--real: {path}: {error}") from None
