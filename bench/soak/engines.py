"""The engines' processes, their starts that are killed, and the faults of their disks."""

import asyncio
import contextlib
import os
import random
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import orjson

from bench.soak.engine_process import ProcessConfig
from bench.soak.harness import HOST, Fault, Sample, Watch, schedule
from bench.ttft import BenchError

CHUNK_BYTES: Final = 16 << 10
SMALL_DISK_BYTES: Final = 72 << 20
"""The file system of the first engine's disk tier, which is filled now and then."""
_READY_S: Final = 60.0
_END_S: Final = 180.0
"""To finish requests, and for the longest timeouts of running transfers."""
_LINE_BYTES: Final = 1 << 22
_MOUNT: Final = 'mount -t tmpfs -o size="$0" stress "$1" && shift && exec "$@"'
_IMPORT_S: Final = 120.0
_KILL_S: Final = 30.0
_CUT: Final = 0.1
"""Share of the damaged files that are cut short instead."""
_BALLAST: Final = "ballast"
_STEP_BYTES: Final = 1 << 20


class EngineFault(StrEnum):
    """What happens to an engine, its disk or the store."""

    KILL = "engine killed"
    """SIGKILL; started again a while later, on the same disk and the same CPU pool."""
    START_KILL = "start killed"
    """SIGKILL, and the next start is killed, too, before its pool's name is forgotten."""
    HANG = "engine hangs"
    """SIGSTOP, while others copy from it; SIGCONT later."""
    STORE_KILL = "store killed"
    """Redis and its replica get SIGKILL; they are started again, empty."""
    STORE_HANG = "store hangs"
    """SIGSTOP: connections stay and nothing comes over them. SIGCONT later."""
    STORE_FLAPS = "store flaps"
    """Stopped and continued several times a second."""
    STORE_FAILOVER = "store fails over"
    """Its master gets SIGKILL and its replica is promoted; the former master returns later."""
    STORE_MOVES = "store moves"
    """Its replica is promoted while the former master lives, which becomes a replica later."""
    DISK_HANGS = "disk hangs"
    """Whatever opens, renames or removes a file of an engine's disk waits until the end."""
    DISK_FULL = "disk full"
    """Nothing more can be written to the first engine's file system."""
    DISK_BITS = "bits flipped on disk"
    """In files of chunks; some files are cut short."""
    STORE_BITS = "bits flipped in the store"


_KILLS: Final = (EngineFault.KILL, EngineFault.START_KILL)
_LASTS_S: Final = {
    EngineFault.KILL: (1.0, 4.0),
    EngineFault.START_KILL: (0.0, 0.0),
    EngineFault.HANG: (1.0, 4.0),
    EngineFault.STORE_KILL: (1.0, 4.0),
    EngineFault.STORE_HANG: (2.0, 6.0),
    EngineFault.STORE_FLAPS: (3.0, 6.0),
    EngineFault.STORE_FAILOVER: (1.0, 4.0),
    EngineFault.STORE_MOVES: (1.0, 4.0),
    EngineFault.DISK_HANGS: (3.0, 7.5),
    EngineFault.DISK_FULL: (3.0, 7.0),
    EngineFault.DISK_BITS: (0.0, 0.0),
    EngineFault.STORE_BITS: (0.0, 0.0),
}


def engine_faults(
    *, seed: int, duration_s: float, engines: int, every_s: float, length: float = 1.0
) -> Iterator[Fault[EngineFault]]:
    """Yield one fault every ``every_s``; ``length`` is its part of the usual length.

    The target of a fault of the store has no meaning.

    The first engine is never killed: its memory is watched from beginning to end, and its small
    file system ends with its process. Only that file system is filled.
    """

    def targets(kind: EngineFault) -> range:
        if kind is EngineFault.DISK_FULL:
            return range(1)
        return range(1 if kind in _KILLS else 0, engines)

    lasts_s = {kind: (length * least, length * most) for kind, (least, most) in _LASTS_S.items()}
    return schedule(
        random.Random(f"faults {seed}"), lasts_s, targets, duration_s=duration_s, every_s=every_s
    )


