"""The servers that are fuzzed: processes as operators run them, their logs, their memory."""

import json
import os
import re
import resource
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cacheengine.launch.vllm_launch import free_ports
from tests.cacheengine.helpers import wait_until
from tests.fuzz.exchange import Port

_MOST_ADDRESSES: Final = 8 << 30
_ROOT: Final = Path(__file__).parents[2]
_BAD: Final = re.compile(
    r"Traceback|Task exception|never retrieved|Unhandled|Segmentation| failed: |Error handling"
)
MOST_MORE_BYTES: Final = 200 << 20
"""What a server's memory may grow by: allocators keep, and tables fill up to their bounds."""


@dataclass
class Server:
    """A process that is fuzzed."""

    process: subprocess.Popen[bytes]
    log: Path
    began_bytes: int = 0
    read_chars: int = 0
    """Lines of the log: each defect is reported once."""

    def check(self) -> None:
        """Raise AssertionError where it has ended, has logged a defect, or has grown."""
        assert self.process.poll() is None, f"it ended:\n{self.told()[-3000:]}"
        assert not (found := self.complaints()), "\n".join(found[:40])
        grown = self.resident_bytes() - self.began_bytes
        assert grown < MOST_MORE_BYTES, f"{grown >> 20} MiB more than at its start"

    def told(self) -> str:
        return self.log.read_text(errors="replace")

    def complaints(self) -> list[str]:
        """Return the log's lines from the first defect on."""
        told = self.told()
        lines, self.read_chars = told[self.read_chars :].splitlines(), len(told)
        at = next((at for at, line in enumerate(lines) if _BAD.search(line)), None)
        return [] if at is None else lines[max(0, at - 1) : at + 40]

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(log: Path, *argv: str, url: str | None = None) -> Iterator[Server]:
    """Run a command of this repository; entered once it answers at ``url``, if one is given."""
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, *argv], stdout=out, stderr=out, cwd=_ROOT)
    # What takes all memory there is would end other processes as well.
    resource.prlimit(process.pid, resource.RLIMIT_AS, (_MOST_ADDRESSES, _MOST_ADDRESSES))
    try:
        server = Server(process, log)
        if url is not None:
            wait_until(lambda: _answers(server, url))
            server.began_bytes = server.resident_bytes()
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(server: Server, url: str) -> bool:
    assert server.process.poll() is None, server.told()[-3000:]
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@contextmanager
def simulated(directory: Path) -> Iterator[tuple[Server, dict[str, Any]]]:
    """Run two fast simulated replicas."""
    sizes = {
        "--replicas": "2",
        "--gpu-tokens": "8192",
        "--cpu-tokens": "8192",
        "--disk-tokens": "65536",
        "--speed": "100",
        "--output-tokens": "2",
        "--directory": str(directory / "model"),
    }
    words = [word for option in sizes.items() for word in option]
    log = directory / "replicas.log"
    with running(log, "-m", "simulator", "--json", *words) as server:
        wait_until(lambda: server.process.poll() is not None or "\n" in server.told())
        where = json.loads(server.told().splitlines()[0])
        server.began_bytes = server.resident_bytes()
        yield server, where


@dataclass(kw_only=True)
class Fleet:
    """A router with all of its ports before two replicas."""

    router: Server
    replicas: Server
    where: dict[str, Any]
    ports: dict[str, Port] = field(default_factory=dict)

    @property
    def api(self) -> Port:
        return self.ports["api"]

    def in_flight(self) -> float:
        """Return how many requests are in flight or wait, as the router tells."""
        got = self.ports["own"].send(
            b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", method="GET"
        )
        wanted = re.compile(
            rb'^warmroute_(?:in_flight\{[^}]*\}|table_entries\{table="waiting"\}) (\S+)', re.M
        )
        found = wanted.findall(got.body)
        assert found, got
        return sum(map(float, found))

    def check(self) -> None:
        """Raise AssertionError where something is left of a request, or a log reports a defect."""
        wait_until(lambda: not self.in_flight())
        self.router.check()
        self.replicas.check()


@contextmanager
def fleet(directory: Path, command: str = "serve", **settings: Any) -> Iterator[Fleet]:
    """Run a router, or a picker, with all that it can listen on."""
    names = ("api", "controller", "monitor", "pull", "reply", "heartbeat", "picker", "own")
    numbers = dict(zip(names, free_ports(len(names)), strict=True))
    with simulated(directory) as (replicas, where):
        config = {
            "port": numbers["api"],
            "replicas": [
                {name: each[name] for name in ("url", "agent_url", "instance_id")}
                for each in where["replicas"]
            ],
            "tokenizer": {"memo_bytes": 1 << 20},
            "index": {"max_keys": 20_000},
            "sessions": {"max_sessions": 1000},
            "model_aliases": {"other": "sim"},
            "max_body_bytes": 4 << 20,
            "timeouts": {"body_s": 1.0, "drain_s": 1.0},
            "controller": {"port": numbers["controller"], "monitor_port": numbers["monitor"]},
            "lmcache_workers": {
                "pull_port": numbers["pull"],
                "reply_port": numbers["reply"],
                "heartbeat_port": numbers["heartbeat"],
            },
            **settings,
        }
        config.setdefault("access", {})["metrics"] = "open"
        if command == "picker":
            keys = {"port": "picker", "http_port": "own"}
            config["picker"] = {key: numbers[name] for key, name in keys.items()}
            config["picker"]["waive"] = ["model_aliases"]
        else:
            numbers["own"] = numbers["api"]
        path = directory / "router.yaml"
        path.write_text(json.dumps(config))
        url = f"http://127.0.0.1:{numbers['own']}/health"
        argv = ("-m", "router", command, "--config", str(path))
        with running(directory / "router.log", *argv, url=url) as router:
            ports = {name: Port("127.0.0.1", number) for name, number in numbers.items()}
            yield Fleet(router=router, replicas=replicas, where=where, ports=ports)
