"""A server's process in a test: killed as a crash does it, or paused."""

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cacheengine.building import wait_until


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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let it keep its connections and do nothing."""
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            # Unheard if it was killed meanwhile.
            process.send_signal(signal.SIGCONT)
