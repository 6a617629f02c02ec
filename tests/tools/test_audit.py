"""The audit: what it calls clean, and what it does not."""

import json
import subprocess
from typing import Any

import pytest

from tools import audit


def reporting(monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "") -> None:
    """Have the other checks pass, and pip-audit say this."""
    monkeypatch.setattr(audit, "imports_are_declared", lambda: True)
    monkeypatch.setattr(audit, "installation_fits", lambda: True)
    done = subprocess.CompletedProcess[str]([], 1, stdout, stderr)
    monkeypatch.setattr(audit, "_run", lambda *_: done)


def report(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages})


FINE = {"name": "aiohttp", "version": "3", "vulns": []}
WEAK = {"name": "jinja2", "version": "2", "vulns": [{"id": "CVE-1"}, {"id": "CVE-2"}]}
UNKNOWN = {"name": "yarl", "skip_reason": "not on PyPI"}


def test_clean_is_what_was_looked_up_and_has_no_weakness(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reporting(monkeypatch, report(FINE))
    assert audit.main([]) == audit.main(["--strict"]) == 0
    assert capsys.readouterr().out.endswith("audit: clean\n")


@pytest.mark.parametrize(
    ("stdout", "stderr", "said"),
    [
        ("", "ERROR: no connection", "vulnerabilities were not looked up (ERROR: no connection)"),
        ("", "", "vulnerabilities were not looked up (no reason given)"),
        (
            report(UNKNOWN),
            "",
            "the database here does not know 1 of 1 packages (yarl)",
        ),
        (
            report(FINE, UNKNOWN),
            "",
            "the database here does not know 1 of 2 packages (yarl)",
        ),
    ],
)
def test_what_was_not_looked_up_is_said_in_one_line_and_not_called_clean(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stdout: str,
    stderr: str,
    said: str,
) -> None:
    reporting(monkeypatch, stdout, stderr)
    assert (audit.main([]), audit.main(["--strict"])) == (0, 1)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"audit: INCOMPLETE: {said}"


def test_a_weakness_fails_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reporting(monkeypatch, report(FINE, WEAK, UNKNOWN))
    assert audit.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  jinja2 2: CVE-1, CVE-2" in lines
    assert lines[-1] == "audit: FAILED, see above"


def test_another_check_that_fails_is_no_clean_audit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reporting(monkeypatch, report(FINE))
    monkeypatch.setattr(audit, "installation_fits", lambda: False)
    assert audit.main([]) == 1
    assert capsys.readouterr().out.endswith("audit: FAILED, see above\n")
