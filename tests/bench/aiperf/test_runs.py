"""What is measured and kept: a simulated fleet for real, a program in AIPerf's place."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.aiperf import __main__ as command
from bench.aiperf.fleets import FLEETS
from bench.aiperf.report import Figures
from bench.aiperf.runs import Run, measure
from bench.aiperf.stage import Stage
from bench.ttft import BenchError
from tests.bench.aiperf.reports import report

ROOT = Path(__file__).parents[3]

ASKS = f"""#!{sys.executable}
import json, pathlib, sys, urllib.request
sys.path.insert(0, {str(ROOT)!r})
from tests.bench.aiperf.reports import leave
urls = [value for key, value in zip(sys.argv, sys.argv[1:]) if key == "--url"]
opener = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
cached = []
for url in urls:
    body = {{"model": "sim", "max_tokens": 1, "messages": [
        {{"role": "user", "content": "The same words for all of them. " * 100}}]}}
    asked = urllib.request.Request(f"{{url}}/v1/chat/completions", json.dumps(body).encode(),
        {{"content-type": "application/json"}})
    with opener.open(asked, timeout=60) as answer:
        usage = json.loads(answer.read())["usage"]
    cached.append(usage["prompt_tokens_details"]["cached_tokens"])
count = {{"avg": float(len(urls))}}
leave(pathlib.Path("artifacts"), request_count=count, completed_request_count=count,
    overall_usage_prompt_cache_read_pct={{"avg": float(sum(cached))}})
"""


@pytest.mark.slow
def test_each_run_begins_with_empty_caches(tmp_path: Path) -> None:
    program = tmp_path / "aiperf"
    program.write_text(ASKS)
    program.chmod(0o755)
    fleet = FLEETS["simulated"]
    runs = measure(fleet, fleet.workload, program, tmp_path / "logs")
    asked = {name: each.figures.requests for name, each in runs.items()}
    assert asked == {"router": 1, "in-turn": 4, "one-replica": 1}
    assert [each.figures.cached_share for each in runs.values()] == [0.0, 0.0, 0.0]
    assert runs["one-replica"].told.count("25") == 1
    logs = {str(path.relative_to(tmp_path / "logs")) for path in (tmp_path / "logs").rglob("*.log")}
    assert {"fleet.log", "router/aiperf.log", "in-turn/aiperf.log"} <= logs


def test_logs_are_left_when_a_fleet_does_not_start(tmp_path: Path) -> None:
    @contextmanager
    def broken(directory: Path) -> Iterator[Stage]:
        (directory / "replica1.log").write_text("no such device")
        raise BenchError("replica1 died")
        yield

    fleet = replace(FLEETS["real"], start=broken)
    with pytest.raises(BenchError, match="replica1 died"):
        measure(fleet, fleet.workload, tmp_path / "aiperf", tmp_path / "logs")
    assert (tmp_path / "logs" / "replica1.log").read_text() == "no such device"


def a_run(name: str) -> Run:
    return Run(
        told=["profile", "--model", "m"],
        version="0.13.0",
        wall_s=1.5,
        figures=Figures.read(report()),
        kept={"json": f'{{"run": "{name}"}}', "csv": "Metric,Value\n"},
        table="",
    )


def test_reports_are_kept_with_what_they_must_be_read_with(tmp_path: Path) -> None:
    runs = {name: a_run(name) for name in ("router", "one-replica")}
    fleet = FLEETS["simulated"]
    made = {"command": "python -m bench.aiperf", "machine": {"commit": "abc"}}
    command.keep(tmp_path / "simulated", fleet, fleet.workload, runs, made)
    told = json.loads((tmp_path / "simulated" / "run.json").read_text())
    assert (told["command"], told["machine"]["commit"]) == ("python -m bench.aiperf", "abc")
    assert (told["aiperf"], told["fleet"]["replicas"]) == ("0.13.0", 4)
    assert told["runs"]["router"]["command"] == "aiperf profile --model m"
    assert told["runs"]["one-replica"]["ttft_p90_ms"] == 395.0
    assert json.loads((tmp_path / "simulated" / "router.json").read_text()) == {"run": "router"}


def test_a_dirty_tree_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "changed.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "aiperf", lambda: pytest.fail("it was installed"))
    assert command.main(["--out", "results"]) == 1
    assert "changed.py" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_an_absolute_place_to_keep_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--out", str(tmp_path)])
