"""A real Redis server that is killed, stopped and damaged."""

import asyncio
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

from bench.stress.settings import HOST, STORE_BYTES
from bench.ttft import BenchError

_READY_S: Final = 30.0
_POLL_S: Final = 0.05
_CLI_S: Final = 20.0
_STOPPED_S: Final = 0.25
_RUNS_S: Final = 0.15
_FLIP: Final = """
local key = redis.call('RANDOMKEY')
if not key then return 0 end
local at = math.floor(redis.call('STRLEN', key) * tonumber(ARGV[1]))
local byte = string.byte(redis.call('GETRANGE', key, at, at))
redis.call('SETRANGE', key, at, string.char(bit.bxor(byte, tonumber(ARGV[2]))))
return 1
"""


class Store:
    """The server's process, started again as often as needed, always at the same port."""

    def __init__(self, port: int, directory: Path) -> None:
        # Debian's redis-tools has the server as redis-check-rdb, which looks at its own name.
        path = shutil.which("redis-server") or shutil.which("redis-check-rdb")
        if path is None or shutil.which("redis-cli") is None:
            raise BenchError("Redis and redis-cli are needed: apt-get install redis-tools")
        self.port = port
        self._path = path
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start an empty server; return when it answers. Raises `BenchError`."""
        command = ["redis-server", "--port", str(self.port), "--bind", HOST, "--save", ""]
        command += ["--dir", str(self._directory), "--maxmemory", str(STORE_BYTES)]
        command += ["--maxmemory-policy", "allkeys-lru"]
        self._process = await asyncio.to_thread(self._spawn, command)
        until_s = time.monotonic() + _READY_S
        while not _is_listening(self.port):
            if time.monotonic() > until_s or self._process.poll() is not None:
                raise BenchError("redis-server does not start")
            await asyncio.sleep(_POLL_S)

    def _spawn(self, command: list[str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command, executable=self._path, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def kill(self) -> None:
        """End the server at once; what it held is lost. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def hang(self) -> None:
        """Stop the server where it is."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self._signal(signal.SIGCONT)

    async def flap(self, lasts_s: float) -> None:
        """Stop it and let it go on, in turns."""
        until_s = time.monotonic() + lasts_s
        while time.monotonic() < until_s:
            self.hang()
            try:
                await asyncio.sleep(_STOPPED_S)
            finally:
                self.go_on()
            await asyncio.sleep(_RUNS_S)

    async def flip_bits(self, values: int, rng: random.Random) -> int:
        """Flip a bit in each of so many values, chosen by the server; return how many there were.

        Raises `BenchError`.
        """
        flipped = 0
        for _ in range(values):
            flipped += int(await self._cli("EVAL", _FLIP, "0", str(rng.random()), _one_bit(rng)))
        return flipped

    async def _cli(self, *command: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *("redis-cli", "-h", HOST, "-p", str(self.port), *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        async with asyncio.timeout(_CLI_S):
            told, _ = await process.communicate()
        if process.returncode or not told.strip().isdigit():
            raise BenchError(f"redis-cli: {told.decode(errors='replace').strip()}")
        return told.decode()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)


def _one_bit(rng: random.Random) -> str:
    return str(1 << rng.randrange(8))


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True
