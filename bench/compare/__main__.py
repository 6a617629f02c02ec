"""Beside ours in the same run: vLLM's own tiering, LMCache, and the bare machine.

    python -m bench.compare --lmcache-python PYTHON --json bench/results/engines.json

Each engine keeps the same prompt: as many chunks, of the same size, in a CPU
tier of the same size and a disk tier in a directory of its own on one file
system. The engines take turns, several times, so that whatever else the machine
does meets all of them. The first round of a turn does not count: a virtual
machine's free memory may be with its host, and the first to use it waits.
After every load the bytes are checked (outside the figures).

LMCache needs an environment of its own (it pins other versions):

    python -m venv DIR && DIR/bin/pip install --no-deps lmcache==0.5.6
    DIR/bin/pip install torch==2.13.0 numpy==2.2.6 numba transformers prometheus_client psutil \\
        msgspec pyzmq pyyaml aiohttp aiofile aiofiles sortedcontainers nvtx cachetools requests \\
        cryptography blake3 xxhash safetensors redis fastapi uvicorn
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.command import positive, write_report
from bench.compare.rounds import Workload
from bench.ttft import BenchError, machine

FIGURES: Final = {
    "store_cpu": "store to CPU",
    "load_cpu": "load from CPU",
    "put_disk": "put to disk, until it is listed",
    "put_disk_and_sync": "put to disk, and on the device",
    "get_disk_warm": "get from disk, page cache warm",
    "get_disk_cold": "get from disk, page cache dropped",
    "lookup": "lookup of the prefix, in CPU",
}
ENGINES: Final = {
    "warmroute": "bench.compare.ours",
    "vllm tiering": "bench.compare.vllm",
    "lmcache": "bench.compare.lmcache",
    "plain": "bench.compare.plain",
}
_END_S: Final = 30.0
_ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True)
class Figure:
    """One step of one engine over all rounds, in seconds; what the bytes of it make a second."""

    median_s: float
    p90_s: float
    best_s: float
    median_gb_per_s: float | None


class Engine:
    """A contender's process."""

    def __init__(self, name: str, python: str, workload: Workload) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, "-m", ENGINES[name], workload.to_json()],
            cwd=_ROOT,
            env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def includes(self) -> dict[str, str]:
        """Return what its figures contain, once it has started."""
        answer: dict[str, str] = self._answer()["includes"]
        return answer

    def run_round(self, number: int) -> dict[str, float]:
        """Return the seconds of each step of one round."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        seconds: dict[str, float] = answer["seconds"]
        return seconds

    def close(self) -> None:
        """Let it end in order; kill it if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(
                f"{self.name} has ended (exit code {self._process.wait()}); to see why: "
                f"python -m {ENGINES[self.name]} WORKLOAD"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def started(pythons: Mapping[str, str], workload: Workload) -> Iterator[list[Engine]]:
    """Start the engines, each with an empty directory beside the others'."""
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(dir=workload.directory))
        engines = []
        for name, python in pythons.items():
            directory = Path(root, name.replace(" ", "-"))
            directory.mkdir()
            engines.append(Engine(name, python, replace(workload, directory=directory)))
            stack.callback(engines[-1].close)
        yield engines


def measure(
    pythons: Mapping[str, str], workload: Workload, *, turns: int, rounds: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, str]]]:
    """Return the seconds of every step by engine, and what they include.

    Each engine has ``turns`` turns of ``rounds`` rounds that count, and one
    before them that does not.
    """
    seconds: dict[str, dict[str, list[float]]] = {
        name: {figure: [] for figure in FIGURES} for name in pythons
    }
    with started(pythons, workload) as engines:
        includes = {engine.name: engine.includes() for engine in engines}
        for turn in range(turns):
            # Who comes after whom changes too.
            first = turn % len(engines)
            for engine in engines[first:] + engines[:first]:
                for number in range(rounds + 1):
                    one_round = engine.run_round(turn * (rounds + 1) + number)
                    if number > 0:
                        for figure in FIGURES:
                            seconds[engine.name][figure].append(one_round[figure])
    return seconds, includes


