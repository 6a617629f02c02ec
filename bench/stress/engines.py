"""The engines' processes: started, killed, watched, and what they have told."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from bench.soak.watch import Sample, Watch
from bench.stress.inside.process import Told
from bench.stress.settings import HOST, SMALL_DISK_BYTES
from bench.ttft import BenchError

_READY_S: Final = 60.0
_END_S: Final = 180.0
"""To finish requests, and for the longest timeouts of what is under way."""
_LINE_BYTES: Final = 1 << 22
_MOUNT: Final = 'mount -t tmpfs -o size="$0" stress "$1" && shift && exec "$@"'


@dataclass(kw_only=True)
class Life:
    """One process of an engine, from its start to its end."""

    name: str
    process: asyncio.subprocess.Process
    tasks: list[asyncio.Task[None]]
    watch: Watch
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    told: dict[str, Any] = field(default_factory=dict)
    """The last that it has said."""
    is_meant_to_end: bool = False
    left: dict[str, Any] | None = None
    """What was left at its end; None if it was killed."""

    @property
    def samples(self) -> list[Sample]:
        """Memory and open files, by the time since this life began."""
        return self.watch.samples.get(self.name, [])


class Engine:
    """One engine, a process of its own at each start, always with the same ports and disk.

    ``small_disk``: it has a file system of its own, which no other process sees.
    """

    def __init__(self, told: Told, logs: Path, *, small_disk: bool) -> None:
        self.name = told.name
        self.agent_url = f"http://{HOST}:{told.agent_port}"
        self.transfer_address = f"{HOST}:{told.transfer_port}"
        self.lives: list[Life] = []
        self._told = told
        self._logs = logs
        self._small_disk = small_disk

    @property
    def life(self) -> Life:
        """The latest."""
        return self.lives[-1]

    @property
    def directory(self) -> Path:
        """Where its files are, as this process sees them."""
        given = Path(self._told.directory)
        if not self._small_disk:
            return given
        return Path(f"/proc/{self.life.process.pid}/root") / given.relative_to("/")

    @property
    def logs(self) -> list[Path]:
        """What its processes have written to their standard error."""
        return [self._log(number) for number in range(len(self.lives))]

    def _log(self, number: int) -> Path:
        return self._logs / f"{self.name}-{number}.log"

    async def start(self) -> None:
        """Start a process; return when it serves. Raises `BenchError`."""
        number = len(self.lives)
        # Another course of requests in each life.
        told = asdict(self._told) | {"seed": f"{self._told.seed} {self.name} {number}"}
        command = [sys.executable, "-m", "bench.stress.inside.process", orjson.dumps(told).decode()]
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
        mount = ["sh", "-c", _MOUNT, str(SMALL_DISK_BYTES), self._told.directory]
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
            log = self.logs[-1].read_text(errors="replace").strip().rpartition("\n")[2]
            raise BenchError(f"{life.name} does not start: {log}")

    def has_ended_by_itself(self) -> bool:
        """Whether its process has ended and was not to."""
        return self.life.process.returncode is not None and not self.life.is_meant_to_end

    async def kill(self) -> None:
        """End its process at once, and what is done about it."""
        life = self.life
        life.is_meant_to_end = True
        with contextlib.suppress(ProcessLookupError):
            life.process.kill()
        await life.process.wait()
        for task in life.tasks:
            task.cancel()
        await asyncio.gather(*life.tasks, return_exceptions=True)

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Stop its process for the length of the block."""
        pid = self.life.process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    async def end(self) -> None:
        """Have it finish what it does, and look at what is left. Raises `BenchError`."""
        life = self.life
        life.is_meant_to_end = True
        assert life.process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended by itself, which is told of
            life.process.stdin.write(b"end\n")
            await life.process.stdin.drain()
        life.tasks[-1].cancel()  # a process that ends is not watched
        try:
            async with asyncio.timeout(_END_S):
                await life.process.wait()
        except TimeoutError:
            raise BenchError(f"{life.name} does not end") from None
        await life.tasks[0]


async def _listen(life: Life) -> None:
    """Keep the last that a process says, until it says no more."""
    assert life.process.stdout is not None
    async for line in life.process.stdout:
        told = orjson.loads(line) if line.endswith(b"\n") else {}
        life.left = told.pop("left", life.left)
        life.told = told or life.told
        life.ready.set()
