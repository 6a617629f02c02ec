"""One measurement from start to end: rounds, in each every situation once, in turns."""

import asyncio
import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import aiohttp
import orjson

from bench.decode_cost.decodes import Decodes
from bench.decode_cost.figures import Delay, Window, difference
from bench.decode_cost.peer import own_keys
from bench.decode_cost.pressure import Chunks, Pressure, Situation
from bench.decode_cost.probe import LOCKS, SAMPLE, SAMPLES, STEPS
from bench.decode_cost.replicas import Replicas, Vllm, running
from bench.stress.inside.lock import Durations
from bench.ttft import BenchError
from cacheengine.keys import HashScheme, chunk_keys

_TOKEN_IDS: Final = (100, 4000)
_WRITTEN_S: Final = 3.0
"""After the end of a window, until all that was measured in it is in the files."""
_LOCK_PARTS: Final = ("held", "computed", "waited", "waited_by_main")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    rounds: int = 6
    seconds: float = 8.0
    """Of a situation in a round, measured."""
    settling_s: float = 2.0
    """Before that, not measured."""
    streams: int = 4
    """Answers that are decoded at the same time."""
    chunks: int = 4
    """That are moved at once, again and again."""
    kv_bytes_per_token: int = 131_072
    """8,192 for a small model; this is that of a model of 8 billion parameters."""
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class _Span:
    """A window before its samples are read."""

    situation: Situation
    round: int
    from_s: float
    to_s: float
    moved_bytes: int
    failures: int
    decodes: Decodes


def measure(settings: Settings, work: Path, say: Callable[[str], None]) -> list[Window]:
    """Start all, run the rounds; raise `BenchError` and what `running` raises."""
    chunks = {"chunks": settings.chunks, "kv_bytes_per_token": settings.kv_bytes_per_token}
    with running(work, **chunks) as replicas:
        return asyncio.run(_measure(settings, replicas, say))


async def _measure(
    settings: Settings, replicas: Replicas, say: Callable[[str], None]
) -> list[Window]:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20) as session:
        pressure = await _prepare(settings, replicas, session)
        order, spans = random.Random(settings.seed), []
        for number in range(settings.rounds):
            for situation in order.sample(list(Situation), len(Situation)):
                span = await _window(settings, replicas, pressure, situation, number)
                say(
                    f"round {number + 1}: {situation}, {span.moved_bytes / 1e9:.2f} GB moved, "
                    f"{len(span.decodes.gaps)} tokens, {span.failures} turns failed"
                )
                spans.append(span)
        await asyncio.sleep(_WRITTEN_S)
    return _read(spans, replicas)


