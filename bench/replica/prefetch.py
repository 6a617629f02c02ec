"""What prefetch is worth, for a session whose prefix lies on disk alone.

A real replica and three routers before it: one with all prefetch (the
session's next request starts it when it is accepted, before its tokens are
known), one that prefetches only before it forwards, one without. The request
comes while the replica is idle, while it decodes for others, and behind a
prompt that is being computed. The files' pages are dropped from the page cache
each time, and the routers take turns, so that all see the same machine.

Without prefetch the engine promotes what vLLM's lookup finds on disk, while
the request waits. What prefetch can save is therefore the part of the read
that overlaps what the request waits for anyway: with the KV of a real model
(``--kv-bytes-per-token 131072``) a read takes about a second.

    python -m bench.replica.prefetch --kv-bytes-per-token 131072 --rounds 9

Takes memory for three times the prefix's KV, disk for as much, and with 8,000
tokens of that model about 10 minutes for 9 rounds.
"""

import argparse
import secrets
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import openai

from bench.command import positive, write_report
from bench.replica.demo_report import known_to_router
from bench.replica.local import CannotStartError
from bench.replica.model import LARGE_KV, SHAPES
from bench.replica.prefetch_report import STATES, Sample, is_in_time, report, table
from bench.replica.prefetch_stage import (
    CONTEXT_TOKENS,
    QUEUE_TOKENS,
    VARIANTS,
    Sizes,
    Stage,
    explain,
    start,
)
from bench.replica.text import real_text
from bench.replica.tiers import NotThereError, common_prefix, metric, wait_until
from bench.ttft import COLD_QUESTION, WARM_QUESTION, Answer, BenchError, ask
from router.launch.processes import ChildFailedError, ProcessGroup

_WORK: Final = Path(".warmroute/prefetch")
_SESSION: Final = "reader"
_DECODES: Final = 4
_DECODED_PROMPT_TOKENS: Final = 200
_DECODED_TOKENS: Final = 1_000
"""More than can come until the load is taken away."""
_SPARE_TOKENS: Final = 512
"""For the chat template, the question and the answer."""
_STORED_S: Final = 300.0


def say(text: str) -> None:
    """Tell how far it is; the table alone goes to stdout."""
    print(text, file=sys.stderr, flush=True)


class Reader:
    """A session that asks about one long text again and again, by one router or the other."""

    def __init__(self, stage: Stage, *, tokens: int, seed: int) -> None:
        self._stage = stage
        text = real_text(tokens, seed=seed, count=lambda text: len(_tokens(stage, text)))
        self._warm_prompt = f"{text}\n\n{WARM_QUESTION}"
        cold_prompt = f"{text}\n\n{COLD_QUESTION}"
        warm_tokens = stage.replica.chat_tokens(self._warm_prompt)
        shared = common_prefix(stage.replica.chat_tokens(cold_prompt), warm_tokens)
        self._shared = warm_tokens[:shared]
        self._cold_prompt = cold_prompt

    def compute(self) -> None:
        """Ask each router once, so that each knows the session; the first time computes it all."""
        for name in self._stage.routers:
            answer = self._ask(name, self._cold_prompt)
            say(f"{name}: {answer.ttft_s:.2f} s for {answer.prompt_tokens} tokens")
            self._stage.replica.wait_stored(self._shared, "cpu", timeout_s=_STORED_S)

    def leave_on_disk(self) -> None:
        """Have the prefix on disk alone, out of the page cache, and the routers know it."""
        replica = self._stage.replica
        replica.wait_idle()
        replica.empty_gpu()
        replica.leave_on_disk(self._shared)
        for name, url in self._stage.routers.items():
            wait_until(f"{name}: knows the prefix to be on disk", partial(self._knows, url))

    def measure(self, number: int, state: str, variant: str, seed: int) -> Sample:
        """Ask by one router while the replica is in a state."""
        self.leave_on_disk()
        replica = self._stage.replica
        read_before, looked_up_before_s = replica.disk_read_bytes(), replica.looked_up_s()
        with _others(self._stage, variant, state, seed) as before_it:
            answer = self._ask(variant, self._warm_prompt)
        return Sample(
            round=number,
            replica_is=state,
            prefetch=variant,
            ttft_s=answer.ttft_s,
            held_s=float(answer.headers["x-warmroute-held-ms"]) / 1000,
            read_bytes=replica.disk_read_bytes() - read_before,
            looked_up_s=replica.looked_up_s() - looked_up_before_s,
            in_time=is_in_time(answer.headers),
            matched=known_to_router(answer),
            before_it_ttft_s=before_it.result().ttft_s if before_it else None,
        )

    def _knows(self, router_url: str) -> bool:
        matched = explain(self._stage, router_url, self._warm_prompt)["matched_tokens"]
        fastest = next((tier for tier in ("gpu", "cpu", "disk") if matched.get(tier)), None)
        chunk_tokens = self._stage.replica.chunk_tokens()
        return fastest == "disk" and sum(matched.values()) >= len(self._shared) - chunk_tokens

    def _ask(self, variant: str, prompt: str) -> Answer:
        with _client(self._stage, variant) as client:
            return ask(
                client, model=self._stage.model, content=prompt, max_tokens=1, session=_SESSION
            )


