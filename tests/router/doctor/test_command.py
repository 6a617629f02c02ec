"""``warmroute doctor`` on the command line."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from router.cli.commands import main
from router.doctor.findings import Report, Section

CONFIGS = Path(__file__).parents[3] / "configs"


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["doctor", *args])
    return result.exit_code, result.output


def test_problems_are_lines_and_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever else runs on this machine at a router's usual port.
    monkeypatch.setattr("router.doctor.examination._taken", lambda host, port: None)
    code, output = invoke("--replica", "http://127.0.0.1:1")
    assert code == 1
    lines = output.splitlines()
    assert "127.0.0.1:1  http://127.0.0.1:1" in lines
    assert (
        "  problem  nothing listens at 127.0.0.1:1 (connection refused); start it, or correct its "
        "url; until then it gets no requests"
    ) in lines
    assert re.fullmatch(r"2 problems(, \d notes?)?\.", lines[-1])
    logging.getLogger("warmroute").warning("logging is on again")
    assert logging.root.manager.disable == logging.NOTSET


def test_json_is_for_programs() -> None:
    code, output = invoke("--replica", "http://127.0.0.1:1", "--json")
    report = json.loads(output)
    assert (code, report["well"]) == (1, False)
    assert report["counts"]["problem"] == len(
        [each for each in report["findings"] if each["level"] == "problem"]
    )
    (health,) = [each for each in report["findings"] if each["check"] == "health"]
    assert health["fix"].startswith("start it") and health["at"] == "http://127.0.0.1:1"


@pytest.mark.parametrize("text", ["replicass: []\n", "replicas: [", "policy: ttft\n"])
def test_a_file_that_does_not_load_is_a_finding(tmp_path: Path, text: str) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    code, output = invoke("--config", str(path))
    assert code == 1
    assert f"  problem  the settings do not load: {path}: " in output
    assert output.endswith("1 problem.\n")


def test_a_fleets_file_has_a_router_and_replicas() -> None:
    _, output = invoke("--config", str(CONFIGS / "fleet.yaml"), "--json")
    about = {each["about"] for each in json.loads(output)["findings"]}
    assert {"the router", "replica1", "replica2"} <= about


def test_either_a_file_or_replicas_must_be_given(tmp_path: Path) -> None:
    for args in ([], ["--config", "x.yaml", "--replica", "http://a"]):
        code, output = invoke(*args)
        assert code == 2 and "give either a FILE or --replica URL" in output


def test_a_bad_url_is_a_finding() -> None:
    code, output = invoke("--replica", "localhost:8000")
    assert code == 1 and "'localhost:8000' is not an HTTP base URL" in output


def test_a_report_without_problems() -> None:
    section = Section(about="the router", at="file")
    section.ok("port", "free")
    assert list(Report([section]).lines())[-1] == (None, "No problem found.")
    section.note("keys", "several\n\nlines", "do this")
    report = Report([section, Section(about="empty")])
    assert [line for _, line in report.lines()] == [
        "the router  file",
        "  ok       free",
        "  note     several lines; do this",
        "",
        "No problem found, 1 note.",
    ]
    assert report.is_well
    section.problem("port", "taken")
    assert not report.is_well and list(report.lines())[-1][1] == "1 problem, 1 note."


def test_nothing_but_findings_is_printed() -> None:
    """The findings say what the router's parts would log."""
    done = subprocess.run(
        [sys.executable, "-m", "router", "doctor", "--replica", "http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