def engine_name(number: int) -> str:
    """Return the name of an engine, counted from 0."""
    return f"engine{number + 1}"


@dataclass(kw_only=True)
class Life:
    """One process of an engine, from its start to its end."""

    name: str
    process: asyncio.subprocess.Process
    tasks: list[asyncio.Task[None]]
    watch: Watch
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    counters: dict[str, Any] = field(default_factory=dict)
    """Its last report."""
    is_meant_to_end: bool = False
    left: dict[str, Any] | None = None
    """Its `EngineState` at its end; None if it was killed."""

    @property
    def samples(self) -> list[Sample]:
        """Memory and open files, by the time since this life began."""
        return self.watch.samples.get(self.name, [])


class Engine:
    """One engine. Each start makes a new process with the same ports and disk.

    ``small_disk``: it has a file system of its own, which no other process sees.
    """

    def __init__(self, config: ProcessConfig, logs: Path, *, small_disk: bool) -> None:
        self.name = config.name
        self.agent_url = f"http://{HOST}:{config.agent_port}"
        self.transfer_address = f"{HOST}:{config.transfer_port}"
        self.lives: list[Life] = []
        self._config = config
        self._logs = logs
        self._small_disk = small_disk

    @property
    def life(self) -> Life:
        """The latest."""
        return self.lives[-1]

    @property
    def directory(self) -> Path:
        """Where its files are, as this process sees them."""
        given = Path(self._config.directory)
        if not self._small_disk:
            return given
        return Path(f"/proc/{self.life.process.pid}/root") / given.relative_to("/")

    @property
    def keep(self) -> Path:
        """The directory of its CPU pool."""
        return Path(self._config.keep)

    @property
    def logs(self) -> list[Path]:
        """Its processes' standard error."""
        return [self._log(number) for number in range(len(self.lives))]

    def _log(self, number: int) -> Path:
        return self._logs / f"{self.name}-{number}.log"

    async def start(self) -> None:
        """Start a process; return when it serves. Raises `BenchError`."""
        number = len(self.lives)
        # Each process sends other requests.
        config = asdict(self._config) | {"seed": f"{self._config.seed} {self.name} {number}"}
        command = [sys.executable, "-m", "bench.soak.engine_process", orjson.dumps(config).decode()]
        with self._log(number).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *self._with_disk(command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=_LINE_BYTES,
                start_new_session=True,
            )
        life = Life(
            name=f"{self.name}, process {number + 1}",
            process=process,
            tasks=[],
            watch=Watch(began_s=time.monotonic()),
        )
        self.lives.append(life)
        life.tasks.append(asyncio.create_task(_listen(life)))
        await self._wait_ready(life)
        life.tasks.append(asyncio.create_task(life.watch.run({life.name: process.pid})))

    def _with_disk(self, command: list[str]) -> list[str]:
        if not self._small_disk:
            return command
        mount = ["sh", "-c", _MOUNT, str(SMALL_DISK_BYTES), self._config.directory]
        return ["unshare", "--user", "--map-root-user", "--mount", *mount, *command]

    async def _wait_ready(self, life: Life) -> None:
        ended = asyncio.create_task(life.process.wait())
        ready = asyncio.create_task(life.ready.wait())
        done, _ = await asyncio.wait(
            (ended, ready), timeout=_READY_S, return_when=asyncio.FIRST_COMPLETED
        )
        ended.cancel()
        ready.cancel()
        if ready not in done:
            said = _last_line(self.logs[-1])
            raise BenchError(f"{life.name} does not start: {said} (logs: --logs DIR)")

    def has_ended_by_itself(self) -> bool:
        """Whether its process has ended without being told to."""
        return self.life.process.returncode is not None and not self.life.is_meant_to_end

    async def kill(self) -> None:
        """Kill its process, and end the tasks that watch it."""
        life = self.life
        life.is_meant_to_end = True
        with contextlib.suppress(ProcessLookupError):
            life.process.kill()
        await life.process.wait()
        for task in life.tasks:
            task.cancel()
        await asyncio.gather(*life.tasks, return_exceptions=True)

    async def hang_disk(self, lasts_s: float) -> None:
        """Make its disk hang for some time."""
        await self._tell("hang")
        try:
            await asyncio.sleep(lasts_s)
        finally:
            await self._tell("work")

    async def _tell(self, line: str) -> None:
        stdin = self.life.process.stdin
        assert stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended by itself, which fails the soak
            stdin.write(f"{line}\n".encode())
            await stdin.drain()

    async def end(self) -> None:
        """Make it finish its requests and report its final state. Raises `BenchError`."""
        life = self.life
        life.is_meant_to_end = True
        await self._tell("end")
        life.tasks[-1].cancel()  # a process that ends is not watched
        try:
            async with asyncio.timeout(_END_S):
                await life.process.wait()
        except TimeoutError:
            raise BenchError(f"{life.name} does not end within {_END_S:.0f} s") from None
        await life.tasks[0]


