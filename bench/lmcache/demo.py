"""`make demo-lmcache`: stock vLLM with stock LMCache behind the router, our own engine beside it.

First two stock vLLM replicas, each with a stock LMCache server that reports to the router as
to its coordinator; then, on the same machine and of the same texts, two replicas with the
cache engine of this project. Prints one table of times to first token by tier.
"""

import argparse
import secrets
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import openai

from bench.command import write_report
from bench.environments import NotInstalled
from bench.lmcache.environment import python
from bench.lmcache.replica import CHUNK_TOKENS, LmcacheReplica, start_together
from bench.lmcache.report import report, table
from bench.replica import demo, local
from bench.replica.demo import ANSWER_TOKENS, WORK, say
from bench.replica.demo_report import ROWS, Sample, lies_in, sample, strays
from bench.replica.model import make_model
from bench.replica.text import real_text
from bench.replica.tiers import NotThere, call, common_prefix, forget_pages, wait_until
from bench.ttft import (
    COLD_QUESTION,
    WARM_QUESTION,
    BenchError,
    ask,
)
from cacheengine.launch.launch import free_ports
from router.launch.processes import ChildFailed, ProcessGroup

_SPARE_TOKENS: Final = 512
_WARM_UP_TOKENS: Final = 2048
_DIRECTORY: Final = WORK / "demo-lmcache"

Tell = Callable[[Sample], None]


class LmcacheStage:
    """Two replicas with LMCache and the router, between `start` and the end of their group."""

    def __init__(self, group: ProcessGroup, model: str, tokens: int) -> None:
        self._group = group
        port, controller_port, monitor_port = free_ports(3)
        self.model = model
        self.router_url = f"http://127.0.0.1:{port}"
        self.replicas = {
            name: LmcacheReplica(
                group,
                name,
                python=python(),
                model=model,
                served_name=model,
                directory=_DIRECTORY.resolve(),
                coordinator_url=f"http://127.0.0.1:{controller_port}",
                index=index,
                of=2,
                max_model_tokens=max(local.MAX_MODEL_TOKENS, tokens + _SPARE_TOKENS),
            )
            for index, name in enumerate(("lmcache1", "lmcache2"))
        }
        self._settings = {
            "port": port,
            "tokenizer": {"path": str(Path(model).resolve())},
            "replicas": [
                {"url": each.url, "instance_id": name, "lmcache": each.server_url}
                for name, each in self.replicas.items()
            ],
            "controller": {"port": controller_port, "monitor_port": monitor_port},
        }

    def start(self) -> None:
        """Start everything; return when the router knows the replicas."""
        say(f"Stock vLLM and LMCache; logs in {_DIRECTORY}")
        _DIRECTORY.mkdir(parents=True, exist_ok=True)
        start_together(list(self.replicas.values()))
        for each in self.replicas.values():
            say(f"{each.name}: ready at {each.url}, its LMCache at {each.server_url}")
            self._warm_up(each)
        path = _DIRECTORY / "router.yaml"
        path.write_text("{}")
        config = local.variant(path, path, **self._settings)
        log = _DIRECTORY / "router.log"
        self._group.start("router", local.router_command(config), None, log)
        health = f"{self.router_url}/health"
        self._group.wait_ready("router", health, local.ROUTER_READY_TIMEOUT_S)

        def knows() -> bool:
            states = call(health)["replicas"].values()
            return all(each["state"] == "up" for each in states)

        wait_until("the router knows its replicas", knows)
        say(f"router: ready at {self.router_url}")

    def client(self, base_url: str) -> openai.OpenAI:
        """Return a client of the router or of a replica itself."""
        return openai.OpenAI(
            base_url=f"{base_url}/v1", api_key="none", timeout=900.0, max_retries=0
        )

    def matched(self, content: str) -> dict[str, int]:
        """Return what the router knows of a prompt, by tier."""
        body = {"model": self.model, "messages": [{"role": "user", "content": content}]}
        found: dict[str, int] = call(f"{self.router_url}/explain", body)["matched_tokens"]
        return found

    def _warm_up(self, replica: LmcacheReplica) -> None:
        """Have a replica compute, store and load once: its first time of each is slower."""
        content = f"Warming up. {real_text(_WARM_UP_TOKENS, seed=0)}"
        chunks = len(replica.chat_tokens(content)) // CHUNK_TOKENS
        for _ in range(3):
            client = self.client(replica.url)
            ask(client, model=self.model, content=content, max_tokens=ANSWER_TOKENS)
            wait_until("it is stored", lambda: replica.files() >= chunks)
            replica.empty_gpu()


