"""One child process, the leader of a process group of its own."""

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


class Child:
    """A process that was started, and where its output goes."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        log_path: Path,
        cwd: Path | None,
    ) -> None:
        """Start it, its output in a new ``log_path``; raise OSError."""
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
        """Return how it ended, as subprocess has it, without reaping it; None if it has not."""
        try:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return 0
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def alive_in(groups: Collection[int]) -> bool:
    """Whether a process of these groups lives; zombies do not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) in groups and state != "Z":
            return True
    return False


def answers(url: str) -> bool:
    """Whether a child answers 200 there."""
    try:
        # Never through a proxy from the environment: these are our own children. Nor is their
        # certificate verified, which may well name another host than this one.
        unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified)
        )
        with opener.open(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (http.client.HTTPException, OSError, ValueError):
        return False


def meaning(returncode: int) -> str:
    """Return a returncode in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    name = signal.Signals(-returncode).name
    return f"{name}, perhaps out of memory" if name == "SIGKILL" else name


# TODO of router.launch.processes: Several child processes with one fate: started together, ended together.
#
# `ProcessGroup` is a context manager for the main thread. Leaving it, for
# whatever reason (return, exception, Ctrl-C, SIGTERM, SIGHUP), ends every child
# and whatever the children have started.

_POLL_S: Final = 0.2
_TELL_S: Final = 5.0
_LINGER_S: Final = 3.0
_TAIL_BYTES: Final = 16 << 10
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ChildFailedError(Exception):
    """A child cannot serve: which, why, and the end of its log."""

    def __init__(self, name: str, what: str, log_path: Path, tail: str) -> None:
        super().__init__(name, what, log_path, tail)
        self.name = name
        self.what = what
        self.log_path = log_path
        self.tail = tail

    def __str__(self) -> str:
        shown = "\n".join(f"  | {line}" for line in self.tail.splitlines())
        return f"{self.name} {self.what}; the end of {self.log_path}:\n{shown or '  | (empty)'}"


class ChildDiedError(ChildFailedError):
    """A child ended by itself."""

    def __init__(self, name: str, returncode: int, log_path: Path, tail: str) -> None:
        super().__init__(name, f"died ({meaning(returncode)})", log_path, tail)
        self.returncode = returncode


class ChildNotReadyError(ChildFailedError):
    """A child lives but did not answer in time."""


class ProcessGroup:
    """Child processes that are ended together.

    Each child leads a session (and process group) of its own, so a Ctrl-C at
    the terminal reaches only this process, which then ends them in order. A
    child's output goes to its log file directly; nothing is lost when this
    process stops reading.

    ``grace_s`` is how long a child may take to end after SIGTERM before it and
    all it started are killed.
    """

    def __init__(self, *, grace_s: float = 15.0) -> None:
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

        ``env`` is the whole environment (None: this process's). ``log_path`` is
        truncated. Raises `ChildFailedError` when the program cannot be started,
        ValueError when the name is taken.
        """
        if name in self._children:
            raise ValueError(f"a child named {name!r} is already running")
        # A signal between the fork and the entry in the table would leave a
        # child that is never ended.
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

        Raises `ChildDiedError` when any child of the group ends meanwhile, and
        `ChildNotReadyError` after ``timeout_s``. ``say`` is told now and then how it gets on.
        """
        child = self._children[name]
        began_s = told_s = time.monotonic()
        while True:
            self.check()
            if answers(url):
                return time.monotonic() - child.started_s
            now_s = time.monotonic()
            if now_s - began_s >= timeout_s:
                what = f"did not answer at {url} within {timeout_s:.0f} s"
                raise ChildNotReadyError(name, what, child.log_path, tail(child.log_path))
            if say is not None and now_s - told_s >= _TELL_S:
                told_s = now_s
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
        """Block until a child ends by itself (`ChildDiedError`) or a signal (KeyboardInterrupt)."""
        while True:
            self.check()
            time.sleep(_POLL_S)

    def stop(self, name: str, *, kill: bool = False) -> None:
        """End one child and all it started; with ``kill`` at once, by SIGKILL."""
        child = self._children[name]
        with self._no_interrupt():
            self._end([child], grace_s=0.0 if kill else self._grace_s)
            del self._children[name]

    def stop_all(self) -> None:
        """End every child and all they started, the last started first. Idempotent."""
        with self._no_interrupt(raise_after=False):
            self._end(list(reversed(self._children.values())), grace_s=self._grace_s)
            self._children.clear()

    def _end(self, children: Collection[Child], *, grace_s: float) -> None:
        """SIGTERM the leaders, wait for them, then SIGKILL what is left of their groups.

        Only the leader gets SIGTERM: it knows in which order its own children
        must end (vLLM's server ends its engine processes itself). What outlives
        it gets a moment to clean up: vLLM's workers then unlink their shared
        memory, which outlives a SIGKILL. The leader is
        not reaped before the last signal to its group: until then its process
        id cannot be given to a stranger.
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
        """Put off a signal's KeyboardInterrupt until the block is done."""
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
    """Return the last non-empty lines of a text file, or '' if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # A progress bar rewrites its line: only what it shows last counts.
    kept = [line.rsplit("\r", 1)[-1].rstrip() for line in text.rstrip().split("\n")]
    return "\n".join([line for line in kept if line][-lines:])