def _last_line(log: Path) -> str:
    return log.read_text(errors="replace").strip().rpartition("\n")[2]


async def _listen(life: Life) -> None:
    """Keep the last report of a process, until its output ends."""
    assert life.process.stdout is not None
    async for line in life.process.stdout:
        report = orjson.loads(line) if line.endswith(b"\n") else {}
        life.left = report.pop("left", life.left)
        life.counters = report or life.counters
        life.ready.set()


class KilledStarts:
    """Starts of replicas that are killed before the name of their CPU pool is forgotten."""

    def __init__(self, slots: int, logs: Path) -> None:
        if find_spec("vllm") is None:
            raise BenchError("killed starts need vLLM: make venv")
        self._slots = slots
        self._log = logs / "killed-starts.log"
        self._process: asyncio.subprocess.Process | None = None
        self.leaked: list[str] = []
        """Pools whose memory was still there after the kill."""

    async def open(self) -> None:
        """Start the process that begins to start replicas; it needs some seconds."""
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.soak.killed_start"),
                orjson.dumps([self._slots, CHUNK_BYTES]).decode(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        await self._answer("ready", _IMPORT_S)

    async def kill_one(self, keep: Path | None) -> None:
        """Kill a start whose pool is ordinary memory, or is kept in a directory.

        Raises `BenchError`.
        """
        name = f"soak-{uuid.uuid4()}"
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(orjson.dumps([name, str(keep or "")]) + b"\n")
        await self._answer("killed", _KILL_S)
        link = Path(f"/dev/shm/vllm_offload_{name}.mmap")
        # The name of ordinary memory leads to a descriptor of the process that was killed.
        if link.exists():
            self.leaked.append(str(link))
        link.unlink(missing_ok=True)
        self.leaked += [str(each) for each in Path("/dev/shm").glob(f"*{name}*")]

    async def _answer(self, expected: str, within_s: float) -> None:
        assert self._process is not None and self._process.stdout is not None
        async with asyncio.timeout(within_s):
            answer = (await self._process.stdout.readline()).decode().strip()
        if answer != expected:
            raise BenchError(f"a start to be killed: {answer or _last_line(self._log)}")

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def damage_files(directory: Path, files: int, rng: random.Random) -> int:
    """Flip a bit in chunk files of a disk tier, or cut them; return how many were damaged."""
    there = sorted(directory.rglob("*.kv"))
    chosen = rng.sample(there, min(files, len(there)))
    return sum(_is_damaged(path, rng) for path in chosen)


def _is_damaged(path: Path, rng: random.Random) -> bool:
    try:
        size_bytes = path.stat().st_size
        at = rng.randrange(max(1, size_bytes))
        if rng.random() < _CUT:
            os.truncate(path, at)
            return True
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            if not byte:
                return False
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
    except FileNotFoundError:
        return False  # evicted meanwhile
    return True


def fill_disk(directory: Path) -> None:
    """Take all free space of the directory's file system, until `free_disk`."""
    with (directory / _BALLAST).open("wb", buffering=0) as file:
        size_bytes = _STEP_BYTES
        while size_bytes:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size_bytes)
            except OSError:
                size_bytes //= 2


def free_disk(directory: Path) -> None:
    """Free what `fill_disk` took."""
    (directory / _BALLAST).unlink(missing_ok=True)
