"""Time to first token of a long context, asked twice: cold, then warm.

Needs only the openai package and any server that speaks its API:

    python -m bench.ttft --base-url http://localhost:8080/v1 --tokens 15000 --rounds 5
    python bench/ttft.py --base-url http://localhost:8000/v1 --file book.txt

Every round begins its context with a line of its own, so the first request of
a round is cold whatever the server has cached. The second one asks another
question about the same context. TTFT is taken from sending a streamed request
to the first piece of its answer.
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import openai

COLD_QUESTION: Final = "What is the text above about?"
WARM_QUESTION: Final = "Name one thing that the text above says."
REPLICA_HEADER: Final = "x-warmroute-replica"
REASON_HEADER: Final = "x-warmroute-reason"

_CALIBRATION_CHARS: Final = 6_000


class BenchError(Exception):
    """Why nothing could be measured, in one line."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One streamed request."""

    ttft_s: float
    total_s: float
    prompt_tokens: int | None
    """As the server counted them, where it tells."""
    text: str
    cached_tokens: int | None = None
    """Prompt tokens that were not computed, if the server reports it."""
    headers: dict[str, str] = field(default_factory=dict)
    """The router's own (``x-warmroute-*``); empty without one."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The same context twice."""

    cold: Answer
    warm: Answer

    @property
    def saved_s(self) -> float:
        """How much earlier the second answer began."""
        return self.cold.ttft_s - self.warm.ttft_s

    @property
    def ratio(self) -> float:
        """The speed-up: cold over warm."""
        return self.cold.ttft_s / max(self.warm.ttft_s, 1e-9)


