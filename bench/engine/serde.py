"""How much each serde saves, what it costs, and what the lossy one does to answers.

Three sorts of KV: the small model's, read from a real replica's disk tier (its
weights are random, and its KV is close to normal noise); normal noise; and
made-up KV with the structure of trained models' (`bench.engine.kv` says which).

Speeds are bytes of KV by processor time of the calling thread, which is the
only one that works: what one core does. A serde pays while a network is so
slow that the bytes saved take longer than the work. For loads, one chunk at
a time on one core: below decode speed x (1 - 1 / ratio). With other chunks
decoded while one travels: below decode speed x cores.

    python -m bench.engine.serde --rounds 9 --json bench/results/serde.json
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import zstandard

from bench.command import write_report
from bench.engine.kv import (
    KvShape,
    StoredChunks,
    as_bfloat16,
    as_float16,
    gaussian_kv,
    structured_kv,
)
from bench.engine.serde_effect import Effect, EffectReplica, compare
from bench.replica.local import CannotStartError
from bench.replica.model import make_model
from bench.replica.tiers import NotThereError
from bench.ttft import BenchError, machine
from cacheengine.tiers.serde.base import Serde
from cacheengine.tiers.serde.cachegen import DEFAULT_STEPS, CacheGenSerde
from cacheengine.tiers.serde.configured import make_serde
from cacheengine.tiers.serde.floats import FLOAT_FORMATS
from router.launch.processes import ChildFailedError, ProcessGroup

_STEPS: Final = (127, 31, 15, 7)
_CHUNKS: Final = 4
"""Of each prompt."""
_MEASURED_CHUNKS: Final = 4
"""Of the real KV."""


@dataclass(frozen=True, kw_only=True)
class Kv:
    """Some chunks of one sort."""

    name: str
    dtype: str
    chunks: Sequence[bytes]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One serde on KV of one sort."""

    kv: str
    dtype: str
    serde: str
    ratio: float
    """Bytes of KV for one encoded byte."""
    encode_gb_per_s: float
    decode_gb_per_s: float
    pays_below_gb_per_s: float
    """Network speed, for loads, nothing overlapped, one core."""
    max_error: float
    """Of an element, as a share of its group's largest magnitude."""
    error_bound: float
    """What the serde promises of it."""
    rms_error: float
    """Root mean square of the errors as a share of that of the KV."""


class Zstd(Serde):
    """For comparison: zstd over the chunk as it lies."""

    is_exact = True

    def __init__(self, level: int) -> None:
        self.name = f"(zstd {level})"
        self._level = level

    def encode(self, payload: memoryview) -> Sequence[bytes]:
        """Compress."""
        return [zstandard.ZstdCompressor(level=self._level).compress(payload)]

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """Decompress."""
        into[:] = zstandard.ZstdDecompressor().decompress(encoded)


def serdes_for(dtype: str) -> list[Serde]:
    """Return what is compared; names in parentheses are no serdes of ours."""
    lossy = []
    for steps in _STEPS:
        serde = CacheGenSerde(dtype, steps)
        serde.name += f", {steps} steps" + (" (default)" if steps == DEFAULT_STEPS else "")
        lossy.append(serde)
    exact = [make_serde(name, dtype) for name in ("naive", "lossless")]
    return [*exact, *lossy, Zstd(1), Zstd(3)]


