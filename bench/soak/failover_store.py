"""The engines' remote store: a Redis master, its replica and a Sentinel, and their faults."""

import asyncio
import contextlib
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from bench.soak.harness import HOST, stop_repeatedly
from bench.ttft import BenchError

STORE_BYTES: Final = 64 << 20
"""Redis evicts beyond it."""
_SERVICE: Final = "soak"
_READY_S: Final = 30.0
_POLL_S: Final = 0.05
_CLI_S: Final = 20.0
_STOPPED_S: Final = 0.25
_RUNS_S: Final = 0.15
_NEVER_MS: Final = 86_400_000
"""The Sentinel promotes the replica when it is told to, not whenever the master hangs."""
_FLIP: Final = """
local key = redis.call('RANDOMKEY')
if not key then return 0 end
local at = math.floor(redis.call('STRLEN', key) * tonumber(ARGV[1]))
local byte = string.byte(redis.call('GETRANGE', key, at, at))
redis.call('SETRANGE', key, at, string.char(bit.bxor(byte, tonumber(ARGV[2]))))
return 1
"""


class RedisServer:
    """A real Redis server. Each start makes a new process at the same port."""

    def __init__(self, port: int, directory: Path) -> None:
        # Debian's redis-tools has the server as redis-check-rdb, which looks at its own name.
        path = shutil.which("redis-server") or shutil.which("redis-check-rdb")
        if path is None or shutil.which("redis-cli") is None:
            raise BenchError("Redis and redis-cli are needed: apt-get install redis-tools")
        self.port = port
        self._path = path
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, *arguments: str) -> None:
        """Start it; return when it answers. Raises `BenchError`."""
        command = ["redis-server", *arguments, "--port", str(self.port), "--bind", HOST]
        command += ["--dir", str(self._directory)]
        self._process = await asyncio.to_thread(self._spawn, command)
        until_s = time.monotonic() + _READY_S
        while not self._is_listening():
            if time.monotonic() > until_s or self._process.poll() is not None:
                raise BenchError(f"redis-server does not start at port {self.port}")
            await asyncio.sleep(_POLL_S)

    def _spawn(self, command: list[str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command, executable=self._path, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def _is_listening(self) -> bool:
        try:
            socket.create_connection((HOST, self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """End the server at once; what it held is lost. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None
        return self._process.pid

    async def do(self, *command: str) -> str:
        """Return the answer to a command. Raises `BenchError` for an error."""
        process = await asyncio.create_subprocess_exec(
            *("redis-cli", "-e", "-h", HOST, "-p", str(self.port), *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        async with asyncio.timeout(_CLI_S):
            output, _ = await process.communicate()
        if process.returncode:
            raise BenchError(f"redis-cli: {output.decode(errors='replace').strip()}")
        return output.decode()


async def _until(is_so: Callable[[], Awaitable[bool]], until_s: float, problem: str) -> None:
    """Return when something has become so. Raises `BenchError` with the problem after ``until_s``,
    a time of `time.monotonic`."""
    while not await is_so():
        if time.monotonic() > until_s:
            raise BenchError(problem)
        await asyncio.sleep(_POLL_S)


class FailoverStore:
    """A master that `start` makes, a replica that can become the master, and their Sentinel."""

    def __init__(self, ports: tuple[int, int, int], directory: Path) -> None:
        self.master, self._replica, self._sentinel = (RedisServer(p, directory) for p in ports)
        self._file = directory / "sentinel.conf"
        self.url = f"redis-sentinel://{HOST}:{ports[2]}?service_name={_SERVICE}"
        """For ``remote_url``."""

    async def start(self) -> None:
        """Start all three, empty. Raises `BenchError`."""
        await self.restart()
        lines = [
            f"sentinel monitor {_SERVICE} {HOST} {self.master.port} 1",
            f"sentinel down-after-milliseconds {_SERVICE} {_NEVER_MS}",
            f"sentinel failover-timeout {_SERVICE} 2000",
        ]
        self._file.write_text("\n".join([*lines, ""]))
        await self._sentinel.start(str(self._file), "--sentinel")

    async def restart(self) -> None:
        """Start master and replica again, empty, after `kill_servers`."""
        await self._start(self.master)
        await self._start(self._replica, of=self.master)

    async def _start(self, server: RedisServer, of: RedisServer | None = None) -> None:
        arguments = ["--save", "", "--maxmemory", str(STORE_BYTES)]
        arguments += ["--maxmemory-policy", "allkeys-lru", "--repl-diskless-sync-delay", "0"]
        if of is not None:
            arguments += ["--replicaof", f"{HOST} {of.port}"]
        await server.start(*arguments)

    def kill_servers(self) -> None:
        """Kill master and replica: what they held is lost."""
        self.master.kill()
        self._replica.kill()

    def kill(self) -> None:
        """End everything."""
        self.kill_servers()
        self._sentinel.kill()

    async def fail_over(self, *, lasts_s: float, kills: bool) -> None:
        """Have the Sentinel promote the replica; the former master becomes its replica later.

        Until then it is down, or (not ``kills``) it lives and takes what is put over connections
        of before. Raises `BenchError`.
        """
        old, new = self.master, self._replica
        until_s = time.monotonic() + _READY_S
        # It learns of replicas from their master, every 10 s: from a dead one it never does.
        problem = "the Sentinel does not find the store's replica"
        await _until(lambda: self._tells("REPLICAS", f"{HOST}:{new.port}"), until_s, problem)
        if kills:
            old.kill()
        until_s = time.monotonic() + _READY_S
        # Refused while the Sentinel does not know the replica well yet.
        await _until(self._has_begun, until_s, "the Sentinel promotes no replica of the store")
        problem = "the store's replica does not become its master"
        question, port = "GET-MASTER-ADDR-BY-NAME", str(new.port)
        await _until(lambda: self._tells(question, port), until_s, problem)
        self.master, self._replica = new, old
        await asyncio.sleep(lasts_s)
        if kills:
            await self._start(old, of=new)
        else:
            await old.do("REPLICAOF", HOST, str(new.port))

    async def _tells(self, question: str, word: str) -> bool:
        """Whether the Sentinel's answer about the service has a word."""
        return word in (await self._sentinel.do("SENTINEL", question, _SERVICE)).split()

    async def _has_begun(self) -> bool:
        try:
            await self._sentinel.do("SENTINEL", "FAILOVER", _SERVICE)
        except BenchError:
            return False
        return True

    @property
    def pid(self) -> int:
        """The master's process."""
        return self.master.pid

    async def flap(self, lasts_s: float) -> None:
        """Stop the master and let it continue, several times a second, for this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(lasts_s):
                await stop_repeatedly(self.pid, stopped_s=_STOPPED_S, runs_s=_RUNS_S)

    async def flip_bits(self, values: int, rng: random.Random) -> int:
        """Flip a bit in values that the master chooses; return how many were flipped.

        Raises `BenchError`.
        """
        flipped = 0
        for _ in range(values):
            where, bit = str(rng.random()), str(1 << rng.randrange(8))
            flipped += int(await self.master.do("EVAL", _FLIP, "0", where, bit))
        return flipped
