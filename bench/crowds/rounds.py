"""One crowd against one router: ordinary requests with it and without it, in turns."""

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.crowds.kinds import Kind
from bench.crowds.load import p99, timed
from bench.processes import session_usage
from bench.ttft import BenchError
from cacheengine.launch.launch import free_ports
from router.launch.plan import WARMROUTE
from router.launch.processes import ProcessGroup

_READY_S: Final = 60.0
_POLL_S: Final = 0.1
_SETTLE_S: Final = 2.0
_SETTLED_S: Final = 120.0
_QUIET_S: Final = 20.0
_WARM_UP_S: Final = 3.0
_BAD_WORDS: Final = ("Traceback", " ERROR ", "never retrieved")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How much is measured."""

    rounds: int = 10
    phase_s: float = 15.0
    per_s: float = 100.0
    """Ordinary requests in a second."""


@dataclass(kw_only=True)
class Crowded:
    """What one crowd has shown."""

    kind: Kind
    connections: int
    alone_p99_s: list[float] = field(default_factory=list)
    """Of each round, without the crowd; then with it."""
    crowded_p99_s: list[float] = field(default_factory=list)
    before_bytes: int = 0
    """The router's memory before the first crowd; then the most with one, and after the last."""
    with_bytes: int = 0
    after_bytes: int = 0
    open_files: int = 0
    """Of the router, the fewest with a crowd."""
    closed: int = 0
    """Connections of the crowd that the router had closed."""
    sent_bytes: int = 0
    """Of answers that none reads: what the replica could send in all rounds."""
    in_flight: float = 0.0
    """At the end."""
    bad_lines: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class _Ground:
    url: str
    replica_url: str
    pid: int
    log: Path


async def crowd(
    kind: Kind, connections: int, pace: Pace, directory: Path, say: Callable[[str], None]
) -> Crowded:
    """Measure one crowd before a router of its own; raise `BenchError` or `ChildFailedError`."""
    with ProcessGroup() as group:
        ground = await _ground(group, directory)
        await timed(ground.url, per_s=pace.per_s, for_s=_WARM_UP_S)
        found = Crowded(kind=kind, connections=connections)
        found.before_bytes = _memory(ground)
        for number in range(pace.rounds):
            # What changes by itself over a run favours neither.
            for with_crowd in (True, False) if number % 2 else (False, True):
                await _phase(found, ground, pace, with_crowd=with_crowd)
            alone, crowded = found.alone_p99_s[-1], found.crowded_p99_s[-1]
            say(f"{kind.name} {number + 1}: p99 {1e3 * alone:.1f} ms, {1e3 * crowded:.1f} with it")
        found.after_bytes = _memory(ground)
        found.sent_bytes = (await _json(f"{ground.replica_url}/sent"))["sent_bytes"]
        found.in_flight = await _in_flight(ground)
        found.bad_lines = [
            line
            for line in ground.log.read_text(errors="replace").splitlines()
            if any(word in line for word in _BAD_WORDS)
        ]
        return found


async def _phase(found: Crowded, ground: _Ground, pace: Pace, *, with_crowd: bool) -> None:
    if not with_crowd:
        await asyncio.sleep(_SETTLE_S)
        found.alone_p99_s.append(p99(await _timed(ground, pace)))
        return
    async with _held(found, ground):
        await _settled(ground)
        found.crowded_p99_s.append(p99(await _timed(ground, pace)))
        files = len([*Path(f"/proc/{ground.pid}/fd").iterdir()])
        found.open_files = min(found.open_files or files, files)
        found.with_bytes = max(found.with_bytes, _memory(ground))


async def _settled(ground: _Ground) -> None:
    """Wait until the replica gets rid of no more bytes."""
    until_s, before = time.monotonic() + _SETTLED_S, -1
    while (sent := (await _json(f"{ground.replica_url}/sent"))["sent_bytes"]) != before:
        if time.monotonic() > until_s:
            raise BenchError(f"after {sent} bytes the answers that none reads still flow")
        before = sent
        await asyncio.sleep(_SETTLE_S)


async def _timed(ground: _Ground, pace: Pace) -> list[float]:
    return await timed(ground.url, per_s=pace.per_s, for_s=pace.phase_s)


@asynccontextmanager
async def _held(found: Crowded, ground: _Ground) -> AsyncIterator[None]:
    """Hold the crowd for the block; note how many of it the router has closed."""
    argv = ("-m", "bench.crowds.hold", found.kind.name, ground.url, str(found.connections))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if not await asyncio.wait_for(process.stdout.readline(), _READY_S):
            raise BenchError(f"the crowd {found.kind.name} did not come together")
        yield
        process.stdin.close()
        told = json.loads(await asyncio.wait_for(process.stdout.readline(), _READY_S))
        found.closed += told["closed"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ground(group: ProcessGroup, directory: Path) -> _Ground:
    """Start a replica and a router before it."""
    directory.mkdir(parents=True, exist_ok=True)
    replica_log = directory / "replica.log"
    group.start("replica", [sys.executable, "-m", "bench.crowds.replica"], None, replica_log)
    while b"\n" not in (told := replica_log.read_bytes()):
        group.check()
        await asyncio.sleep(_POLL_S)
    replica_url = json.loads(told)["url"]
    (port,) = free_ports(1)
    path, log = directory / "router.json", directory / "router.log"
    path.write_text(json.dumps({"port": port, "replicas": [{"url": replica_url}]}))
    pid = group.start("router", [*WARMROUTE, "serve", "--config", str(path)], None, log)
    url = f"http://127.0.0.1:{port}"
    await asyncio.to_thread(group.wait_ready, "router", f"{url}/health", _READY_S)
    return _Ground(url=url, replica_url=replica_url, pid=pid, log=log)


def _memory(ground: _Ground) -> int:
    return session_usage(ground.pid).resident_bytes


async def _in_flight(ground: _Ground) -> float:
    """Return how many requests are in flight, once none is or none should be."""
    for _ in range(int(_QUIET_S / _POLL_S)):
        text = await asyncio.to_thread(_get, f"{ground.url}/metrics")
        lines = [line for line in text.splitlines() if line.startswith(b"warmroute_in_flight{")]
        count = sum(float(line.rpartition(b" ")[2]) for line in lines)
        if not count:
            return 0.0
        await asyncio.sleep(_POLL_S)
    return count


async def _json(url: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await asyncio.to_thread(_get, url))
    return found


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        body: bytes = response.read()
        return body