def _tokens(stage: Stage, text: str) -> list[int]:
    return stage.replica.chat_tokens(text)


def _client(stage: Stage, variant: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{stage.routers[variant]}/v1", api_key="none", timeout=900.0, max_retries=0
    )


@contextmanager
def _others(stage: Stage, variant: str, state: str, seed: int) -> Iterator["Future[Answer] | None"]:
    """Keep the replica in a state by requests of others, sent by the same router.

    Yields the answer to the prompt that is being computed, where there is one.
    """
    if state == "decoding":
        with _decoding(stage, variant, seed):
            yield None
    elif state == "queue":
        with ThreadPoolExecutor(max_workers=1) as threads, _client(stage, variant) as client:
            content = real_text(QUEUE_TOKENS, seed=seed)
            before_it = threads.submit(
                ask, client, model=stage.model, content=content, max_tokens=1
            )
            # A replica counts as running what it told of, at the end of a step: too late.
            wait_until("a prompt is sent", lambda: _in_flight(stage.routers[variant]) > 0)
            yield before_it
    else:
        yield None


def _in_flight(router_url: str) -> float:
    return metric(router_url, "warmroute_in_flight")


@contextmanager
def _decoding(stage: Stage, variant: str, seed: int) -> Iterator[None]:
    done = threading.Event()

    def decode(number: int) -> None:
        text = real_text(_DECODED_PROMPT_TOKENS, seed=1000 * seed + number)
        with (
            _client(stage, variant) as client,
            client.completions.create(
                model=stage.model,
                prompt=text,
                max_tokens=_DECODED_TOKENS,
                stream=True,
                extra_body={"ignore_eos": True},
            ) as stream,
        ):
            # Leaving the block closes the connection, and vLLM stops.
            for _ in stream:
                if done.is_set():
                    return

    with ThreadPoolExecutor(max_workers=_DECODES) as threads:
        load = [threads.submit(decode, number) for number in range(_DECODES)]
        try:
            stage.replica.wait_running(_DECODES)
            yield
        finally:
            done.set()
        for each in load:
            each.result()


def run(arguments: argparse.Namespace, sizes: Sizes, work: Path) -> list[Sample]:
    """Start, measure and end everything; raise what stood in the way."""
    samples: list[Sample] = []
    with ProcessGroup() as group:
        say(f"starting a replica and {len(VARIANTS)} routers; logs in {work}")
        stage = start(group, work, sizes)
        reader = Reader(stage, tokens=arguments.tokens, seed=arguments.seed)
        reader.compute()
        for number in range(-1, arguments.rounds):
            for state in STATES:
                for variant in _in_turn(number):
                    seed = arguments.seed + len(samples) + 1
                    sample = reader.measure(number, state, variant, seed)
                    say(
                        f"  {number:>3} {state:<10}{variant:<16}{sample.ttft_s:8.3f} s  "
                        f"held {sample.held_s:.3f} s  {sample.matched}"
                    )
                    samples.append(sample)
    # The first round has everything done once: rates are learned, code is warm.
    return [each for each in samples if each.round >= 0]


def _in_turn(number: int) -> list[str]:
    """Return the variants, each round beginning with another."""
    names = list(VARIANTS)
    first = number % len(names)
    return names[first:] + names[:first]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.replica.prefetch",
        description="Measure what prefetch saves on an idle, a decoding and a queued replica.",
    )
    parser.add_argument(
        "--kv-bytes-per-token",
        type=int,
        choices=SHAPES,
        default=LARGE_KV.kv_bytes_per_token,
        help="which small model (default: %(default)s)",
    )
    parser.add_argument("--tokens", type=positive, default=8_000, help="default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=9, help="default: %(default)s")
    parser.add_argument("--seed", type=int, help="which text (default: a new one each time)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there too")
    arguments = parser.parse_args(argv)
    if not 1024 <= arguments.tokens <= CONTEXT_TOKENS - _SPARE_TOKENS:
        parser.error(f"--tokens: from 1024 to {CONTEXT_TOKENS - _SPARE_TOKENS}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and return the exit code."""
    arguments = _arguments(argv)
    arguments.seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    sizes = Sizes(prefix_tokens=arguments.tokens, kv_bytes_per_token=arguments.kv_bytes_per_token)
    _WORK.mkdir(parents=True, exist_ok=True)
    try:
        samples = run(arguments, sizes, _WORK)
    except (
        ChildFailedError,
        CannotStartError,
        BenchError,
        NotThereError,
        OSError,
        ValueError,
    ) as error:
        say(f"\nFailed: {error}\nLogs are in {_WORK}.")
        return 1
    except KeyboardInterrupt:
        say("\nInterrupted; everything that was started has been ended.")
        return 130
    finally:
        shutil.rmtree(_WORK / "disk", ignore_errors=True)
    print(table(samples))
    if arguments.json:
        write_report(arguments.json, report(arguments, sizes, samples))
    return 0


if __name__ == "__main__":
    sys.exit(main())