def ask(
    client: openai.OpenAI,
    *,
    model: str,
    content: str,
    max_tokens: int,
    session: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Send one streamed chat request and time its first piece of text.

    Raises `BenchError` when the server refuses it or answers nothing.
    """
    messages: Any = [{"role": "user", "content": content}]
    began_s = clock()
    first_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    pieces: list[str] = []
    try:
        with client.chat.completions.with_streaming_response.create(
            model=model,
            messages=messages,
            max_tokens=max_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-session-id": session} if session else None,
        ) as response:
            for chunk in _chunks(response.iter_lines()):
                piece = _text_of(chunk)
                if first_s is None and piece:
                    first_s = clock() - began_s
                pieces.append(piece)
                usage = chunk.get("usage") or {}
                prompt_tokens = usage.get("prompt_tokens") or prompt_tokens
                if details := usage.get("prompt_tokens_details"):
                    cached_tokens = details.get("cached_tokens")
            headers = {
                name.lower(): value
                for name, value in response.headers.items()
                if name.lower().startswith("x-warmroute-")
            }
    except openai.OpenAIError as error:
        raise BenchError(f"{client.base_url}: {error}") from error
    if first_s is None:
        raise BenchError(f"{client.base_url}: the answer was empty")
    return Answer(
        ttft_s=first_s,
        total_s=clock() - began_s,
        prompt_tokens=prompt_tokens,
        text="".join(pieces),
        cached_tokens=cached_tokens,
        headers=headers,
    )


def _chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a server-sent stream; raise `BenchError` for one that is an error."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            # Read on to the end: a client that leaves now counts as one that gave up.
            continue
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            raise BenchError(f"the server broke off the answer: {chunk['error']}")
        yield chunk


def _text_of(chunk: dict[str, Any]) -> str:
    """Return the text of a chunk: what is said, thought or asked of a tool."""
    choices: list[dict[str, Any]] = chunk.get("choices") or []
    delta: dict[str, Any] = choices[0].get("delta") or {} if choices else {}
    told = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return str(told or (json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else ""))


def run_round(
    client: openai.OpenAI, *, model: str, context: str, max_tokens: int, session: str | None
) -> Round:
    """Ask about a context that the server has never seen, then again."""
    unseen = f"Reading {uuid.uuid4().hex}.\n\n{context}"
    cold = ask(
        client,
        model=model,
        content=f"{unseen}\n\n{COLD_QUESTION}",
        max_tokens=max_tokens,
        session=session,
    )
    warm = ask(
        client,
        model=model,
        content=f"{unseen}\n\n{WARM_QUESTION}",
        max_tokens=max_tokens,
        session=session,
    )
    return Round(cold=cold, warm=warm)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def summarize(rounds: Sequence[Round]) -> dict[str, float]:
    """Return medians and 90th percentiles over the rounds, in seconds and as a ratio."""
    cold = [each.cold.ttft_s for each in rounds]
    warm = [each.warm.ttft_s for each in rounds]
    return {
        "cold_ttft_p50_s": statistics.median(cold),
        "cold_ttft_p90_s": percentile(cold, 0.9),
        "warm_ttft_p50_s": statistics.median(warm),
        "warm_ttft_p90_s": percentile(warm, 0.9),
        "saved_p50_s": statistics.median(each.saved_s for each in rounds),
        "ratio_p50": statistics.median(each.ratio for each in rounds),
    }


def table(rounds: Sequence[Round]) -> str:
    """Return rounds and summary as text for a terminal."""
    lines = [f"{'round':>7} {'tokens':>8} {'cold s':>9} {'warm s':>9} {'saved s':>9} {'ratio':>7}"]
    for number, each in enumerate(rounds, 1):
        tokens = each.cold.prompt_tokens
        lines.append(
            f"{number:>7} {tokens if tokens is not None else '?':>8} {each.cold.ttft_s:>9.3f} "
            f"{each.warm.ttft_s:>9.3f} {each.saved_s:>9.3f} {each.ratio:>7.1f}{_served(each)}"
        )
    means = summarize(rounds)
    lines.append(
        f"{'median':>7} {'':>8} {means['cold_ttft_p50_s']:>9.3f} {means['warm_ttft_p50_s']:>9.3f} "
        f"{means['saved_p50_s']:>9.3f} {means['ratio_p50']:>7.1f}"
    )
    lines.append(
        f"{'p90':>7} {'':>8} {means['cold_ttft_p90_s']:>9.3f} {means['warm_ttft_p90_s']:>9.3f}"
    )
    return "\n".join(lines)


def _served(each: Round) -> str:
    """Say which replicas answered, where a Warmroute router tells."""
    replica = each.warm.headers.get(REPLICA_HEADER)
    if replica is None:
        return ""
    first = each.cold.headers.get(REPLICA_HEADER)
    return f"  {first} -> {replica} ({each.warm.headers.get(REASON_HEADER, '?')})"


def fitted(client: openai.OpenAI, *, model: str, text: str, tokens: int) -> str:
    """Cut ``text`` to about ``tokens`` tokens, as the server counts them.

    Learns the tokenizer's yield from one small request. Returns the whole
    text, with a word on stderr, when it is shorter than that.
    """
    sample = text[:_CALIBRATION_CHARS]
    answer = ask(client, model=model, content=sample, max_tokens=1)
    chars_per_token = len(sample) / answer.prompt_tokens if answer.prompt_tokens else 4.0
    chars = round(tokens * chars_per_token)
    if chars > len(text):
        print(f"the text has only about {len(text) / chars_per_token:.0f} tokens", file=sys.stderr)
    return text[:chars]


def first_model(client: openai.OpenAI) -> str:
    """Return the first model that the server lists."""
    try:
        models = list(client.models.list())
    except openai.OpenAIError as error:
        raise BenchError(f"{client.base_url}: {error}") from error
    if not models:
        raise BenchError(f"{client.base_url}: lists no model; name one with --model")
    return str(models[0].id)


def machine() -> dict[str, object]:
    """Return what a figure must be read with: where, when and from which commit."""
    here = str(Path(__file__).parent)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", here, "describe", "--always", "--dirty"),
        "cpu": _cpu_model(),
        "gpu": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _own_text(path: Path | None, tokens: int) -> str:
    """Return the text to ask about: the user's file, or modules of the standard library."""
    if path is not None:
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise BenchError(f"--file: {error}") from None
    if __package__ in (None, ""):
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    # Only without --file: this script then works alone, away from its package.
    from bench.replica.text import real_text  # noqa: PLC0415

    return real_text(tokens * 2, seed=1)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.ttft",
        description="Time to first token of a long context, asked twice: cold, then warm.",
    )
    parser.add_argument(
        "--base-url",
        default="http://127.0.0.1:8080/v1",
        help="OpenAI-compatible server (default: %(default)s)",
    )
    parser.add_argument("--api-key", default="none", help="sent to the server")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--file", type=Path, help="your own text (default: Python's own sources)")
    parser.add_argument(
        "--tokens", type=int, default=15_000, help="length of the context (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=8, help="length of the answers")
    parser.add_argument(
        "--session", help="sent as x-session-id (default: none, the prefix itself decides)"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="of one request, in seconds")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there too")
    arguments = parser.parse_args(argv)
    for name in ("tokens", "rounds", "max_tokens"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    return arguments


def measure(arguments: argparse.Namespace) -> list[Round]:
    """Run all rounds, telling of each as it ends; raise `BenchError`."""
    client = openai.OpenAI(
        base_url=arguments.base_url,
        api_key=arguments.api_key,
        timeout=arguments.timeout,
        # A retry would be counted into the time of the answer.
        max_retries=0,
    )
    model = arguments.model or first_model(client)
    text = _own_text(arguments.file, arguments.tokens)
    context = fitted(client, model=model, text=text, tokens=arguments.tokens)
    rounds: list[Round] = []
    for number in range(1, arguments.rounds + 1):
        done = run_round(
            client,
            model=model,
            context=context,
            max_tokens=arguments.max_tokens,
            session=arguments.session,
        )
        rounds.append(done)
        print(
            f"round {number} of {arguments.rounds}: "
            f"cold {done.cold.ttft_s:.3f} s, warm {done.warm.ttft_s:.3f} s",
            file=sys.stderr,
        )
    return rounds


def report(arguments: argparse.Namespace, rounds: Sequence[Round]) -> dict[str, object]:
    """Return everything measured, ready for JSON."""
    settings = {"base_url": arguments.base_url, "model": arguments.model}
    settings |= {"tokens": arguments.tokens, "file": arguments.file and str(arguments.file)}
    each = [asdict(one) | {"saved_s": one.saved_s, "ratio": one.ratio} for one in rounds]
    return {
        "what": "time to first token of the same long context, cold and warm",
        "settings": settings,
        "machine": machine(),
        "summary": summarize(rounds),
        "rounds": each,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; return the exit code."""
    arguments = _arguments(argv)
    try:
        rounds = measure(arguments)
    except BenchError as error:
        print(f"bench.ttft: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(rounds))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report(arguments, rounds), indent=2) + "\n")
        print(f"written to {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
