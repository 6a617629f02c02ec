"""The rates that real replicas measure, against a clock outside them, over a long run.

    python -m bench.replica.rates --minutes 20 --json bench/results/rates.json

Starts two vLLM replicas on CPUs with a model of 128 KiB of KV a token, a CPU RAM tier smaller than
the sessions' KV and a disk tier, and the router with its default settings. Before and after the run
each replica answers cold prompts, and one prompt from each tier, one at a time: their times to
first token, and the time that vLLM reports as waiting, are the outside clock. In the run, sessions
grow by turns and think between them, at 80% of what the replicas can do. There the outside clock is
the client's, for turns that no other request at their replica delayed.
"""

import argparse
import json
import mmap
import os
import random
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from bench.command import origin, positive, work_directory, write_report
from bench.replica import local
from bench.replica.demo import CONFIGS, FAILURES, Stage, say, start_router
from bench.replica.model import LARGE_KV, make_model
from bench.replica.rate_figures import (
    QUARTERS,
    Comparison,
    Rates,
    Sample,
    TierTimes,
    Turn,
    alone,
    by_minute,
    compare_prefill,
    compare_tiers,
    compare_turns,
    drift,
    faults,
    growth,
    quarter_of,
    router_ratios,
)
from bench.replica.text import CHARS_PER_TOKEN, real_text
from bench.replica.tiers import NotThereError, ReplicaTiers, call, metric
from bench.ttft import REPLICA_HEADER, BenchError, ask
from cacheengine.launch.vllm_launch import free_ports
from router.launch.processes import ProcessGroup

NAMES: Final = ("replica1", "replica2")
BLOCK_TOKENS: Final = 128
GPU_BLOCKS: Final = 40
MODEL_TOKENS: Final = 4096
CPU_GB: Final = 0.75
DISK_GB: Final = 6.0

SESSIONS: Final = 40
TURNS: Final = 6
"""Turns of a session; then another one takes its place."""
FIRST_TOKENS: Final = 600
TURN_TOKENS: Final = 200
ANSWER_TOKENS: Final = 4
LOAD: Final = 0.8
_CALIBRATION_AT_ONCE: Final = 6
_FILL_AT_ONCE: Final = 4

COLD_BLOCKS: Final = (3, 5, 7)
"""Lengths of the cold prompts; a few tokens are added to each, so that a token is left to compute
if all blocks are cached."""
TIER_BLOCKS: Final = (3, 20)
"""Lengths of the prompts that are loaded from each tier."""
_REMAINDER_TOKENS: Final = range(2, 10)
_TINY: Final = "Say a word."
_WARM_UP_PROMPTS: Final = 3
_FEWEST_ROUNDS: Final = 4
_TIER_ROUNDS: Final = 2
"""Loads from each tier, for each round of cold prompts."""
_QUEUE_TIME: Final = "vllm:request_queue_time_seconds_sum"
_SAMPLE_S: Final = 5.0
_COPIED_BYTES: Final = BLOCK_TOKENS * LARGE_KV.kv_bytes_per_token
"""Bytes of the bench's own copies and reads: those of a chunk."""
_PARTS: Final = ("prefill", "attention", "load", "disk", "peer")
# What drift is told for: a turn in the middle of a session.
_USUAL_TOKENS: Final = 264
_USUAL_CONTEXT: Final = 900


def start(group: ProcessGroup, directory: Path) -> Stage:
    """Start two replicas and the router; return when they answer and know each other."""
    if local.find_platform() != "cpu":
        raise local.CannotStartError("this needs replicas on CPUs: set WARMROUTE_REPLICA=vllm-cpu")
    ports = iter(free_ports(3 * len(NAMES) + 1))
    router_port = next(ports)
    stage = Stage(
        model=str(make_model(directory / "model", LARGE_KV)),
        router_url=f"http://127.0.0.1:{router_port}",
        plain_router_url="",
    )
    for index, name in enumerate(NAMES):
        port, agent_port, transfer_port = next(ports), next(ports), next(ports)
        disk = directory / f"disk-{name}"
        config = local.variant(
            CONFIGS / "instance1.yaml",
            directory / f"{name}.yaml",
            max_local_cpu_size=CPU_GB,
            local_disk=f"{disk}/",
            max_local_disk_size=DISK_GB,
            lmcache_instance_id=name,
            lmcache_worker_port=agent_port,
            distributed_url=f"localhost:{transfer_port}",
            enable_controller=None,
            controller_url=None,
        )
        vllm_args = ["--model", stage.model, "--port", str(port), "--host", "127.0.0.1"]
        vllm_args += ["--max-model-len", str(MODEL_TOKENS)]
        vllm_args += ["--num-gpu-blocks-override", str(GPU_BLOCKS)]
        vllm_args += local.platform_arguments("cpu", of=len(NAMES))
        stage.replicas[name] = ReplicaTiers(
            name=name,
            url=f"http://127.0.0.1:{port}",
            agent_url=f"http://127.0.0.1:{agent_port}",
            model=stage.model,
            disk=disk,
        )
        group.start(
            name,
            local.replica_command(config, vllm_args),
            local.replica_environment("cpu", index, of=len(NAMES)),
            directory / f"{name}.log",
        )
    for replica in stage.replicas.values():
        group.wait_ready(replica.name, f"{replica.url}/health", local.REPLICA_READY_TIMEOUT_S, say)
    router = local.variant(
        CONFIGS / "router.yaml",
        directory / "router.yaml",
        port=router_port,
        replicas=[
            {"url": each.url, "agent_url": each.agent_url, "instance_id": each.name}
            for each in stage.replicas.values()
        ],
        controller=None,
    )
    start_router(group, stage, "router", router, stage.router_url)
    return stage


