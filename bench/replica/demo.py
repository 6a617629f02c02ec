"""`make demo`: two real vLLM replicas, the router in front, and the value of a warm prefix.

Starts everything, and asks about real text through the router with the OpenAI client, while the
text's KV is in one tier after the other. In the last round a replica is killed and started again.
Prints a table of times to first token, and ends everything that it started.
"""

import argparse
import secrets
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import openai
import yaml

from bench.command import write_report
from bench.replica import local
from bench.replica.model import make_model
from bench.replica.text import real_text
from bench.replica.tiers import (
    NotThereError,
    ReplicaTiers,
    call,
    common_prefix,
    knows_replicas,
    wait_until,
)
from bench.ttft import (
    COLD_QUESTION,
    REASON_HEADER,
    REPLICA_HEADER,
    WARM_QUESTION,
    Answer,
    BenchError,
    ask,
    machine,
)
from router.launch.processes import ChildFailedError, ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured answer."""

    row: str
    ttft_s: float
    prompt_tokens: int
    replica: str
    why: str
    matched: str
    """What the router knew the replica to hold, by tier."""


ROWS: Final = {
    "cold": "cold: nobody has seen it",
    "gpu": "warm: in the GPU tier",
    "cpu": "warm: in CPU RAM",
    "disk": "warm: on disk, with prefetch",
    "disk-plain": "warm: on disk, without prefetch",
    "killed": "warm: in CPU RAM, after kill -9",
    "other": "on the other replica",
}


def known_to_router(answer: Answer) -> str:
    """Return what the router knew and did, from its headers; '-' for nothing."""
    parts = []
    for tier in ("gpu", "cpu", "disk"):
        tokens = int(answer.headers.get(f"x-warmroute-matched-{tier}", 0))
        if tokens:
            parts.append(f"{tier} {tokens}")
    prefetch = answer.headers.get("x-warmroute-prefetch")
    return ", ".join(parts) + (f" [{prefetch}]" if prefetch else "") or "-"


def sample(row: str, answer: Answer, *, directly: str | None = None) -> Sample:
    """Return the figures of an answer; ``directly`` names the replica that was asked itself."""
    return Sample(
        row=row,
        ttft_s=answer.ttft_s,
        prompt_tokens=answer.prompt_tokens or 0,
        replica=directly or answer.headers[REPLICA_HEADER],
        why="asked directly" if directly else answer.headers[REASON_HEADER],
        matched=known_to_router(answer),
    )


def lies_in(matched: Mapping[str, int], tier: str, least_tokens: int) -> bool:
    """Return whether this much of a prompt is matched, and ``tier`` is the fastest of its tiers."""
    fastest = next((name for name in ("gpu", "cpu", "disk") if matched.get(name)), None)
    return fastest == tier and sum(matched.values()) >= least_tokens


def table(samples: Sequence[Sample], rows: Mapping[str, str] = ROWS) -> str:
    """Return the table of medians over the rounds, with the ratio to cold."""
    header = f"{'':<34}{'TTFT s':>9}{'ratio':>8}  {'served by':<11}{'why':<19}known to the router"
    lines = [header, "-" * len(header)]
    cold_s = _median(samples, "cold")
    for row, label in rows.items():
        mine = [each for each in samples if each.row == row]
        if not mine:
            continue
        median_s = _median(samples, row)
        last = mine[-1]
        lines.append(
            f"{label:<34}{median_s:>9.3f}{cold_s / median_s:>8.1f}  "
            f"{last.replica:<11}{last.why:<19}{last.matched}".rstrip()
        )
    return "\n".join(lines)


SMALL_MODEL: Final = "a model of 27 million parameters with 8 KiB of KV a token"


def caption(model: str | None, where: Mapping[str, object]) -> str:
    """Return what the ratios are of: the model and the machine, and how others would differ."""
    return (
        f"The ratios are of {model or SMALL_MODEL},\non {where['gpu'] or where['cpu']}. "
        "The slower a machine computes and the smaller its KV, the larger\nthey are: measure "
        "your own model on your own machine, with bench/ttft.py."
    )


def _median(samples: Sequence[Sample], row: str) -> float:
    return statistics.median(each.ttft_s for each in samples if each.row == row)


def strays(samples: Sequence[Sample]) -> list[str]:
    """Return what did not go where it should have gone: warm rows to the cold row's replica."""
    found = []
    holder = ""
    for each in samples:
        if each.row == "cold":
            holder = each.replica
        elif (each.replica == holder) == (each.row == "other"):
            found.append(f"{ROWS[each.row]}: served by {each.replica}, the prefix was on {holder}")
    return found


