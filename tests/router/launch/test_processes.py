"""Real child processes: readiness, a death reported with its log, and a common end."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from router.launch.processes import (
    ChildDiedError,
    ChildFailedError,
    ChildNotReadyError,
    ProcessGroup,
    tail,
)
from tests.processes import is_running

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
open(sys.argv[1] + ".new", "w").write(str(server.server_port))
import os; os.rename(sys.argv[1] + ".new", sys.argv[1])
server.serve_forever()
"""
SLEEPER = "import signal; signal.pause()"
# A leader that ends on SIGTERM and leaves a child that ignores it.
LEAVES_A_CHILD = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);"
    "signal.pause()"])
print(child.pid, flush=True)
signal.pause()
"""


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


def wait_until(condition: Callable[[], bool], group: ProcessGroup) -> None:
    """Wait, as long as the test's own timeout allows, watching that no child dies."""
    while not condition():
        group.check()


def test_ready_when_its_url_answers(tmp_path: Path) -> None:
    port = tmp_path / "port"
    with ProcessGroup() as group:
        pid = group.start("web", python(SERVER, str(port)), None, tmp_path / "web.log")
        wait_until(port.exists, group)
        took_s = group.wait_ready("web", f"http://127.0.0.1:{port.read_text()}/", timeout_s=60)
        assert took_s >= 0
        assert is_running(pid)
    assert not is_running(pid)


def test_a_death_is_reported_with_the_end_of_the_log(tmp_path: Path) -> None:
    code = "print('first'); print('second: out of memory'); raise SystemExit(3)"
    with ProcessGroup() as group:
        other = group.start("other", python(SLEEPER), None, tmp_path / "other.log")
        group.start("engine", python(code), None, tmp_path / "deep" / "engine.log")
        with pytest.raises(ChildDiedError) as caught:
            group.wait_ready("other", "http://127.0.0.1:1/", timeout_s=60)
    assert (caught.value.name, caught.value.returncode) == ("engine", 3)
    assert "engine died (exit code 3); the end of" in str(caught.value)
    assert "  | second: out of memory" in str(caught.value)
    assert not is_running(other), "the others are ended too"


def test_a_signal_is_named(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    with ProcessGroup() as group:
        group.start("engine", python(code), None, tmp_path / "log")
        with pytest.raises(ChildDiedError, match=r"died \(SIGSEGV\)"):
            group.wait()


def test_not_ready_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.launch.processes._REPORT_EVERY_S", 0.0)
    seen: list[str] = []
    with ProcessGroup() as group:
        code = "print('loading weights', flush=True);" + SLEEPER
        group.start("slow", python(code), None, tmp_path / "log")
        wait_until(lambda: bool(tail(tmp_path / "log")), group)
        with pytest.raises(
            ChildNotReadyError, match=r"did not answer at http://127.0.0.1:1/ within 3 s"
        ):
            group.wait_ready("slow", "http://127.0.0.1:1/", 3.0, seen.append)
    assert {each.partition(" starting for ")[0] for each in seen} == {"slow:"}
    assert {each.partition(" s | ")[2] for each in seen} == {"loading weights"}


def test_a_childs_own_children_are_ended_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ProcessGroup(grace_s=60) as group:
        leader = group.start("leader", python(LEAVES_A_CHILD), None, log)
        wait_until(lambda: "deaf" in tail(log), group)
        grandchild = next(int(line) for line in tail(log).splitlines() if line.isdigit())
        assert is_running(grandchild)
    assert not is_running(leader)
    wait_until(lambda: not is_running(grandchild), group)


def test_a_childs_own_children_may_clean_up_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's workers do, once their server has ended."""
    # A busy machine may take seconds to start the interpreter of a child.
    monkeypatch.setattr("router.launch.processes._LINGER_S", 60.0)
    cleaned, log = tmp_path / "cleaned", tmp_path / "log"
    child = (
        "import pathlib, sys, time; sys.stdin.read(); time.sleep(0.3);"
        f"pathlib.Path({str(cleaned)!r}).write_text('yes')"
    )
    leader = (
        "import signal, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE)\n"
        "print('there', flush=True)\n"
        "signal.pause()"
    )
    with ProcessGroup(grace_s=60) as group:
        group.start("leader", python(leader), None, log)
        wait_until(lambda: "there" in tail(log), group)
    assert cleaned.read_text() == "yes"


def test_a_deaf_child_is_killed_after_the_grace(tmp_path: Path) -> None:
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('deaf', flush=True)\nwhile True: signal.pause()"
    )
    with ProcessGroup(grace_s=0.1) as group:
        pid = group.start("deaf", python(code), None, tmp_path / "log")
        wait_until(lambda: "deaf" in tail(tmp_path / "log"), group)
    assert not is_running(pid)


def test_one_child_can_be_killed_and_started_again(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        first = group.start("one", python(SLEEPER), None, tmp_path / "log")
        with pytest.raises(ValueError, match="already running"):
            group.start("one", python(SLEEPER), None, tmp_path / "log")
        group.stop("one", kill=True)
        assert not is_running(first)
        second = group.start("one", python(SLEEPER), None, tmp_path / "log")
        group.check()
        assert is_running(second)


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with (
        ProcessGroup() as group,
        pytest.raises(ChildFailedError, match=r"ghost cannot be started .*No such file"),
    ):
        group.start("ghost", [str(tmp_path / "ghost")], None, tmp_path / "log")


def test_the_environment_is_the_childs_own(tmp_path: Path) -> None:
    code = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES')); " + SLEEPER
    with ProcessGroup() as group:
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "3", "PYTHONUNBUFFERED": "1"}
        group.start("gpu", python(code), env, tmp_path / "log")
        wait_until(lambda: tail(tmp_path / "log") == "3", group)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_supervisor_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    """A supervisor in a process of its own, as in `warmroute up`."""
    code = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from router.launch.processes import ProcessGroup
        try:
            with ProcessGroup() as group:
                for name in "ab":
                    print(group.start(name, [sys.executable, "-c", {SLEEPER!r}],
                          None, Path({str(tmp_path)!r}) / name), flush=True)
                print("started", flush=True)
                group.wait()
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(supervisor.stdout.readline()) for _ in range(2)]
        assert supervisor.stdout.readline() == "started\n"
        assert all(map(is_running, pids))
        supervisor.send_signal(number)
        assert supervisor.stdout.read() == "interrupted\n"
    assert supervisor.returncode == 0
    assert not any(map(is_running, pids))


def test_stopping_twice_is_harmless(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        pid = group.start("one", python(SLEEPER), None, tmp_path / "log")
        group.stop_all()
        group.stop_all()
        assert not is_running(pid)


def test_the_previous_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ProcessGroup():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("", ""),
        ("a\nb\n\n", "a\nb"),
        ("10%\r50%\r100%\nend", "100%\nend"),
        ("\n".join(map(str, range(100))), "\n".join(map(str, range(70, 100)))),
    ],
)
def test_the_end_of_a_log(tmp_path: Path, written: str, shown: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(written.encode())
    assert tail(path) == shown
    assert tail(tmp_path / "none") == ""
