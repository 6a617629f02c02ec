"""A short soak with real processes."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.soak.engines import EngineFault
from bench.soak.faulty_proxy import RESET
from bench.soak.fleet import CALLED_DOWN, ReplicaFault
from router.gateway.envoy_config import envoy_program

ROOT = Path(__file__).parents[3]


needs_envoy = pytest.mark.skipif(envoy_program() is None, reason="needs Envoy (make servers)")


@pytest.mark.slow
@pytest.mark.parametrize("gateway", [[], pytest.param(["--gateway", "envoy"], marks=needs_envoy)])
def test_a_short_soak_with_each_fault_holds(tmp_path: Path, gateway: list[str]) -> None:
    options = ["--minutes", "1.6", "--clients", "40", "--fault-every-s", "9.5"]
    options += ["--reload-every-s", "25", *gateway]
    done = subprocess.run(
        [sys.executable, "-m", "bench.soak", "router", *options, "--logs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=240,
    )
    # It takes minutes until all tables are full, and on a busy machine some seconds pass without
    # a new connection.
    allowed = ("own memory of", RESET)
    failed = [each for each in done.stdout.splitlines() if each.startswith("FAILS")]
    assert not [each for each in failed if not any(part in each for part in allowed)], (
        done.stdout[-6000:] + done.stderr
    )
    assert all(f" s: {kind}," in done.stdout for kind in ReplicaFault), done.stderr
    assert CALLED_DOWN in (tmp_path / "router.log").read_text()  # the replica that was killed
    assert "holds  no wrong byte: 0" in done.stdout
    assert "plain, whole: whole" in done.stdout and "plain, streamed: whole" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="killed starts need vLLM")
def test_a_short_soak_of_engines_with_each_fault_holds(tmp_path: Path) -> None:
    options = ["--engines", "2", "--minutes", "0.75", "--fault-every-s", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.soak", "engine", *options, "--fault-length", "0.25"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=400,
    )
    # Chance decides whether damaged chunks are read. A busy machine interrupts holds.
    allowed = ("damaged chunks found", "a hold takes")
    failed = [each for each in done.stdout.splitlines() if each.startswith("FAILS")]
    assert not [each for each in failed if not any(part in each for part in allowed)], (
        done.stdout[-8000:] + done.stderr
    )
    assert all(f" s: {kind}," in done.stdout for kind in EngineFault), done.stderr
    assert "holds  no wrong byte loaded: 0" in done.stdout
