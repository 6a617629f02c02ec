"""Measure the remote tier over Redis beside what a server of this machine gives others.

Three clients of one server take turns in each round, with values of one size:
the remote tier as the engine calls it (batches of chunks, several threads,
names, envelopes, every byte checked); a bare pipelined client that sends and
receives the same bytes over as many connections and looks at none of them; and
redis-benchmark with as many connections and as deep a pipeline.

    python -m bench.engine.redis_tier --json bench/results/redis.json
"""

import argparse
import hashlib
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.command import positive, write_report
from bench.engine.bare_redis import BareRedis
from bench.ttft import BenchError, machine
from cacheengine.launch.launch import free_ports
from cacheengine.tiers.base import Chunk, GetOutcome, PutOutcome
from cacheengine.tiers.remote.remote import RemoteTier
from cacheengine.tiers.serde.base import NaiveSerde
from cacheengine.tiers.stores.redis.redis import RedisStore
from cacheengine.tiers.stores.redis.redis_server import RedisServer

OURS: Final = "warmroute"
BARE: Final = "bare pipelined client"
STOCK: Final = "redis-benchmark"
_SERVER_READY_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one client moved, one way, with so many threads or connections."""

    client: str
    operation: str
    threads: int
    gb_per_s: float
    """Median over the rounds; GB are 10**9 bytes of values."""
    samples: Sequence[float]


class Bench:
    """One server, the chunks that are moved, and the three clients."""

    def __init__(self, port: int, value_bytes: int, values: int) -> None:
        server = RedisServer(host="127.0.0.1", port=port, connections=64, timeout_s=60)
        self._tier = RemoteTier(RedisStore(server), "f" * 32, value_bytes, NaiveSerde())
        self._port = port
        self._value_bytes = value_bytes
        keys = [hashlib.sha256(str(number).encode()).digest() for number in range(values)]
        contents = [memoryview(os.urandom(value_bytes)) for _ in keys]
        self._sources: list[Chunk] = list(zip(keys, contents, strict=True))
        self._targets: list[Chunk] = [(key, memoryview(bytearray(value_bytes))) for key in keys]

    def close(self) -> None:
        """Close the connections."""
        self._tier.close()

    def round(self, threads: int) -> Iterator[tuple[str, str, float]]:
        """Let each client put and get all values once; yield client, operation, GB/s."""
        for client, run in ((OURS, self._ours), (BARE, self._bare), (STOCK, self._stock)):
            for operation in ("put", "get"):
                yield client, operation, run(operation, threads) / 1e9

    def check(self) -> None:
        """Compare every byte that the tier has read with what it stored."""
        for (_, source), (_, target) in zip(self._sources, self._targets, strict=True):
            if source != target:
                raise BenchError("a chunk that was read is not the one that was stored")

    def _ours(self, operation: str, threads: int) -> float:
        def move(batch: Sequence[Chunk]) -> None:
            if operation == "put":
                is_right = set(self._tier.put_many(batch)) == {PutOutcome.STORED}
            else:
                is_right = set(self._tier.get_many(batch)) == {GetOutcome.OK}
            if not is_right:
                raise BenchError(f"not every {operation} succeeded")

        for _, target in self._targets if operation == "get" else ():
            target[:8] = bytes(8)  # what a round before has read is not to pass for this one's
        return self._timed(operation, threads, lambda _: move)

    def _bare(self, operation: str, threads: int) -> float:
        clients = [BareRedis(self._port, self._value_bytes) for _ in range(threads)]
        try:
            return self._timed(operation, threads, lambda n: getattr(clients[n], operation))
        finally:
            for client in clients:
                client.close()

    def _timed(
        self,
        operation: str,
        threads: int,
        mover: Callable[[int], Callable[[Sequence[Chunk]], None]],
    ) -> float:
        """Move all values in batches, each thread its share; return bytes per second."""
        chunks = self._sources if operation == "put" else self._targets
        size = self._tier.batch_chunks

        def work(number: int) -> None:
            mine = chunks[number::threads]
            move = mover(number)
            for start in range(0, len(mine), size):
                move(mine[start : start + size])

        with ThreadPoolExecutor(threads) as pool:
            began_s = time.perf_counter()
            list(pool.map(work, range(threads)))
            took_s = time.perf_counter() - began_s
        return len(chunks) * self._value_bytes / took_s

    def _stock(self, operation: str, threads: int) -> float:
        pipeline = self._tier.batch_chunks
        # redis-benchmark asks in whole pipelines. When that makes more than `-n` and its
        # timer looks just after the last answer, it takes its clients to be lost, and ends.
        values = math.ceil(len(self._sources) / pipeline) * pipeline
        command = ["redis-benchmark", "-p", str(self._port), "-d", str(self._value_bytes)]
        # It has one key by default: with so many, each is there after the puts.
        command += ["-n", str(values), "-c", str(threads), "-P", str(pipeline)]
        command += ["-t", {"put": "set", "get": "get"}[operation], "--csv"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        try:
            requests_per_s = float(done.stdout.splitlines()[-1].split('","')[1])
        except (IndexError, ValueError):
            raise BenchError(f"redis-benchmark: {done.stderr.strip() or done.stdout}") from None
        return requests_per_s * self._value_bytes


@contextmanager
def server() -> Iterator[int]:
    """Run redis-server for the time of the block; yield its port."""
    path = _server_path()
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as directory:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", directory]
        command = ["redis-server", *options]
        process = subprocess.Popen(command, executable=path, stdout=subprocess.DEVNULL)
        try:
            _wait(port)
            yield port
        finally:
            process.kill()
            process.wait()


def _server_path() -> str:
    # Debian's redis-tools has the server as redis-check-rdb, which looks at its own name.
    path = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    if path is None or shutil.which("redis-benchmark") is None:
        raise BenchError("Redis and redis-benchmark are needed: apt-get install redis-tools")
    return path


def _wait(port: int) -> None:
    until_s = time.monotonic() + _SERVER_READY_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > until_s:
                raise BenchError(f"redis-server: {error}") from None
            time.sleep(0.05)


def measure(arguments: argparse.Namespace) -> list[Result]:
    """Run all rounds, the clients in turns."""
    found: dict[tuple[str, str, int], list[float]] = {}
    with server() as port:
        bench = Bench(port, arguments.value_bytes, arguments.values)
        try:
            for _ in range(arguments.rounds):
                for threads in arguments.threads:
                    for client, operation, gb_per_s in bench.round(threads):
                        found.setdefault((client, operation, threads), []).append(gb_per_s)
                    bench.check()
        finally:
            bench.close()
    return [
        Result(
            client=client,
            operation=operation,
            threads=threads,
            gb_per_s=statistics.median(samples),
            samples=samples,
        )
        for (client, operation, threads), samples in found.items()
    ]


def shares(results: Sequence[Result]) -> dict[str, float]:
    """Return what share of each other client's rate ours is, by operation and threads."""
    rate = {(each.client, each.operation, each.threads): each.gb_per_s for each in results}
    return {
        f"{operation}, {threads} threads, of {client}": rate[OURS, operation, threads] / gb_per_s
        for (client, operation, threads), gb_per_s in rate.items()
        if client != OURS
    }