def measure(
    kv: Kv, serde: Serde, *, rounds: int, clock: Callable[[], float] = time.thread_time
) -> Result:
    """Encode and decode all chunks so many times; speeds are those of the median round."""
    into = memoryview(bytearray(len(kv.chunks[0])))
    encode_s, decode_s = [], []
    for _ in range(rounds):
        encode_s.append(0.0)
        decode_s.append(0.0)
        encoded_bytes = 0
        for chunk in kv.chunks:
            began_s = clock()
            parts = serde.encode(memoryview(chunk))
            encode_s[-1] += clock() - began_s
            encoded = memoryview(b"".join(parts))
            encoded_bytes += len(encoded)
            began_s = clock()
            serde.decode(encoded, into)
            decode_s[-1] += clock() - began_s
    kv_bytes = sum(map(len, kv.chunks))
    ratio = kv_bytes / encoded_bytes
    decode_gb_per_s = kv_bytes / 1e9 / max(1e-9, statistics.median(decode_s))
    max_error, rms_error = errors(kv, serde)
    return Result(
        kv=kv.name,
        dtype=kv.dtype,
        serde=serde.name,
        ratio=ratio,
        encode_gb_per_s=kv_bytes / 1e9 / max(1e-9, statistics.median(encode_s)),
        decode_gb_per_s=decode_gb_per_s,
        pays_below_gb_per_s=max(0.0, 1 - 1 / ratio) * decode_gb_per_s,
        max_error=max_error,
        error_bound=serde.max_error if isinstance(serde, CacheGenSerde) else 0.0,
        rms_error=rms_error,
    )


def errors(kv: Kv, serde: Serde) -> tuple[float, float]:
    """Return the largest error by its group's largest magnitude, and the RMS by that of the KV."""
    form = FLOAT_FORMATS[kv.dtype]
    largest, squares, error_squares = 0.0, 0.0, 0.0
    for chunk in kv.chunks:
        before, after = (
            form.to_floats(np.frombuffer(each, form.word_type)).astype(np.float64)
            for each in (chunk, round_trip(serde, chunk))
        )
        differences = np.abs(after - before).reshape(-1, 64).max(axis=1)
        magnitudes = np.abs(before).reshape(-1, 64).max(axis=1)
        shares = differences[magnitudes > 0] / magnitudes[magnitudes > 0]
        largest = max(largest, float(shares.max(initial=0)))
        squares += float((before**2).sum())
        error_squares += float(((after - before) ** 2).sum())
    return largest, math.sqrt(error_squares / squares)


def round_trip(serde: Serde, content: bytes) -> bytes:
    """Return what a chunk is after it has been encoded and decoded."""
    into = bytearray(len(content))
    serde.decode(memoryview(b"".join(serde.encode(memoryview(content)))), memoryview(into))
    return bytes(into)


def made_up(shape: KvShape) -> list[Kv]:
    """Return the KV that no model made, one chunk of each sort."""
    noise, structured = gaussian_kv(shape, seed=1), structured_kv(shape, seed=1)
    return [
        Kv(name="normal noise", dtype="bfloat16", chunks=[as_bfloat16(noise)]),
        Kv(name="structured", dtype="bfloat16", chunks=[as_bfloat16(structured)]),
        Kv(name="structured", dtype="float16", chunks=[as_float16(structured)]),
    ]


def effects(
    replica: EffectReplica, serdes: Sequence[Serde], *, prompts: int, positions: int, seed: int
) -> tuple[Kv, dict[str, Effect]]:
    """Return the real KV, and how answers change by each serde and by no cache at all."""
    replica.start()
    texts = replica.prompts(prompts, seed)
    continuations = [said[:positions] for said in replica.compute(texts)]
    chunk_bytes = replica.chunk_bytes()
    replica.stop()
    stored = StoredChunks(replica.disk, chunk_bytes)
    chunks = stored.read()
    replica.start()
    reference = replica.answer(texts, continuations)
    # Last on this replica: it fills the tiers with what is never asked for again.
    found = {"no cache": compare(reference, replica.answer(texts, continuations, from_cache=False))}
    replica.stop()
    for serde in serdes:
        say(f"answers after {serde.name}")
        stored.rewrite({key: round_trip(serde, content) for key, content in chunks.items()})
        replica.start()
        found[serde.name] = compare(reference, replica.answer(texts, continuations))
        replica.stop()
    real = list(chunks.values())[:_MEASURED_CHUNKS]
    return Kv(name="small model's", dtype="bfloat16", chunks=real), found


