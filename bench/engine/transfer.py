"""How fast chunks go from one replica's pool into another's, beside a plain socket copy.

Two processes on this machine, over loopback TCP. The source's holds an engine
with its transfer server, and a bare server that sends the same memory with
``sendall``; this one fetches with the engine's own client, and reads the bare
server's bytes with ``recv_into``, without keys, checksums or bookkeeping. The
rounds of all cases alternate, so that the machine's moods fall on each.

    python -m bench.engine.transfer --json bench/results/transfer.json
"""

import argparse
import hashlib
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from bench.command import positive, write_report
from bench.ttft import machine
from cacheengine.engine.engine import CacheEngine
from cacheengine.identity import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.record import TransferMeter
from cacheengine.settings.settings import EngineConfig
from cacheengine.transfer.fetch import Fetch
from cacheengine.transfer.server import TransferServer

_MIB: Final = 1024**2
_CONNECTIONS: Final = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One way to copy the bytes, with so many connections."""

    what: str
    connections: int
    gb_per_s: float
    """Median over the rounds; GB are 10**9 bytes."""
    p10_gb_per_s: float
    p90_gb_per_s: float
    cpu_s_per_gb: float
    """CPU time of the fetching process, median."""
    samples_s: list[float]


@dataclass(frozen=True, kw_only=True)
class _Ports:
    """Where the source's process listens."""

    engine: int
    plain: int


def chunk_keys(count: int) -> list[bytes]:
    """Return the keys of the chunks that are copied."""
    return [hashlib.sha256(str(number).encode()).digest() for number in range(count)]


def make_engine(chunks: int, chunk_bytes: int) -> CacheEngine:
    """Return an engine with room for the chunks, twice over."""
    layout = ChunkLayout(
        model="bench", dtype="bfloat16", block_tokens=16, chunk_tokens=256, chunk_bytes=chunk_bytes
    )
    return CacheEngine(EngineConfig(), layout, Pool.allocate(2 * chunks, chunk_bytes))


def store_all(engine: CacheEngine, keys: Sequence[bytes]) -> list[memoryview]:
    """Store chunks of random bytes; return where they lie."""
    reservation = engine.prepare_store(keys)
    assert reservation is not None
    views = [engine.view(slot) for slot in reservation.slots]
    for key, view in zip(reservation.keys, views, strict=True):
        view[:] = hashlib.shake_128(key).digest(len(view))
    engine.complete_store(reservation.keys)
    return views


# --- the source's process ---


def serve(chunks: int, chunk_bytes: int, control: Connection) -> None:
    """Hold the chunks and serve them in both ways until told to stop."""
    engine = make_engine(chunks, chunk_bytes)
    views = store_all(engine, chunk_keys(chunks))
    server = TransferServer(engine, ("127.0.0.1", 0), TransferMeter())
    server.start()
    plain = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_plain, args=(plain, views), daemon=True).start()
    assert server.address is not None
    control.send(_Ports(engine=server.address[1], plain=plain.getsockname()[1]))
    control.recv()
    server.stop()
    engine.close()


def _serve_plain(listening: socket.socket, views: Sequence[memoryview]) -> None:
    while True:
        connected, _ = listening.accept()
        threading.Thread(target=_send_plain, args=(connected, views), daemon=True).start()


def _send_plain(connected: socket.socket, views: Sequence[memoryview]) -> None:
    """Send every n-th chunk from the m-th on, as the first two bytes say."""
    first, step = connected.recv(2, socket.MSG_WAITALL)
    with connected:
        for view in views[first::step]:
            connected.sendall(view)


# --- the destination's process ---