def report(arguments: argparse.Namespace, samples: Sequence[Sample]) -> dict[str, object]:
    """Return every figure with the command and the machine, ready for JSON."""
    settings = {name: getattr(arguments, name) for name in ("model", "tokens", "rounds", "seed")}
    rows = list(dict.fromkeys(each.row for each in samples))
    return {
        "what": "time to first token by tier, real vLLM replicas behind the router",
        "command": "python -m bench.replica.demo "
        + " ".join(f"--{k} {v}" for k, v in settings.items() if v is not None),
        "machine": machine(),
        "median_ttft_s": {row: _median(samples, row) for row in rows},
        "ratio_to_cold": {row: _median(samples, "cold") / _median(samples, row) for row in rows},
        "samples": [asdict(each) for each in samples],
    }


ROOT: Final = Path(__file__).resolve().parents[2]
CONFIGS: Final = ROOT / "configs"
WORK: Final = Path(".warmroute")
PLAIN_ROUTER_PORT: Final = 8081
"""Where a second router listens, the same but without prefetch."""

ANSWER_TOKENS: Final = 8
# Room for the chat template, the question and the answer.
_SPARE_TOKENS: Final = 512
_WARM_UP_TOKENS: Final = 2048


@dataclass(kw_only=True)
class Stage:
    """What runs, once `start` has returned."""

    model: str
    router_url: str
    plain_router_url: str
    replicas: dict[str, ReplicaTiers] = field(default_factory=dict)
    starts: dict[str, Callable[[], object]] = field(default_factory=dict)
    """What starts each replica."""

    def client(self, base_url: str) -> openai.OpenAI:
        """Return a client of a router or of a replica itself."""
        return openai.OpenAI(
            base_url=f"{base_url}/v1", api_key="none", timeout=900.0, max_retries=0
        )