def table(results: Sequence[Result], effect: dict[str, Effect]) -> str:
    """Return all figures for reading."""
    lines = []
    for kv, dtype in dict.fromkeys((each.kv, each.dtype) for each in results):
        lines += ["", f"{kv} KV, {dtype}"]
        lines.append(
            f"  {'':<30}{'ratio':>7}{'encode':>9}{'decode':>9}{'pays below':>12}"
            f"{'max error':>11}{'bound':>8}{'rms':>8}"
        )
        lines += [
            f"  {each.serde:<30}{each.ratio:>7.2f}{each.encode_gb_per_s:>9.2f}"
            f"{each.decode_gb_per_s:>9.2f}{each.pays_below_gb_per_s:>7.2f} GB/s"
            f"{each.max_error:>11.4f}{each.error_bound:>8.4f}{each.rms_error:>8.4f}"
            for each in results
            if (each.kv, each.dtype) == (kv, dtype)
        ]
    lines += ["", "answers, compared with those from the untouched KV"]
    lines += [
        f"  {name:<30}same best token {each.same_best_token:>7.1%}"
        f"   logprobs differ by {each.mean_logprob_difference:.4f}"
        f" (at most {each.max_logprob_difference:.4f})"
        f"   says the same for {each.median_same_tokens:.0f} of 64 tokens"
        for name, each in effect.items()
    ]
    return "\n".join(lines)


def report(
    arguments: argparse.Namespace, results: Sequence[Result], effect: dict[str, Effect]
) -> dict[str, object]:
    """Return every figure with the command and the machine, ready for JSON."""
    options = ("rounds", "prompts", "positions", "seed")
    given = " ".join(f"--{name} {getattr(arguments, name)}" for name in options)
    return {
        "what": "ratio, speed on one core, error and effect on answers of the serdes",
        "command": f"python -m bench.engine.serde {given}",
        "machine": machine(),
        "kv": {
            "small model's": "of bench.replica.model, of random weights: close to normal noise",
            "normal noise": "independent, standard normal",
            "structured": "made up by bench.engine.kv.structured_kv; no model's",
        },
        "results": [asdict(each) for each in results],
        "answers_of": "bench.replica.model: what it predicts is nearly a tie between many tokens, "
        "so that errors change it more than they would change a trained model's",
        "answers": {name: asdict(each) for name, each in effect.items()},
    }


def run(arguments: argparse.Namespace) -> tuple[list[Result], dict[str, Effect]]:
    """Measure all that was asked for."""
    sorts = made_up(KvShape())
    effect: dict[str, Effect] = {}
    if arguments.prompts:
        exact, lossy = make_serde("lossless", "bfloat16"), serdes_for("bfloat16")[2:6]
        with tempfile.TemporaryDirectory() as work, ProcessGroup() as group:
            model = make_model(Path(work, "model"))
            replica = EffectReplica(group, model, Path(work), chunks=_CHUNKS)
            real, effect = effects(
                replica,
                [exact, *lossy],
                prompts=arguments.prompts,
                positions=arguments.positions,
                seed=arguments.seed,
            )
        sorts.insert(0, real)
    results = [
        measure(kv, serde, rounds=arguments.rounds)
        for kv in sorts
        for serde in serdes_for(kv.dtype)
    ]
    return results, effect


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, file=sys.stderr, flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.engine.serde",
        description="Compare how chunks can be written for the remote tier.",
    )
    parser.add_argument("--rounds", type=int, default=9, help="repetitions (default: %(default)s)")
    parser.add_argument(
        "--prompts", type=int, default=8, help="of the real replica; 0 starts none (default: 8)"
    )
    parser.add_argument("--positions", type=int, default=16, help="predictions of each prompt")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; return the exit code."""
    arguments = _arguments(argv)
    try:
        results, effect = run(arguments)
    except (ChildFailedError, CannotStartError, BenchError, NotThereError, OSError) as error:
        say(f"bench.engine.serde: {error}")
        return 1
    print(table(results, effect))
    if arguments.json:
        write_report(arguments.json, report(arguments, results, effect))
    return 0


if __name__ == "__main__":
    sys.exit(main())
