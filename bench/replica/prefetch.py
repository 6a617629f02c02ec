"""What prefetch before forward is worth, for a prefix that lies on disk alone.

Two real replicas and three routers in front of them: one that prefetches and
forwards at once, one that first waits until the prefix is in CPU RAM, one
without prefetch. Every combination with: the files' pages kept in the page
cache or dropped from it; the replica idle, or busy decoding for others. The
routers take turns, so that all see the same machine.

Without prefetch the engine promotes what vLLM's lookup finds on disk, while
the request waits. What prefetch saves is therefore the time of that read, and
on a busy replica the steps that go by until vLLM looks again.

    python -m bench.replica.prefetch --rounds 5 --json bench/results/prefetch.json
"""

import argparse
import itertools
import secrets
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.command import write_report
from bench.replica.demo import CONFIGS, WORK, Round, Stage, say, start, start_router
from bench.replica.local import CannotStart, variant
from bench.replica.text import real_text
from bench.replica.tiers import NotThere, ReplicaTiers
from bench.ttft import BenchError, machine, percentile
from router.processes import ChildFailed, ProcessGroup

_ROUTERS: Final[dict[str, dict[str, object]]] = {
    "at once": {"enabled": True, "wait_cap_s": 0.0},
    "waiting": {"enabled": True, "wait_cap_s": 2.0},
    "none": {"enabled": False},
}
"""Contenders by name: the router's ``prefetch`` settings."""
_FIRST_PORT: Final = 8082

_BUSY_REQUESTS: Final = 4
_BUSY_PROMPT_TOKENS: Final = 200
_BUSY_ANSWER_TOKENS: Final = 8000
"""More than can come until the load is taken away."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured answer, and under which conditions."""

    replica_is: str
    page_cache: str
    prefetch: str
    ttft_s: float
    matched: str

    @property
    def condition(self) -> tuple[str, str, str]:
        """What samples of one median have in common."""
        return (self.replica_is, self.page_cache, self.prefetch)


def start_routers(group: ProcessGroup, stage: Stage) -> dict[str, str]:
    """Start the contenders; return their URLs by name."""
    urls = {}
    for port, (name, prefetch) in enumerate(_ROUTERS.items(), start=_FIRST_PORT):
        url = f"http://127.0.0.1:{port}"
        file_name = f"router-{name.replace(' ', '-')}"
        config = variant(
            CONFIGS / "router.yaml",
            WORK / "demo" / f"{file_name}.yaml",
            port=port,
            prefetch=prefetch,
            controller=None,  # its ports are the first router's
        )
        start_router(group, stage, file_name, config, url)
        urls[name] = url
    return urls


def measure(
    stage: Stage, routers: dict[str, str], *, tokens: int, rounds: int, seed: int
) -> Iterator[Sample]:
    """Yield ``rounds`` samples of every condition, the conditions in turn."""
    text = Round(stage, tokens=tokens, seed=seed)
    cold = text.compute()
    say(f"cold: {cold.ttft_s:.3f} s at {cold.replica}")
    holder = stage.replicas[cold.replica]
    conditions = itertools.product(("idle", "busy"), ("kept", "dropped"), routers)
    samples = itertools.product(range(rounds), list(conditions))
    for number, (_, (replica_is, page_cache, prefetch)) in enumerate(samples):
        router_url = routers[prefetch]
        text.leave_on_disk(holder, router_url, drop_page_cache=page_cache == "dropped")
        with _load(
            stage, holder, seed=seed + number, requests=_BUSY_REQUESTS * (replica_is == "busy")
        ):
            answer = text.ask_warm("disk", router_url)
        if answer.replica != holder.name:
            raise BenchError(f"{answer.replica} answered, the prefix was on {holder.name}")
        yield Sample(
            replica_is=replica_is,
            page_cache=page_cache,
            prefetch=prefetch,
            ttft_s=answer.ttft_s,
            matched=answer.matched,
        )


