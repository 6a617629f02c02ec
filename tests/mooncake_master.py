"""A real mooncake_master for tests, on ports of its own, ended with its test."""

import importlib.util
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cacheengine.launch.vllm_launch import free_ports
from tests.processes import ServerProcess
from tests.servers import missing


class MooncakeMaster(ServerProcess):
    """A master that keeps everything in memory; what is stored lies in its clients."""

    def __init__(self, directory: Path, *options: str) -> None:
        super().__init__(directory / "mooncake_master.log")
        self._directory = directory
        self._options = options
        self.port, self._metrics_port = free_ports(2)

    @property
    def url(self) -> str:
        """Its ``remote_url``."""
        return f"mooncakestore://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Start it again, empty; return when it accepts connections."""
        command = [
            *(_program(), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1"),
            *(f"--metrics_port={self._metrics_port}", "--metrics_host=127.0.0.1"),
            *self._options,
        ]
        self.run(command, self._accepts, directory=self._directory)

    def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def running_master(directory: Path, *options: str) -> Iterator[MooncakeMaster]:
    """Run a master for the time of the block; skip the test where there can be none."""
    check_mooncake()
    master = MooncakeMaster(directory, *options)
    try:
        master.start()
        yield master
    finally:
        master.kill()


def check_mooncake() -> None:
    """Skip the test, or fail it, where Mooncake's client and master cannot run."""
    if importlib.util.find_spec("mooncake") is None:
        missing("Mooncake Store (the lock for tests has it)")
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], check=False, capture_output=True, text=True
    )
    if done.returncode:
        missing(f"what Mooncake Store needs ({done.stderr.strip().splitlines()[-1:]})")


def _program() -> str:
    return str(Path(sys.executable).parent / "mooncake_master")