class Probes:
    """Prompts sent to one replica that is otherwise idle."""

    def __init__(self, stage: Stage, replica: ReplicaTiers, seed: int) -> None:
        self._replica = replica
        self._model = stage.model
        self._client = stage.client(replica.url)
        self._rng = random.Random(f"{seed} {replica.name}")
        self.raw: dict[str, Any] = {}
        """By when: every time that was taken."""

    def run(self, when: str, rounds: int) -> list[Comparison]:
        """Compare what the replica's agent reports with what the prompts took."""
        tiny_tokens = len(self._replica.chat_tokens(_TINY))
        tiny_s: list[float] = []
        cold: list[tuple[int, float]] = []
        if not self.raw:
            self._tier_times(COLD_BLOCKS[0], 1)  # what is done first is slower
            for _ in range(_WARM_UP_PROMPTS):
                self._ask_cold()
        for _ in range(rounds):
            tiny_s.append(self._ttft_s(_TINY))
            cold += self._ask_cold()
        computed = self._rates(when)
        times = [self._tier_times(blocks, _TIER_ROUNDS * rounds) for blocks in TIER_BLOCKS]
        self.raw[when] = {
            "tiny_ttft_s": tiny_s,
            "cold_tokens_and_ttft_s": cold,
            "rates": asdict(computed),
            "waited_s": [asdict(each) for each in times],
        }
        name = self._replica.name
        found = compare_prefill(when, name, computed, cold, tiny=(tiny_tokens, tiny_s))
        return [found, *compare_tiers(when, name, self._rates(when), *times)]

    def _ask_cold(self) -> list[tuple[int, float]]:
        return [(blocks * BLOCK_TOKENS, self._ttft_s(self._text(blocks))) for blocks in COLD_BLOCKS]

    def _rates(self, when: str) -> Rates:
        rates = Rates.of(call(f"{self._replica.agent_url}/info"))
        if rates is None:
            raise NotThereError(f"{self._replica.name}: has not measured all rates {when}")
        return rates

    def _tier_times(self, blocks: int, rounds: int) -> TierTimes:
        text = self._text(blocks)
        tokens = self._replica.chat_tokens(text)
        self._ttft_s(text)
        self._replica.wait_stored(tokens, "cpu")
        times = TierTimes(kv_bytes=blocks * BLOCK_TOKENS * LARGE_KV.kv_bytes_per_token)
        for _ in range(rounds):
            self._replica.empty_gpu()
            times.cpu_s.append(self._waited_s(text))
            self._replica.empty_gpu()
            self._replica.leave_on_disk(tokens)
            times.disk_s.append(self._waited_s(text))
        return times

    def _waited_s(self, text: str) -> float:
        """Ask; return how long the request waited until vLLM computed it, as vLLM reports it."""
        before_s = metric(self._replica.url, _QUEUE_TIME)
        self._ttft_s(text)
        return metric(self._replica.url, _QUEUE_TIME) - before_s

    def _ttft_s(self, text: str) -> float:
        return ask(self._client, model=self._model, content=text, max_tokens=2).ttft_s

    def _text(self, blocks: int) -> str:
        """Return new text of whole blocks and a few tokens, as a chat prompt."""
        wanted = blocks * BLOCK_TOKENS
        text = real_text(wanted, seed=self._rng.getrandbits(32))
        text += " and so on" * BLOCK_TOKENS
        while (excess := len(self._replica.chat_tokens(text)) - wanted) not in _REMAINDER_TOKENS:
            if excess < _REMAINDER_TOKENS.start:
                text += " x" * (_REMAINDER_TOKENS.start - excess)
            else:
                text = text[: -max(1, round((excess - 5) * CHARS_PER_TOKEN / 2))]
        return text