@contextmanager
def _load(stage: Stage, holder: ReplicaTiers, *, seed: int, requests: int) -> Iterator[None]:
    """Keep a replica decoding so many other requests, asked directly."""
    done = threading.Event()

    def decode(number: int) -> None:
        text = real_text(_BUSY_PROMPT_TOKENS, seed=1000 * seed + number)
        with (
            stage.client(holder.url) as client,
            client.completions.create(
                model=stage.model,
                prompt=text,
                max_tokens=_BUSY_ANSWER_TOKENS,
                stream=True,
                extra_body={"ignore_eos": True},
            ) as stream,
        ):
            # Leaving the block closes the connection, and vLLM stops.
            for _ in stream:
                if done.is_set():
                    return

    with ThreadPoolExecutor(max_workers=_BUSY_REQUESTS) as threads:
        load = [threads.submit(decode, number) for number in range(requests)]
        try:
            holder.wait_running(requests)
            yield
        finally:
            done.set()
        for each in load:
            each.result()


def table(samples: Sequence[Sample]) -> str:
    """Return median TTFT in seconds (and p90) by condition, the routers side by side."""
    columns = "".join(f"{name:>24}" for name in _ROUTERS)
    lines = [f"{'replica':<9}{'page cache':<12}{columns}"]
    lines.append("-" * len(lines[0]))
    for replica_is, page_cache in itertools.product(("idle", "busy"), ("kept", "dropped")):
        shown = ""
        for prefetch in _ROUTERS:
            times_s = _times_s(samples, (replica_is, page_cache, prefetch))
            cell = f"{statistics.median(times_s):.3f} (p90 {percentile(times_s, 0.9):.3f})"
            shown += f"{cell:>24}"
        lines.append(f"{replica_is:<9}{page_cache:<12}{shown}")
    return "\n".join(lines)


def _times_s(samples: Sequence[Sample], condition: tuple[str, str, str]) -> list[float]:
    return [each.ttft_s for each in samples if each.condition == condition]


def report(arguments: argparse.Namespace, samples: Sequence[Sample]) -> dict[str, object]:
    """Return every figure with the command and the machine, ready for JSON."""
    conditions = list(dict.fromkeys(each.condition for each in samples))
    return {
        "what": "time to first token of a prefix on disk, with prefetch before forward and without",
        "command": f"python -m bench.replica.prefetch --tokens {arguments.tokens} "
        f"--rounds {arguments.rounds} --seed {arguments.seed}",
        "machine": machine(),
        "routers": _ROUTERS,
        "load_when_busy": {
            "requests_at_once": _BUSY_REQUESTS,
            "prompt_tokens": _BUSY_PROMPT_TOKENS,
            "answer_tokens": _BUSY_ANSWER_TOKENS,
        },
        "median_ttft_s": {
            " ".join(each): statistics.median(_times_s(samples, each)) for each in conditions
        },
        "samples": [asdict(each) for each in samples],
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.replica.prefetch",
        description="Measure what prefetch before forward saves, on an idle and a busy replica.",
    )
    parser.add_argument("--model", help="default: a small one, made on the spot")
    parser.add_argument("--tokens", type=int, default=15_000, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seed", type=int, help="which text (default: a new one each time)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and return the exit code."""
    arguments = _arguments(argv)
    arguments.seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    samples: list[Sample] = []
    try:
        with ProcessGroup() as group:
            stage = start(group, arguments)
            routers = start_routers(group, stage)
            for sample in measure(
                stage,
                routers,
                tokens=arguments.tokens,
                rounds=arguments.rounds,
                seed=arguments.seed,
            ):
                samples.append(sample)
                say(f"  {' '.join(sample.condition):<22}{sample.ttft_s:8.3f} s  {sample.matched}")
    except (ChildFailed, CannotStart, BenchError, NotThere, OSError, ValueError) as error:
        say(f"\nFailed: {error}\nLogs are in {WORK / 'demo'}.")
        return 1
    except KeyboardInterrupt:
        say("\nInterrupted; everything that was started has been ended.")
        return 130
    print(table(samples))
    if arguments.json:
        write_report(arguments.json, report(arguments, samples))
    return 0


if __name__ == "__main__":
    sys.exit(main())
