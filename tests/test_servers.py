"""The servers that tests run: installed where that is permitted, and missed aloud elsewhere."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cacheengine.helpers import wait_until
from tests.servers import Program, missing, redis_program, running
from tools import servers


def _need(package: str, there: Sequence[bool]) -> servers.Need:
    """Something of which it is found in turn whether it is there; the last answer stays."""
    answers = list(there)
    return servers.Need(package, lambda: answers.pop(0) if len(answers) > 1 else answers[0], "X")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that would have been run, none of them successful."""
    ran: list[str] = []

    def run(command: Sequence[str], *, show: bool = False) -> bool:
        ran.append(" ".join(command))
        return False

    monkeypatch.setattr(servers, "_run", run)
    monkeypatch.setattr(servers, "_as_root", lambda: ["root"])
    monkeypatch.delenv("CI", raising=False)
    return ran


def test_nothing_is_said_or_done_when_all_is_there(
    commands: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "NEEDS", [_need("a", [True])])
    assert servers.main() == 0
    assert (commands, capsys.readouterr().out) == ([], "")


def test_only_what_is_missing_is_installed(
    commands: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "NEEDS", [_need("a", [True]), _need("b", [False, True])])
    assert servers.main() == 0
    assert commands[0].startswith("root apt-get ")
    assert " install " in commands[0]
    assert commands[0].endswith(" b")
    assert "not tested" not in capsys.readouterr().out


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_what_cannot_be_installed_is_said_and_in_ci_an_error(
    commands: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ci: str,
    code: int,
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(servers, "NEEDS", [_need("b", [False])])
    assert servers.main() == code
    out = capsys.readouterr().out
    assert "b is not installed: not tested here: X" in out
    assert ("CI is set" in out) == bool(code)
    assert any(each.startswith("root apt-get ") and " update " in each for each in commands)


def test_an_installation_killed_midway_is_ended_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dpkg then refuses every other one, until it is told to go on with what is half done."""
    half_done, installed = True, False

    def run(command: Sequence[str], *, show: bool = False) -> bool:
        nonlocal half_done, installed
        if list(command[1:]) == ["dpkg", "--configure", "-a"]:
            half_done = False
        if half_done:
            return False
        installed |= "install" in command
        return True

    monkeypatch.setattr(servers, "_run", run)
    monkeypatch.setattr(servers, "_as_root", lambda: ["root"])
    monkeypatch.setattr(servers, "NEEDS", [servers.Need("b", lambda: installed, "X")])
    monkeypatch.setenv("CI", "true")
    assert servers.main() == 0
    assert "not tested" not in capsys.readouterr().out


def test_without_permission_nothing_is_tried(
    commands: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "_as_root", lambda: None)
    monkeypatch.setattr(servers, "NEEDS", [_need("b", [False])])
    assert servers.main() == 0
    assert commands == []
    assert "cannot install" in capsys.readouterr().out


def test_a_missing_server_skips_its_tests_but_not_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="x is not installed"):
        missing("x")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="x is not installed"):
        missing("x")


def test_redis_runs_from_the_package_without_the_service(tmp_path: Path) -> None:
    """Debian's redis-tools has the server under another name."""
    other_name = Path(redis_program().path).with_name("redis-check-rdb")
    if not other_name.exists():
        pytest.skip("this Redis is not packaged as Debian's is")
    with running(Program("redis", str(other_name)), tmp_path / "s") as server:
        wait_until(server._answers)
