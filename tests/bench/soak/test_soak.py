"""A short soak with real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_short_soak_holds(tmp_path: Path) -> None:
    options = ["--minutes", "1.1", "--clients", "24", "--fault-every-s", "12"]
    options += ["--reload-every-s", "10"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.soak", "router", *options, "--logs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "holds  no wrong byte: 0" in done.stdout
    assert "plain, whole: whole" in done.stdout and "plain, streamed: whole" in done.stdout
