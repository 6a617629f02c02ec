"""A server's process in a test: killed as a crash does it, or paused."""

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cacheengine.helpers import wait_until


class ServerProcess:
    """One process, its output in a log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not killed since."""
        return self._process is not None

    def run(
        self,
        command: Sequence[str],
        answers: Callable[[], bool],
        *,
        executable: str | None = None,
        directory: Path | None = None,
    ) -> None:
        """Start it; return when it answers. AssertionError with its log when it ends instead."""
        with self.log.open("ab") as log:
            self._process = process = subprocess.Popen(
                command, executable=executable, cwd=directory, stdout=log, stderr=log
            )

        def is_ready() -> bool:
            assert process.poll() is None, self.log.read_text()[-2000:]
            return answers()

        wait_until(is_ready)

    def kill(self) -> None:
        """End it as a crash does. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> None:
        """Ask it to end, and wait for that. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let it keep its connections and do nothing; entered when all its threads have stopped."""
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            # The signal is on its way when it was sent: another thread may answer meanwhile.
            wait_until(lambda: _has_stopped(process.pid))
            yield
        finally:
            # Unheard if it was killed meanwhile.
            process.send_signal(signal.SIGCONT)


def is_running(pid: int) -> bool:
    """Whether a process lives (a zombie that nobody reaps does not): its state in ``proc(5)``."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _has_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped by a signal: state T in ``proc(5)``."""
    try:
        stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    except FileNotFoundError:  # a thread that has ended since it was listed
        return False
    return all(each.rpartition(") ")[2].startswith("T") for each in stats)
