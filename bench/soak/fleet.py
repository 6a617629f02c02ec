"""The simulated replicas, each a process of its own, and what is done to them."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from bench.soak.faults import Fault, Kind
from bench.soak.ledger import Ledger
from bench.soak.settings import BLOCK_TOKENS, CHUNK_TOKENS, HOST, instance_id
from bench.ttft import BenchError
from router.launch.processes import ProcessGroup, tail

_READY_S: Final = 60.0
_POLL_S: Final = 0.1
_RECOVERS_S: Final = 3.0
"""Between the end of one trouble and the next: the router asks every two seconds."""
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


class Replica:
    """One replica's process, started again as often as needed, always at the same ports."""

    def __init__(
        self, group: ProcessGroup, directory: Path, number: int, ports: tuple[int, int]
    ) -> None:
        self.number = number
        self.instance_id = instance_id(number)
        self.url = f"http://{HOST}:{ports[0]}"
        self.agent_url = f"http://{HOST}:{ports[1]}"
        self.logs: list[Path] = []
        self.cpu_s = 0.0
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
        """Wait until it serves; return where its parts are. Raises `BenchError`."""
        until_s = time.monotonic() + _READY_S
        while not (told := _first_line(self.logs[-1])):
            self._group.check()
            if time.monotonic() > until_s:
                raise BenchError(f"{self.instance_id} did not start: {tail(self.logs[-1])}")
            await asyncio.sleep(_POLL_S)
        where: dict[str, Any] = orjson.loads(told)
        return where

    async def stop(self, *, kill: bool) -> None:
        """End the process: by SIGKILL at once, or by SIGTERM."""
        await asyncio.to_thread(self._group.stop, self.instance_id, kill=kill)

    def hang(self) -> None:
        """Stop the process where it is."""
        os.kill(self._pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        os.kill(self._pid, signal.SIGCONT)

    async def is_idle(self) -> bool:
        """Whether it computes nothing."""
        where = orjson.loads(_first_line(self.logs[-1]) or b"{}")
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{where['control_url']}/truth") as response,
        ):
            (truth,) = await response.json()
        return bool(truth["running"] == truth["waiting"] == 0)


def _first_line(log: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        for line in log.read_bytes().splitlines(keepends=True):
            if line.startswith(b"{") and line.endswith(b"\n"):
                return line
    return None


async def disturb(
    faults: Sequence[Fault],
    replicas: Sequence[Replica],
    ledger: Ledger,
    *,
    began_s: float,
    say: Callable[[str], None],
) -> None:
    """Bring each fault about when it is due, one after the other: never are two in trouble."""
    for fault in faults:
        replica = replicas[fault.replica]
        await asyncio.sleep(began_s + fault.at_s - time.monotonic())
        say(f"{fault.at_s:6.0f} s: {fault.kind} {replica.instance_id} for {fault.lasts_s:.0f} s")
        with ledger.trouble(fault.replica, fault.kind):
            async with _in_trouble(replica, fault.kind):
                await asyncio.sleep(fault.lasts_s)
        await asyncio.sleep(_RECOVERS_S)


@contextlib.asynccontextmanager
async def _in_trouble(replica: Replica, kind: Kind) -> AsyncIterator[None]:
    match kind:
        case Kind.KILL | Kind.RESTART:
            await replica.stop(kill=kind is Kind.KILL)
            yield
            replica.start()
            await replica.ready()
        case Kind.HANG:
            replica.hang()
            try:
                yield
            finally:
                replica.go_on()
        case Kind.SLOW:
            slowing = asyncio.create_task(_slow(replica))
            try:
                yield
            finally:
                slowing.cancel()
                await asyncio.gather(slowing, return_exceptions=True)


async def _slow(replica: Replica) -> None:
    while True:
        replica.hang()
        try:
            await asyncio.sleep(_STOPPED_S)
        finally:
            replica.go_on()
        await asyncio.sleep(_RUNS_S)