class Destination:
    """The cases that are measured: each call copies all chunks once."""

    def __init__(self, ports: _Ports, chunks: int, chunk_bytes: int) -> None:
        self._ports = ports
        self._keys = chunk_keys(chunks)
        self._engine = make_engine(chunks, chunk_bytes)
        self._views = store_all(self._engine, self._keys)  # touches every page
        self._source = [bytes(view) for view in self._views]

    def close(self) -> None:
        """Give the memory back."""
        self._engine.close()

    def memcpy(self, connections: int) -> float:
        """Copy the bytes within this process; return the seconds."""
        start_s = time.perf_counter()
        for view, source in zip(self._views, self._source, strict=True):
            view[:] = source
        return time.perf_counter() - start_s

    def plain(self, connections: int) -> float:
        """Read them from the bare server."""
        start_s = time.perf_counter()
        threads = [
            threading.Thread(target=self._read_plain, args=(first, connections))
            for first in range(connections)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start_s

    def _read_plain(self, first: int, step: int) -> None:
        with socket.create_connection(("127.0.0.1", self._ports.plain)) as connected:
            connected.sendall(bytes([first, step]))
            for view in self._views[first::step]:
                left = view
                while left:
                    left = left[connected.recv_into(left, len(left), socket.MSG_WAITALL) :]

    def engine(self, connections: int) -> float:
        """Fetch them as a move does, into an engine that has none of them."""
        self._engine.clear()
        address = ("127.0.0.1", self._ports.engine)
        start_s = time.perf_counter()
        fetch = Fetch(self._engine, self._keys, address, TransferMeter(), connections=connections)
        fetched = fetch.run()
        seconds = time.perf_counter() - start_s
        assert fetched.received_chunks == len(self._keys), fetched.error
        return seconds


def measure(chunks: int, chunk_bytes: int, rounds: int) -> list[Result]:
    """Copy the chunks in every way, ``rounds`` times each."""
    context = multiprocessing.get_context("spawn")
    control, theirs = context.Pipe()
    source = context.Process(target=serve, args=(chunks, chunk_bytes, theirs), daemon=True)
    source.start()
    destination = Destination(control.recv(), chunks, chunk_bytes)
    try:
        return _alternate(destination, chunks * chunk_bytes, rounds)
    finally:
        control.send("stop")
        source.join(20)
        destination.close()


def _alternate(destination: Destination, total_bytes: int, rounds: int) -> list[Result]:
    cases: list[tuple[str, int, Callable[[int], float]]] = [("memcpy", 1, destination.memcpy)]
    for connections in _CONNECTIONS:
        cases.append(("plain socket copy", connections, destination.plain))
        cases.append(("engine to engine", connections, destination.engine))
    samples: list[list[tuple[float, float]]] = [[] for _ in cases]
    for number in range(rounds + 1):
        for case, (_, connections, copy) in zip(samples, cases, strict=True):
            cpu_s = time.process_time()
            seconds = copy(connections)
            if number:  # the first round warms up
                case.append((seconds, time.process_time() - cpu_s))
    return [
        _result(what, connections, total_bytes, each)
        for (what, connections, _), each in zip(cases, samples, strict=True)
    ]


def _result(
    what: str, connections: int, total_bytes: int, samples: Sequence[tuple[float, float]]
) -> Result:
    gigabytes = total_bytes / 1e9
    rates = sorted(gigabytes / seconds for seconds, _ in samples)
    return Result(
        what=what,
        connections=connections,
        gb_per_s=statistics.median(rates),
        p10_gb_per_s=rates[len(rates) // 10],
        p90_gb_per_s=rates[-1 - len(rates) // 10],
        cpu_s_per_gb=statistics.median(cpu_s / gigabytes for _, cpu_s in samples),
        samples_s=[seconds for seconds, _ in samples],
    )


def table(results: Sequence[Result]) -> str:
    """Return the figures for a person, with what ours is of the plain copy."""
    plain = {each.connections: each.gb_per_s for each in results if "plain" in each.what}
    lines = [f"{'':<20}{'connections':>12}{'GB/s':>8}{'p10':>8}{'p90':>8}{'of plain':>10}"]
    for each in results:
        share = f"{each.gb_per_s / plain[each.connections]:>10.0%}" if each.what != "memcpy" else ""
        lines.append(
            f"{each.what:<20}{each.connections:>12}{each.gb_per_s:>8.2f}"
            f"{each.p10_gb_per_s:>8.2f}{each.p90_gb_per_s:>8.2f}{share}"
        )
    return "\n".join(lines)


def report(arguments: argparse.Namespace, results: Sequence[Result]) -> dict[str, object]:
    """Return every figure with the command and the machine, ready for JSON."""
    options = " ".join(
        f"--{name} {getattr(arguments, name)}" for name in ("chunks", "mib", "rounds")
    )
    return {
        "what": "chunks from one engine's pool into another's over loopback TCP, two processes",
        "command": f"python -m bench.engine.transfer {options}",
        "machine": machine(),
        "results": [asdict(each) for each in results],
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.engine.transfer", description="Measure copying chunks between two engines."
    )
    parser.add_argument("--chunks", type=positive, default=64, help="chunks a round")
    parser.add_argument("--mib", type=positive, default=2, help="MiB of a chunk")
    parser.add_argument("--rounds", type=positive, default=21, help="repetitions")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; return the exit code."""
    arguments = _arguments(argv)
    results = measure(arguments.chunks, arguments.mib * _MIB, arguments.rounds)
    print(table(results))
    if arguments.json:
        write_report(arguments.json, report(arguments, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