@dataclass
class _Session:
    name: str
    rng: random.Random
    turns: int
    content: str = ""
    kind: int = 0
    prompt_tokens: int = 0

    def grow(self) -> None:
        tokens = TURN_TOKENS if self.kind else FIRST_TOKENS
        self.content += real_text(tokens, seed=self.rng.getrandbits(32))


@dataclass
class Sessions:
    """Sessions that ask through the router, each on a thread; all in one phase after the other."""

    stage: Stage
    seed: int
    _number: int = 0
    _sessions: list[_Session] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        # The first ones end early, so that the sessions do not all start again together.
        self._sessions = [self._new(rng.randint(1, TURNS)) for _ in range(SESSIONS)]
        self._client = self.stage.client(self.stage.router_url)

    def _new(self, turns: int = TURNS) -> _Session:
        with self._lock:
            self._number += 1
            name = f"session-{self._number}"
        return _Session(name, random.Random(f"{self.seed} {name}"), turns)

    def run(
        self, duration_s: float, *, think_s: float = 0.0, at_once: int = SESSIONS
    ) -> list[Turn]:
        """Let all sessions take turns for a time; return them, with times from its start on.

        A session thinks for ``think_s`` on average before each turn. At most ``at_once`` requests
        run at the same time.
        """
        began_s, turns = time.monotonic(), list[Turn]()
        slots, stop = threading.Semaphore(at_once), threading.Event()

        def live(place: int) -> None:
            rng = self._sessions[place].rng
            while not stop.is_set():
                if think_s and stop.wait(rng.expovariate(1 / think_s)):
                    return
                with slots:
                    if not stop.is_set():
                        turns.append(self._turn(place, began_s))

        threads = [threading.Thread(target=live, args=(i,)) for i in range(SESSIONS)]
        for thread in threads:
            thread.start()
        stop.wait(duration_s)
        stop.set()
        for thread in threads:
            thread.join()
        return sorted(turns, key=lambda turn: turn.sent_s)

    def fill(self) -> None:
        """Have each session ask once, so that its KV is there."""
        began_s, places = time.monotonic(), iter(range(SESSIONS))
        threads = [
            threading.Thread(target=lambda: [self._turn(place, began_s) for place in places])
            for _ in range(_FILL_AT_ONCE)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _turn(self, place: int, began_s: float) -> Turn:
        session = self._sessions[place]
        session.grow()
        sent_s = time.monotonic() - began_s
        try:
            answer = ask(
                self._client,
                model=self.stage.model,
                content=session.content,
                max_tokens=ANSWER_TOKENS,
                session=session.name,
            )
        except BenchError as error:
            self._sessions[place] = self._new()
            now_s = time.monotonic() - began_s
            return Turn(
                kind=session.kind, sent_s=sent_s, first_s=now_s, ended_s=now_s, failure=str(error)
            )
        told = answer.headers
        turn = Turn(
            kind=session.kind,
            sent_s=sent_s,
            first_s=sent_s + answer.ttft_s,
            ended_s=sent_s + answer.total_s,
            prompt_tokens=answer.prompt_tokens or 0,
            cached_tokens=answer.cached_tokens or 0,
            reusable_tokens=session.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
            replica=told[REPLICA_HEADER],
            held_s=float(told["x-warmroute-held-ms"]) / 1000,
            predicted_s=float(told["x-warmroute-predicted-ttft-ms"]) / 1000,
            matched={
                tier: int(told.get(f"x-warmroute-matched-{tier}", 0))
                for tier in ("gpu", "cpu", "disk")
            },
            is_copied="x-warmroute-copy" in told,
        )
        session.prompt_tokens = turn.prompt_tokens
        session.content += f"\n{answer.text}\n"
        session.kind += 1
        if session.kind >= session.turns:
            self._sessions[place] = self._new()
        return turn


class Sampler:
    """Reads the rates that agents and router report, every few seconds, on a thread."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._stop = threading.Event()
        self._began_s = time.monotonic()
        self.samples: list[Sample] = []
        self.missed = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Sampler":
        self._began_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._sample()
            except OSError:
                self.missed += 1
            if self._stop.wait(_SAMPLE_S):
                return

    def _sample(self) -> None:
        url = self._stage.router_url
        for replica in self._stage.replicas.values():
            rates = Rates.of(call(f"{replica.agent_url}/info"))
            memory, disk = _memory_bytes_per_s(), _disk_bytes_per_s(replica.disk)
            known = {
                part: metric(url, "warmroute_measured_rate", replica=replica.name, part=part)
                for part in _PARTS
            }
            if rates is not None:
                self.samples.append(
                    Sample(
                        at_s=time.monotonic() - self._began_s,
                        replica=replica.name,
                        rates=rates,
                        router={part: value for part, value in known.items() if value},
                        memory_bytes_per_s=memory,
                        disk_bytes_per_s=disk,
                    )
                )


def _memory_bytes_per_s() -> float:
    """Return how fast this machine copies memory now."""
    source = np.ones(_COPIED_BYTES, np.uint8)
    target = np.ones_like(source)
    began_s = time.perf_counter()
    np.copyto(target, source)
    return _COPIED_BYTES / (time.perf_counter() - began_s)


def _disk_bytes_per_s(directory: Path) -> float | None:
    """Return how fast a chunk's file is read past the page cache now; None if there is none."""
    files = list(directory.rglob("*.kv"))
    if not files:
        return None
    try:
        descriptor = os.open(random.choice(files), os.O_RDONLY | os.O_DIRECT)
    except FileNotFoundError:
        return None  # evicted meanwhile
    with mmap.mmap(-1, _COPIED_BYTES) as buffer:
        buffer.write(b"1" * _COPIED_BYTES)
        began_s = time.perf_counter()
        try:
            read_bytes = os.preadv(descriptor, [buffer], 0)
        finally:
            os.close(descriptor)
        return read_bytes / (time.perf_counter() - began_s)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start, measure and end everything; return the figures."""
    run_s = 60.0 * arguments.minutes
    with work_directory(arguments.work) as directory, ProcessGroup() as group:
        try:
            stage = start(group, directory)
            probes = [Probes(stage, replica, arguments.seed) for replica in stage.replicas.values()]
            say("before the run: probes")
            compared = _probe(probes, "before", arguments.rounds)
            base_s = _base_s(stage)
            sessions = Sessions(stage, arguments.seed)
            say(f"{SESSIONS} sessions: first turns, then what the replicas can do")
            sessions.fill()
            calibration_s = min(90.0, run_s / 4)
            busy = sessions.run(calibration_s, at_once=_CALIBRATION_AT_ONCE)
            per_s = sum(t.ended_s <= calibration_s for t in busy) / calibration_s
            think_s = max(0.0, SESSIONS / (LOAD * per_s) - len(NAMES) / per_s)
            say(f"{per_s:.2f} turns/s; sessions think for {think_s:.0f} s; {run_s / 60:g} minutes")
            with Sampler(stage) as sampler:
                turns = sessions.run(run_s, think_s=think_s)
            base_s = (base_s + _base_s(stage)) / 2
            say("after the run: probes")
            compared += _probe(probes, "after", arguments.rounds)
        except (BenchError, NotThereError, OSError):
            group.check()
            raise
        load_average = os.getloadavg()[2]
        raw = {
            "turns": [asdict(each) for each in turns],
            "samples": [asdict(each) for each in sampler.samples],
        }
        (directory / "raw.json").write_text(json.dumps(raw))
        say("ending everything")
    figures = _figures(turns, sampler.samples, run_s, base_s=base_s, compared=compared)
    return {
        "settings": {
            "sessions": SESSIONS,
            "turns_of_a_session": TURNS,
            "first_tokens": FIRST_TOKENS,
            "turn_tokens": TURN_TOKENS,
            "kv_bytes_per_token": LARGE_KV.kv_bytes_per_token,
            "gpu_tokens": GPU_BLOCKS * BLOCK_TOKENS,
            "cpu_gb": CPU_GB,
            "disk_gb": DISK_GB,
        },
        "calibrated_turns_per_s": per_s,
        "think_s": think_s,
        "base_s": base_s,
        "samples_missed": sampler.missed,
        "load_average_of_15_minutes": load_average,
        "probes": {name: each.raw for name, each in zip(NAMES, probes, strict=True)},
        **figures,
    }


def _probe(probes: Sequence[Probes], when: str, rounds: int) -> list[Comparison]:
    """Probe all replicas at the same time: they share the machine as they do in the run."""
    with ThreadPoolExecutor(len(probes)) as threads:
        each = threads.map(lambda probe: probe.run(when, rounds), probes)
        return [comparison for comparisons in each for comparison in comparisons]


def _base_s(stage: Stage) -> float:
    """Return the median TTFT of a tiny prompt through the router."""
    client = stage.client(stage.router_url)
    return median(
        ask(client, model=stage.model, content=_TINY, max_tokens=2).ttft_s for _ in range(9)
    )


def _figures(
    turns: Sequence[Turn],
    samples: Sequence[Sample],
    run_s: float,
    *,
    base_s: float,
    compared: list[Comparison],
) -> dict[str, Any]:
    answered = [turn for turn in turns if not turn.failure]
    lone = alone(answered)
    known: dict[str, Any] = {
        "base_s": base_s,
        "kv_bytes_per_token": LARGE_KV.kv_bytes_per_token,
    }
    compared = compared + compare_turns("during", lone, samples, **known)
    quarters = [
        compare_turns(
            f"quarter {quarter + 1}",
            [turn for turn in lone if quarter_of(turn.sent_s, run_s) == quarter],
            samples,
            **known,
        )
        for quarter in (0, QUARTERS - 1)
    ]
    usual = {"tokens": _USUAL_TOKENS, "context": _USUAL_CONTEXT}
    drifted = drift(samples, run_s, quarters, **usual)
    grown = growth(turns, run_s)
    failures = [turn.failure for turn in turns if turn.failure]
    observed_s = sum(turn.ttft_s - turn.held_s for turn in answered)
    return {
        "faults": faults(compared, drifted, grown, len(failures)),
        "compared": [asdict(each) for each in compared],
        "compared_in_quarters": [asdict(each) for comparisons in quarters for each in comparisons],
        "router_over_agent": router_ratios(samples),
        "drift": [asdict(each) for each in drifted],
        "computed_tokens": [asdict(each) for each in grown],
        "run": {
            "requests": len(turns),
            "turns_per_s": len(answered) / run_s,
            "failures": failures[:10],
            "alone": len(lone),
            "working_set_bytes": _working_set_bytes(answered),
            "observed_over_predicted_ttft": observed_s / sum(t.predicted_s for t in answered),
        },
        "minutes": by_minute(turns, samples, run_s, **usual),
    }


def _working_set_bytes(turns: Sequence[Turn]) -> int:
    """Return the KV of all sessions at one time: of as many mean prompts."""
    mean_tokens = sum(turn.prompt_tokens for turn in turns) / len(turns)
    return round(SESSIONS * mean_tokens * LARGE_KV.kv_bytes_per_token)


def table(figures: dict[str, Any]) -> str:
    """Return the comparisons and what does not hold, as text for a terminal."""
    head = f"{'':<24}{'when':<8}{'replica':<10}{'measured':>16}{'outside':>16}"
    lines = [f"{head}  {'unit':<9}{'ratio':>6}"]
    for each in figures["compared"]:
        lines.append(
            f"{each['what']:<24}{each['when']:<8}{each['replica']:<10}{each['measured']:>16,.0f}"
            f"{each['outside']:>16,.0f}  {each['unit']:<9}{each['ratio']:>6.2f}"
        )
    for name in ("drift", "computed_tokens"):
        lines.append("")
        for each in figures[name]:
            lines.append(
                f"{each['what']:<42}{each['first']:>16,.0f}{each['last']:>16,.0f}"
                f"{each['ratio']:>17.2f}"
                + (f"  (the machine: {each['outside']:.2f})" if each["outside"] else "")
            )
    lines += ["", *(f"NOT SO: {each}" for each in figures["faults"])]
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.replica.rates",
        description="Compare the rates that real replicas measure with a clock outside them.",
    )
    parser.add_argument(
        "--minutes", type=positive, default=20, help="of the run (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=positive, default=8, help="of probes, before and after it")
    parser.add_argument("--seed", type=int, default=1, help="which texts (default: %(default)s)")
    parser.add_argument(
        "--work", type=Path, metavar="DIRECTORY", help="keep model, logs and turns there"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    arguments = parser.parse_args(argv)
    if arguments.rounds < _FEWEST_ROUNDS:
        parser.error(f"--rounds: at least {_FEWEST_ROUNDS}: fewer steps are not reported as rates")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; return 0 if every rate is right and stays so."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = _arguments(given)
    try:
        told = [f"--{name}={getattr(arguments, name)}" for name in ("minutes", "rounds", "seed")]
        made = origin("bench.replica.rates", told, arguments.json)
        figures = run(arguments)
    except FAILURES as error:
        say(f"{shlex.join(['bench.replica.rates', *given])} failed: {error}")
        return 2
    except KeyboardInterrupt:
        say("Interrupted; everything that was started has been ended.")
        return 130
    print(table(figures))
    if arguments.json:
        what = "measured rates against an outside clock, real vLLM replicas on CPUs"
        write_report(arguments.json, {"what": what, **made, **figures})
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