class LmcacheRound:
    """One text, asked about while its KV lies in one tier after the other."""

    def __init__(self, stage: LmcacheStage, *, tokens: int, seed: int) -> None:
        self._stage = stage
        first = next(iter(stage.replicas.values()))

        def count(text: str) -> int:
            body = {"model": stage.model, "prompt": text}
            return int(call(f"{first.url}/tokenize", body)["count"])

        text = real_text(tokens, seed=seed, count=count)
        self._cold = f"{text}\n\n{COLD_QUESTION}"
        self._warm = f"{text}\n\n{WARM_QUESTION}"
        self._shared = common_prefix(first.chat_tokens(self._cold), first.chat_tokens(self._warm))

    def run(self, tell: Tell) -> None:
        """Measure every row, in order; raise what stands in the way."""
        cold = self._ask("cold", self._cold)
        tell(cold)
        holder = self._stage.replicas[cold.replica]
        (other,) = [each for each in self._stage.replicas.values() if each is not holder]
        self._wait("gpu")
        tell(self._ask("gpu", self._warm))
        holder.empty_gpu()
        self._wait("cpu")
        tell(self._ask("cpu", self._warm))
        for row, url in (("disk", None), ("disk-plain", holder.url)):
            holder.empty_gpu()
            holder.empty_l1()
            self._wait("disk")
            forget_pages(holder.disk)
            tell(self._ask(row, self._warm, directly=holder if url else None))
        tell(self._ask("other", self._warm, directly=other))

    def _wait(self, tier: str) -> None:
        """Wait until the router knows the prefix to be in a tier and in no faster one."""

        def is_known() -> bool:
            return lies_in(self._stage.matched(self._warm), tier, self._shared - CHUNK_TOKENS)

        wait_until(f"the router knows the prefix to be in {tier}", is_known)

    def _ask(self, row: str, content: str, directly: LmcacheReplica | None = None) -> Sample:
        url = directly.url if directly else self._stage.router_url
        answer = ask(
            self._stage.client(url),
            model=self._stage.model,
            content=content,
            max_tokens=ANSWER_TOKENS,
        )
        return sample(row, answer, directly=directly.name if directly else None)


def measure_lmcache(arguments: argparse.Namespace, tell: Tell) -> None:
    """Measure stock LMCache behind the router."""
    model = str(make_model(WORK / "model"))
    with ProcessGroup() as group:
        stage = LmcacheStage(group, model, arguments.tokens)
        try:
            stage.start()
            for number in range(arguments.rounds):
                seed = arguments.seed + number
                LmcacheRound(stage, tokens=arguments.tokens, seed=seed).run(tell)
        finally:
            group.stop_all()
            for each in stage.replicas.values():
                each.tidy()


def measure_ours(arguments: argparse.Namespace, tell: Tell) -> None:
    """Measure this project's engine behind the router, of the same texts."""
    with ProcessGroup() as group:
        stage = demo.start(group, arguments)
        for number in range(arguments.rounds):
            seed = arguments.seed + number
            demo.Round(stage, tokens=arguments.tokens, seed=seed).run(tell)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.lmcache.demo", description=__doc__)
    parser.add_argument("--tokens", type=int, default=8_000, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="texts (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="which texts (default: new ones each time)")
    parser.add_argument("--alone", action="store_true", help="leave our own engine out")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there too")
    arguments = parser.parse_args(argv)
    if arguments.tokens < 1024 or arguments.rounds < 1:
        parser.error("--tokens: at least 1024 (some chunks); --rounds: at least 1")
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, list[Sample]]:
    """Measure one after the other; raise what stood in the way."""
    samples: dict[str, list[Sample]] = {}

    def tell(kind: str, sample: Sample) -> None:
        samples.setdefault(kind, []).append(sample)
        say(f"  {ROWS[sample.row]:<34}{sample.ttft_s:8.3f} s  {sample.replica}")

    measure_lmcache(arguments, partial(tell, "LMCache 0.5.6"))
    if not arguments.alone:
        measure_ours(arguments, partial(tell, "warmroute"))
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code: 0 when every row went where it should."""
    arguments = _arguments(argv)
    arguments.seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    arguments.model = None
    failures = (ChildFailed, local.CannotStart, NotInstalled, BenchError, NotThere, OSError)
    try:
        samples = run(arguments)
    except (*failures, ValueError) as error:
        say(f"\nThe demo failed: {error}\nLogs are in {_DIRECTORY} and {WORK / 'demo'}.")
        return 1
    except KeyboardInterrupt:
        say("\nInterrupted; everything that was started has been ended.")
        return 130
    print(table(samples, arguments.rounds))
    if arguments.json:
        write_report(arguments.json, report(arguments, samples))
    found = [stray for each in samples.values() for stray in strays(each)]
    for stray in found:
        say(f"UNEXPECTED: {stray}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