def summary(seconds: Sequence[float], bytes_moved: int | None) -> Figure:
    """Return the figure of one step; ``bytes_moved`` is None where nothing moves."""
    median_s = statistics.median(seconds)
    return Figure(
        median_s=median_s,
        p90_s=sorted(seconds)[-(-9 * len(seconds) // 10) - 1],
        best_s=min(seconds),
        median_gb_per_s=None if bytes_moved is None else bytes_moved / median_s / 1e9,
    )


def figures(
    seconds: Mapping[str, Mapping[str, Sequence[float]]], workload: Workload
) -> dict[str, dict[str, Figure]]:
    """Return all figures by engine and step."""
    return {
        engine: {
            name: summary(each, None if name == "lookup" else workload.bytes_moved)
            for name, each in steps.items()
        }
        for engine, steps in seconds.items()
    }


def table(results: Mapping[str, Mapping[str, Figure]], workload: Workload) -> str:
    """Return a row for each step, a column for each engine: the median, and p90 behind it."""
    mib = workload.chunk_bytes / (1 << 20)
    lines = [
        f"{workload.chunks} chunks of {mib:g} MiB ({workload.layers} layers, blocks of "
        f"{workload.block_tokens} of {workload.chunk_tokens} tokens); median, then p90, in ms "
        "(us for lookup)",
        f"{'':<36}" + "".join(f"{engine:>27}" for engine in results),
    ]
    for name, title in FIGURES.items():
        cells = (_cell(steps[name]) for steps in results.values())
        lines.append(f"{title:<36}" + "".join(f"{cell:>27}" for cell in cells))
    return "\n".join(lines)


def _cell(figure: Figure) -> str:
    if figure.median_gb_per_s is None:
        return f"{figure.median_s * 1e6:.0f} {figure.p90_s * 1e6:.0f} us"
    return (
        f"{figure.median_s * 1e3:.0f} {figure.p90_s * 1e3:.0f} ms, "
        f"{figure.median_gb_per_s:.2f} GB/s"
    )


def report(
    command: Sequence[str],
    workload: Workload,
    counted: int,
    results: Mapping[str, Mapping[str, Figure]],
    includes: Mapping[str, Mapping[str, str]],
) -> dict[str, object]:
    """Return every figure with the command and the machine, ready for JSON."""
    return {
        "what": "cache engines beside each other: the same prompt into and out of CPU and disk",
        "command": shlex.join(["python", "-m", "bench.compare", *command]),
        "machine": machine(),
        "workload": {k: v for k, v in asdict(workload).items() if k != "directory"},
        "rounds": counted,
        "steps": FIGURES,
        "includes": includes,
        "results": {
            engine: {name: asdict(figure) for name, figure in steps.items()}
            for engine, steps in results.items()
        },
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.compare", description="Compare cache engines on this machine."
    )
    parser.add_argument(
        "--lmcache-python",
        metavar="PYTHON",
        help="interpreter of LMCache's environment; without it LMCache is left out",
    )
    parser.add_argument("--turns", type=positive, default=5, help="of each engine")
    parser.add_argument("--rounds", type=positive, default=4, help="of a turn")
    parser.add_argument("--chunks", type=positive, default=64, help="of the prompt")
    parser.add_argument("--chunk-mib", type=positive, default=4, help="bytes of a chunk")
    parser.add_argument(
        "--directory", type=Path, default=Path(), help="on the disk to measure (default: here)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; return the exit code."""
    arguments = _arguments(argv)
    pythons = dict.fromkeys(ENGINES, sys.executable)
    if arguments.lmcache_python is None:
        del pythons["lmcache"]
        print("lmcache is left out: name its interpreter with --lmcache-python", file=sys.stderr)
    else:
        pythons["lmcache"] = arguments.lmcache_python
    workload = Workload(
        chunks=arguments.chunks,
        chunk_bytes=arguments.chunk_mib << 20,
        pool_chunks=2 * arguments.chunks + 32,
        directory=arguments.directory.absolute(),
    )
    try:
        seconds, includes = measure(
            pythons, workload, turns=arguments.turns, rounds=arguments.rounds
        )
    except (BenchError, OSError) as error:
        print(f"bench.compare: {error}", file=sys.stderr)
        return 1
    results = figures(seconds, workload)
    print(table(results, workload))
    if arguments.json:
        command = [
            *(["--lmcache-python", "PYTHON"] if "lmcache" in pythons else []),
            *("--turns", str(arguments.turns), "--rounds", str(arguments.rounds)),
            *("--chunks", str(arguments.chunks), "--chunk-mib", str(arguments.chunk_mib)),
        ]
        counted = arguments.turns * arguments.rounds
        content = report(command, workload, counted, results, includes)
        write_report(arguments.json, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