def table(results: Sequence[Result]) -> str:
    """Return the rates in GB/s, and the shares."""
    lines = [f"{'GB/s, medians':<26}{'threads':>8}{'put':>8}{'get':>8}"]
    for client, threads in dict.fromkeys((each.client, each.threads) for each in results):
        rates = {
            each.operation: each.gb_per_s
            for each in results
            if (each.client, each.threads) == (client, threads)
        }
        lines.append(f"{client:<26}{threads:>8}{rates['put']:>8.2f}{rates['get']:>8.2f}")
    lines += [f"{share:>6.0%}  {name}" for name, share in shares(results).items()]
    return "\n".join(lines)


def report(arguments: argparse.Namespace, results: Sequence[Result]) -> dict[str, object]:
    """Return every figure with the command and the machine, ready for JSON."""
    threads = " ".join(str(each) for each in arguments.threads)
    options = f"--value-bytes {arguments.value_bytes} --values {arguments.values}"
    return {
        "what": "throughput of the remote tier over Redis beside bare clients, on one machine",
        "command": "python -m bench.engine.redis_tier "
        f"{options} --threads {threads} --rounds {arguments.rounds}",
        "machine": machine(),
        "server": _version(),
        "share_of": shares(results),
        "results": [asdict(each) for each in results],
    }


def _version() -> str:
    command = ["redis-server", "--version"]
    output = subprocess.check_output(command, executable=_server_path(), text=True)
    return output.strip()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.engine.redis_tier", description="Measure the remote tier over Redis."
    )
    option = parser.add_argument
    option("--value-bytes", type=positive, default=2 << 20, help="of a chunk")
    option("--values", type=positive, default=128, help="that each client moves in a round")
    option("--threads", type=positive, nargs="+", default=[1, 2, 4], metavar="N")
    option("--rounds", type=positive, default=9)
    option("--json", type=Path, metavar="OUT", help="write every figure there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; return the exit code."""
    arguments = _arguments(argv)
    try:
        results = measure(arguments)
    except BenchError as error:
        print(f"bench.engine.redis_tier: {error}", file=sys.stderr)
        return 1
    print(table(results))
    if arguments.json:
        write_report(arguments.json, report(arguments, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
