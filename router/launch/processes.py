"""Child processes that are started together and ended together."""

import http.client
import os
import signal
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

_POLL_S: Final = 0.2
_REPORT_EVERY_S: Final = 5.0
_LINGER_S: Final = 3.0
_TAIL_BYTES: Final = 16 << 10
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Child:
    """A started process. It leads a session and a process group of its own."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        log_path: Path,
        cwd: Path | None,
    ) -> None:
        """Start it with its output in ``log_path``, which is truncated; raise OSError."""
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                argv,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started_s = time.monotonic()

    def returncode(self) -> int | None:
        """Return its exit code as in `subprocess`, without reaping it; None while it runs."""
        try:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return 0
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def alive_in(groups: Collection[int]) -> bool:
    """Whether a process of these groups lives; zombies do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) in groups and state != "Z":
            return True
    return False


def answers(url: str) -> bool:
    """Whether a GET of ``url`` gets 200."""
    try:
        # Never through a proxy from the environment: these are our own children. Their certificate
        # is not verified, since it may name another host.
        unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified)
        )
        with opener.open(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (http.client.HTTPException, OSError, ValueError):
        return False


def exit_text(returncode: int) -> str:
    """Describe an exit code or a signal."""
    if returncode >= 0:
        return f"exit code {returncode}"
    name = signal.Signals(-returncode).name
    return f"{name}, perhaps out of memory" if name == "SIGKILL" else name


class ChildFailedError(Exception):
    """A child cannot serve; has its name, the reason and the end of its log."""

    def __init__(self, name: str, problem: str, log_path: Path, tail: str) -> None:
        super().__init__(name, problem, log_path, tail)
        self.name = name
        self.problem = problem
        self.log_path = log_path
        self.tail = tail

    def __str__(self) -> str:
        shown = "\n".join(f"  | {line}" for line in self.tail.splitlines())
        return f"{self.name} {self.problem}; the end of {self.log_path}:\n{shown or '  | (empty)'}"


class ChildDiedError(ChildFailedError):
    """A child ended by itself."""

    def __init__(self, name: str, returncode: int, log_path: Path, tail: str) -> None:
        super().__init__(name, f"died ({exit_text(returncode)})", log_path, tail)
        self.returncode = returncode


class ChildNotReadyError(ChildFailedError):
    """A child lives but did not answer in time."""


class ProcessGroup:
    """Child processes that are ended together; a context manager for the main thread.

    Leaving it (by a return, an exception, Ctrl-C, SIGTERM or SIGHUP) ends every child and all
    processes that the children have started. A child has its own session, so Ctrl-C at the
    terminal reaches only this process, which then ends the children in order. A child writes to its
    log file directly, so no output is lost if this process hangs.
    """

    def __init__(self, *, grace_s: float = 15.0) -> None:
        """A child that has not ended ``grace_s`` after SIGTERM is killed with all it started."""
        self._grace_s = grace_s
        self._children: dict[str, Child] = {}
        self._previous: dict[signal.Signals, Any] = {}
        self._uninterruptible = False
        self._interrupted = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop_all()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        log_path: Path,
        *,
        cwd: Path | None = None,
    ) -> int:
        """Start a child and return its process id.

        ``env`` is the whole environment (None: this process's). ``log_path`` is truncated. Raises
        `ChildFailedError` if the program cannot be started, ValueError if the name is in use.
        """
        if name in self._children:
            raise ValueError(f"a child named {name!r} is already running")
        # A KeyboardInterrupt between the fork and the entry in the table would leave a child that
        # is never ended.
        with self._no_interrupt():
            try:
                child = Child(name, argv, env, log_path, cwd)
            except OSError as error:
                raise ChildFailedError(
                    name, f"cannot be started ({error})", log_path, ""
                ) from error
            self._children[name] = child
        return child.process.pid

    def wait_ready(
        self,
        name: str,
        url: str,
        timeout_s: float,
        say: Callable[[str], None] | None = None,
    ) -> float:
        """Wait until ``url`` answers 200; return the seconds since the child's start.

        Raises `ChildDiedError` if any child of the group ends meanwhile, and `ChildNotReadyError`
        after ``timeout_s``. ``say`` gets a line of progress every few seconds.
        """
        child = self._children[name]
        began_s = reported_s = time.monotonic()
        while True:
            self.check()
            if answers(url):
                return time.monotonic() - child.started_s
            now_s = time.monotonic()
            if now_s - began_s >= timeout_s:
                problem = f"did not answer at {url} within {timeout_s:.0f} s"
                raise ChildNotReadyError(name, problem, child.log_path, tail(child.log_path))
            if say is not None and now_s - reported_s >= _REPORT_EVERY_S:
                reported_s = now_s
                last_line = tail(child.log_path, lines=1)[:100]
                say(f"{name}: starting for {now_s - child.started_s:.0f} s | {last_line}")
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raise `ChildDiedError` if any child has ended."""
        for child in self._children.values():
            returncode = child.returncode()
            if returncode is not None:
                raise ChildDiedError(child.name, returncode, child.log_path, tail(child.log_path))

    def wait(self) -> None:
        """Block until a child ends (`ChildDiedError`) or a signal comes (KeyboardInterrupt)."""
        while True:
            self.check()
            time.sleep(_POLL_S)

    def stop(self, name: str, *, kill: bool = False) -> None:
        """End one child and all that it started, with ``kill`` by SIGKILL at once."""
        child = self._children[name]
        with self._no_interrupt():
            self._end([child], grace_s=0.0 if kill else self._grace_s)
            del self._children[name]

    def stop_all(self) -> None:
        """End every child and all that they started, in reverse order. Idempotent."""
        with self._no_interrupt(raise_after=False):
            self._end(list(reversed(self._children.values())), grace_s=self._grace_s)
            self._children.clear()

    def _end(self, children: Collection[Child], *, grace_s: float) -> None:
        """Send SIGTERM to the children, wait for them, then send SIGKILL to their groups.

        Only the child itself gets SIGTERM, since it knows in which order its own children must end:
        vLLM's server ends its engine processes. Processes that outlive it get a moment to clean up:
        vLLM's workers unlink their shared memory, which would survive a SIGKILL. The child is not
        reaped before the last signal to its group, so that its process id is not used again.
        """
        if grace_s > 0:
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child.process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        for child in children:
            while child.returncode() is None and time.monotonic() < deadline_s:
                time.sleep(0.02)
        lingering_until_s = time.monotonic() + min(grace_s, _LINGER_S)
        groups = {child.process.pid for child in children}
        while alive_in(groups) and time.monotonic() < lingering_until_s:
            time.sleep(0.02)
        for child in children:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()

    def _on_signal(self, *_: object) -> None:
        if self._uninterruptible:
            self._interrupted = True
            return
        raise KeyboardInterrupt

    @contextmanager
    def _no_interrupt(self, *, raise_after: bool = True) -> Iterator[None]:
        """Delay a signal's KeyboardInterrupt until the end of the block."""
        outer, self._uninterruptible = self._uninterruptible, True
        try:
            yield
        finally:
            self._uninterruptible = outer
        if self._interrupted and not outer and raise_after:
            self._interrupted = False
            raise KeyboardInterrupt

    def __repr__(self) -> str:
        children = ", ".join(f"{n}={c.process.pid}" for n, c in self._children.items())
        return f"<ProcessGroup {children or 'empty'}>"


def tail(path: Path, *, lines: int = 30) -> str:
    """Return the last non-empty lines of a text file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # A progress bar rewrites its line; keep its last state.
    kept = [line.rsplit("\r", 1)[-1].rstrip() for line in text.rstrip().split("\n")]
    return "\n".join([line for line in kept if line][-lines:])