async def _prepare(
    settings: Settings, replicas: Replicas, session: aiohttp.ClientSession
) -> Pressure:
    """Have the replica compute what is to be moved, and wait until it is in all tiers."""
    info, rng = replicas.info, random.Random(settings.seed)
    prompts = [
        [rng.randrange(*_TOKEN_IDS) for _ in range(settings.chunks * info["chunk_tokens"] + 1)]
        for _ in range(2)
    ]
    on_disk, in_store = (_keys(info, tokens) for tokens in prompts)
    chunks = Chunks(on_disk=on_disk, in_store=in_store, at_peer=own_keys(settings.chunks))
    pressure = Pressure(session, replicas.place, replicas.peer, chunks)
    for tokens, keys in zip(prompts, (on_disk, in_store), strict=True):
        body = {"model": replicas.model, "prompt": tokens, "max_tokens": 1}
        async with session.post(f"{replicas.ours.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise BenchError(f"{response.status}: {await response.text()}")
        await pressure.until_held(keys, ("disk", "remote"))
    return pressure


def _keys(info: dict[str, object], tokens: Sequence[int]) -> list[bytes]:
    scheme = HashScheme(str(info["hash_algorithm"]), str(info["hash_seed"]))
    block_tokens, chunk_tokens = int(str(info["block_tokens"])), int(str(info["chunk_tokens"]))
    return chunk_keys(scheme.chain(tokens, block_tokens), chunk_tokens // block_tokens)


async def _window(
    settings: Settings,
    replicas: Replicas,
    pressure: Pressure,
    situation: Situation,
    number: int,
) -> _Span:
    url = replicas.plain.url if situation is Situation.PLAIN else replicas.ours.url
    decodes = Decodes(pressure.session, url, replicas.model, settings.streams)
    tasks = [asyncio.create_task(decodes.run()), asyncio.create_task(pressure.run(situation))]
    try:
        await _pass(settings.settling_s, tasks)
        moved_bytes, failures = await pressure.moved_bytes(situation), len(pressure.failures)
        from_s = time.monotonic()
        await _pass(settings.seconds, tasks)
        to_s = time.monotonic()
        return _Span(
            situation=situation,
            round=number,
            from_s=from_s,
            to_s=to_s,
            moved_bytes=await pressure.moved_bytes(situation) - moved_bytes,
            failures=len(pressure.failures) - failures,
            decodes=decodes,
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass(seconds: float, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait; raise what a task has raised meanwhile."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()
    if len(done) == len(tasks):
        raise BenchError("the decodes have ended")


# --- what vLLM's own process has measured ---


def _read(spans: Sequence[_Span], replicas: Replicas) -> list[Window]:
    delays = {each.url: _delays(each) for each in (replicas.plain, replicas.ours)}
    steps = {each.url: _steps(each) for each in (replicas.plain, replicas.ours)}
    locks = _locks(replicas.ours)
    found = []
    for span in spans:
        is_plain = span.situation is Situation.PLAIN
        url = replicas.plain.url if is_plain else replicas.ours.url
        window = Window(
            situation=span.situation,
            round=span.round,
            seconds=span.to_s - span.from_s,
            gaps_s=[gap_s for at_s, gap_s in span.decodes.gaps if span.from_s <= at_s < span.to_s],
            steps_s=[gap_s for at_s, gap_s in steps[url] if span.from_s <= at_s < span.to_s],
            delays=[delay for at_s, delay in delays[url] if span.from_s <= at_s < span.to_s],
            moved_bytes=span.moved_bytes,
            failures=span.failures,
            lock={} if is_plain else _of_span(locks, span),
        )
        if not window.gaps_s or not window.steps_s or not window.delays:
            raise BenchError(f"{span.situation}: no tokens, or nothing from vLLM's process")
        found.append(window)
    return found


def _delays(vllm: Vllm) -> list[tuple[float, Delay]]:
    try:
        told = (vllm.probe / SAMPLES).read_bytes()
    except FileNotFoundError:
        raise BenchError("vLLM's engine core has measured nothing: was it started?") from None
    whole = len(told) // SAMPLE.size * SAMPLE.size
    return [
        (at_s, Delay(late_s=late_s, without_core_s=core_s))
        for at_s, late_s, core_s in SAMPLE.iter_unpack(told[:whole])
    ]


def _steps(vllm: Vllm) -> list[tuple[float, float]]:
    """Return when each step has ended, and how long after the one before."""
    told = (vllm.probe / STEPS).read_bytes()
    ends = array("d", told[: len(told) // 8 * 8])
    return [(after_s, after_s - before_s) for before_s, after_s in pairwise(ends)]


def _locks(vllm: Vllm) -> list[tuple[float, dict[str, Durations]]]:
    lines = (vllm.probe / LOCKS).read_bytes().splitlines()
    told = [orjson.loads(line) for line in lines]
    return [
        (each["at_s"], {part: Durations.from_json(each[part]) for part in _LOCK_PARTS})
        for each in told
    ]


def _of_span(
    locks: Sequence[tuple[float, dict[str, Durations]]], span: _Span
) -> dict[str, Durations]:
    """Return what came between the readings next to a window's beginning and end."""
    within = [durations for at_s, durations in locks if span.from_s <= at_s < span.to_s]
    if not within:
        raise BenchError("the engine's lock was not measured")
    return {part: difference(within[-1][part], within[0][part]) for part in _LOCK_PARTS}
