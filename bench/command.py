"""What the benches' command lines have in common.

Not used by `bench.ttft`, which must work alone, away from its package.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path


def positive(text: str) -> int:
    """Return an argument's whole number, for argparse; one below 1 is refused."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def write_report(path: Path, report: Mapping[str, object]) -> None:
    """Write a report as JSON, its directory made where it is missing, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")