def say(text: str) -> None:
    """Tell on stderr how it goes; the table alone goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def start(group: ProcessGroup, arguments: argparse.Namespace, keep: Path) -> Stage:
    """Start two replicas and two routers, and return when they answer and know each other.

    ``keep`` is a directory in memory for the CPU pools.
    """
    platform = local.find_platform()
    router = yaml.safe_load((CONFIGS / "router.yaml").read_text())
    engines = [CONFIGS / f"{name}.yaml" for name in ("instance1", "instance2")]
    stage = Stage(
        model=arguments.model or str(make_model(WORK / "model")),
        router_url=f"http://127.0.0.1:{router['port']}",
        plain_router_url=f"http://127.0.0.1:{PLAIN_ROUTER_PORT}",
    )
    for engine, entry in zip(engines, router["replicas"], strict=True):
        settings = yaml.safe_load(engine.read_text())
        stage.replicas[settings["lmcache_instance_id"]] = ReplicaTiers(
            name=settings["lmcache_instance_id"],
            url=entry["url"],
            agent_url=entry["agent_url"],
            model=stage.model,
            disk=Path(settings["local_disk"]),
        )
    addresses = [*_urls(stage), *(each.agent_url for each in stage.replicas.values())]
    addresses += [yaml.safe_load(each.read_text())["distributed_url"] for each in engines]
    addresses += [f":{router['controller'][key]}" for key in ("port", "monitor_port")]
    _check_ports(addresses)
    say(f"Model {stage.model} on {platform}; logs in {WORK / 'demo'}")
    engines = [
        local.variant(each, WORK / "demo" / each.name, keep_cpu_dir=str(keep / each.stem))
        for each in engines
    ]
    _start_replicas(group, stage, engines, platform, arguments.tokens)
    for replica in stage.replicas.values():
        _warm_up(stage, replica)
    _start_routers(group, stage)
    return stage


def _warm_up(
    stage: Stage, replica: ReplicaTiers, *, tiers: Sequence[str] = ("none", "cpu", "disk")
) -> None:
    """Have a replica compute and load something once: its first time of each is slower."""
    say(f"{replica.name}: warming up")
    text = real_text(_WARM_UP_TOKENS, seed=0)
    for number in range(2):
        content = f"Warming up {number}. {text}"
        tokens = replica.chat_tokens(content)
        client = stage.client(replica.url)
        for tier in tiers:
            if tier != "none":
                replica.empty_gpu()
            if tier == "disk":
                replica.leave_on_disk(tokens)
            ask(client, model=stage.model, content=content, max_tokens=ANSWER_TOKENS)
            replica.wait_stored(tokens, "cpu")


def _urls(stage: Stage) -> list[str]:
    replicas = [each.url for each in stage.replicas.values()]
    return [*replicas, stage.router_url, stage.plain_router_url]


def _check_ports(addresses: Sequence[str]) -> None:
    taken = local.taken_ports([int(each.rpartition(":")[2]) for each in addresses])
    if taken:
        ports = ", ".join(map(str, taken))
        raise local.CannotStartError(f"something listens already on port {ports}: end it first")


def _start_replicas(
    group: ProcessGroup,
    stage: Stage,
    engines: Sequence[Path],
    platform: local.Platform,
    tokens: int,
) -> None:
    context = max(local.MAX_MODEL_TOKENS, tokens + _SPARE_TOKENS)
    count = len(engines)
    for index, (engine, replica) in enumerate(zip(engines, stage.replicas.values(), strict=True)):
        vllm_args = ["--model", stage.model, "--port", replica.url.rpartition(":")[2]]
        vllm_args += ["--host", "127.0.0.1", "--max-model-len", str(context)]
        vllm_args += local.platform_arguments(platform, of=count)
        stage.starts[replica.name] = partial(
            group.start,
            replica.name,
            local.replica_command(engine, vllm_args),
            local.replica_environment(platform, index, of=count),
            WORK / "demo" / f"{replica.name}.log",
        )
        stage.starts[replica.name]()
        say(f"{replica.name}: starting vLLM with the cache engine inside")
    for replica in stage.replicas.values():
        _wait_ready(group, replica)


def _wait_ready(group: ProcessGroup, replica: ReplicaTiers) -> None:
    url = f"{replica.url}/health"
    took_s = group.wait_ready(replica.name, url, local.REPLICA_READY_TIMEOUT_S, say)
    say(f"{replica.name}: ready after {took_s:.0f} s at {replica.url}")


def _start_routers(group: ProcessGroup, stage: Stage) -> None:
    configs = {
        "router": (CONFIGS / "router.yaml", stage.router_url),
        "router-without-prefetch": (
            local.variant(
                CONFIGS / "router.yaml",
                WORK / "demo" / "router-without-prefetch.yaml",
                port=PLAIN_ROUTER_PORT,
                prefetch={"enabled": False},
                controller=None,  # its ports are the first router's
            ),
            stage.plain_router_url,
        ),
    }
    for name, (config, url) in configs.items():
        start_router(group, stage, name, config, url)


def start_router(group: ProcessGroup, stage: Stage, name: str, config: Path, url: str) -> None:
    """Start a router; return when it answers at ``url`` and knows its replicas."""
    group.start(name, local.router_command(config), None, WORK / "demo" / f"{name}.log")
    group.wait_ready(name, f"{url}/health", local.ROUTER_READY_TIMEOUT_S, say)
    wait_until(
        f"{name}: knows its replicas",
        partial(knows_replicas, url, stage.model, len(stage.replicas)),
    )
    say(f"{name}: ready at {url}")


def _explain(stage: Stage, router_url: str, content: str) -> dict[str, Any]:
    body = {"model": stage.model, "messages": [{"role": "user", "content": content}]}
    answer: dict[str, Any] = call(f"{router_url}/explain", body)
    return answer


class Round:
    """One text, asked about while its KV lies in one tier after the other."""

    def __init__(self, stage: Stage, *, tokens: int, seed: int) -> None:
        self._stage = stage
        first = next(iter(stage.replicas.values()))
        self._chunk_tokens = first.chunk_tokens()

        def count(text: str) -> int:
            return int(
                call(f"{first.url}/tokenize", {"model": stage.model, "prompt": text})["count"]
            )

        text = real_text(tokens, seed=seed, count=count)
        self._cold_prompt = f"{text}\n\n{COLD_QUESTION}"
        self._warm_prompt = f"{text}\n\n{WARM_QUESTION}"
        tokens_of = first.chat_tokens
        warm_tokens = tokens_of(self._warm_prompt)
        self._shared = warm_tokens[: common_prefix(tokens_of(self._cold_prompt), warm_tokens)]

    def run(self, tell: Callable[[Sample], None], *, killing: ProcessGroup | None = None) -> None:
        """Measure every row, in order; raise what stands in the way.

        ``killing`` is what runs the replicas, if the demo kills one of them.
        """
        stage = self._stage
        cold = self.compute()
        tell(cold)
        holder = stage.replicas[cold.replica]
        (other,) = [each for each in stage.replicas.values() if each is not holder]
        self._wait_known(stage.router_url, "gpu")
        tell(self.ask_warm("gpu", stage.router_url))

        holder.empty_gpu()
        self._wait_known(stage.router_url, "cpu")
        tell(self.ask_warm("cpu", stage.router_url))

        for row, router_url in (("disk", stage.router_url), ("disk-plain", stage.plain_router_url)):
            self.leave_on_disk(holder, router_url)
            tell(self.ask_warm(row, router_url))

        if killing is not None:
            say(f"{holder.name}: killing it, and starting it again")
            killing.stop(holder.name, kill=True)
            stage.starts[holder.name]()
            _wait_ready(killing, holder)
            _warm_up(stage, holder, tiers=("none", "cpu"))
            self._wait_known(stage.router_url, "cpu")
            tell(self.ask_warm("killed", stage.router_url))

        tell(self._ask("other", other.url, self._warm_prompt, name=other.name))

    def compute(self) -> Sample:
        """Ask for the first time; return when the replica that answered has stored it all."""
        cold = self._ask("cold", self._stage.router_url, self._cold_prompt)
        self._stage.replicas[cold.replica].wait_stored(self._shared, "cpu")
        return cold

    def leave_on_disk(
        self, holder: ReplicaTiers, router_url: str, *, drop_page_cache: bool = True
    ) -> None:
        """Have the prefix on the holder's disk alone, and the router know it."""
        holder.empty_gpu()
        holder.leave_on_disk(self._shared, drop_page_cache=drop_page_cache)
        self._wait_known(router_url, "disk")

    def ask_warm(self, row: str, router_url: str) -> Sample:
        """Ask about the same text again, through a router."""
        return self._ask(row, router_url, self._warm_prompt)

    def _wait_known(self, router_url: str, tier: str) -> None:
        """Wait until the router knows that the prefix is in ``tier`` and in no faster one."""

        def is_known() -> bool:
            matched = _explain(self._stage, router_url, self._warm_prompt)["matched_tokens"]
            return lies_in(matched, tier, len(self._shared) - self._chunk_tokens)

        wait_until(f"{router_url}: knows the prefix to be in {tier}", is_known)

    def _ask(self, row: str, url: str, prompt: str, *, name: str | None = None) -> Sample:
        answer = ask(
            self._stage.client(url),
            model=self._stage.model,
            content=prompt,
            max_tokens=ANSWER_TOKENS,
        )
        return sample(row, answer, directly=name)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.replica.demo",
        description="Start two vLLM replicas and the router, and measure time to first token.",
    )
    parser.add_argument("--model", help="default: a small one, made on the spot")
    parser.add_argument("--tokens", type=int, default=15_000, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="texts (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="which texts (default: new ones each time)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there too")
    arguments = parser.parse_args(argv)
    if arguments.tokens < 1024 or arguments.rounds < 1:
        parser.error("--tokens: at least 1024 (some chunks); --rounds: at least 1")
    return arguments


def run(arguments: argparse.Namespace) -> list[Sample]:
    """Start, measure and end everything; raise what stood in the way."""
    samples: list[Sample] = []

    def tell(sample: Sample) -> None:
        samples.append(sample)
        say(f"  {ROWS[sample.row]:<34}{sample.ttft_s:8.3f} s  {sample.replica}")

    with tempfile.TemporaryDirectory(dir="/dev/shm") as keep, ProcessGroup() as group:
        stage = start(group, arguments, Path(keep))
        for number in range(arguments.rounds):
            say(f"round {number + 1} of {arguments.rounds}: {arguments.tokens} tokens of real text")
            killing = group if number + 1 == arguments.rounds else None
            try:
                this_round = Round(stage, tokens=arguments.tokens, seed=arguments.seed + number)
                this_round.run(tell, killing=killing)
            except (BenchError, NotThereError, OSError):
                group.check()  # a process that died is the better explanation
                raise
        say("ending everything")
    return samples


FAILURES: Final = (
    ChildFailedError,
    local.CannotStartError,
    BenchError,
    NotThereError,
    OSError,
    ValueError,
)
"""What ends a command that starts replicas with a message, and not with a stack trace."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code: 0 when every row went where it should."""
    arguments = _arguments(argv)
    arguments.seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    try:
        samples = run(arguments)
    except FAILURES as error:
        say(f"\nThe demo failed: {error}\nLogs are in {WORK / 'demo'}.")
        return 1
    except KeyboardInterrupt:
        say("\nInterrupted; everything that was started has been ended.")
        return 130
    print(f"\nTime to first token, {samples[0].prompt_tokens} tokens, ", end="")
    print(f"median of {arguments.rounds}:\n\n{table(samples)}\n")
    print(f"{caption(arguments.model, machine())}\n")
    if arguments.json:
        write_report(arguments.json, report(arguments, samples))
    for stray in strays(samples):
        say(f"UNEXPECTED: {stray}")
    return 1 if strays(samples) else 0


if __name__ == "__main__":
    sys.exit(main())
