"""One measurement from start to end: rounds, in each every situation once, in turns."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from bench.decode_cost.cores import parted
from bench.decode_cost.decodes import Decodes
from bench.decode_cost.figures import Window
from bench.decode_cost.peer import AT_PEER, IN_STORE, ON_DISK, own_keys
from bench.decode_cost.pressure import Chunks, Pressure
from bench.decode_cost.replicas import Replicas, Vllm, running
from bench.decode_cost.samples import Span, read_windows
from bench.decode_cost.situations import Situation, Where, shuffled
from bench.ttft import BenchError
from warmroute_common.keys import HashScheme, chunk_keys

_TOKEN_IDS: Final = (100, 4000)
_WRITTEN_S: Final = 3.0
"""After the end of a window, until all that was measured in it is in the files."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    rounds: int = 4
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
        bench = _Bench(settings, replicas, session, await _prepare(settings, replicas, session))
        order, spans = random.Random(settings.seed), []
        for number in range(settings.rounds):
            for situation in shuffled(order):
                span = await bench.window(situation, number)
                say(
                    f"round {number + 1}: {situation}, {span.moved_bytes / 1e9:.2f} GB moved, "
                    f"{len(span.decodes.gaps)} tokens, {span.failures} turns failed"
                )
                spans.append(span)
        await asyncio.sleep(_WRITTEN_S)
    return read_windows(spans, replicas)


async def _prepare(
    settings: Settings, replicas: Replicas, session: aiohttp.ClientSession
) -> dict[Where, Pressure]:
    """Have the replica compute what is to be moved, and wait until it is in all tiers."""
    info, rng = replicas.info, random.Random(settings.seed)
    prompts = [
        [rng.randrange(*_TOKEN_IDS) for _ in range(settings.chunks * info["chunk_tokens"] + 1)]
        for _ in range(2)
    ]
    for tokens in prompts:
        body = {"model": replicas.model, "prompt": tokens, "max_tokens": 1}
        async with session.post(f"{replicas.ours.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise BenchError(f"{response.status}: {await response.text()}")
    computed = [_keys(info, tokens) for tokens in prompts]
    made_up = [own_keys(conversation, settings.chunks) for conversation in (ON_DISK, IN_STORE)]
    found = {}
    for where, place, (on_disk, in_store) in (
        (Where.INSIDE, replicas.inside, computed),
        (Where.OUTSIDE, replicas.outside, made_up),
    ):
        chunks = Chunks(
            on_disk=on_disk,
            in_store=in_store,
            at_peer=own_keys(AT_PEER, settings.chunks),
            chunk_bytes=info["chunk_bytes"],
        )
        found[where] = pressure = Pressure(session, place, replicas.peer, chunks)
        for keys in (on_disk, in_store):
            await pressure.until_held(keys, ("disk", "remote"))
    return found


def _keys(info: dict[str, object], tokens: Sequence[int]) -> list[bytes]:
    scheme = HashScheme(str(info["hash_algorithm"]), str(info["hash_seed"]))
    block_tokens, chunk_tokens = int(str(info["block_tokens"])), int(str(info["chunk_tokens"]))
    return chunk_keys(scheme.chain(tokens, block_tokens), chunk_tokens // block_tokens)


@dataclass(frozen=True)
class _Bench:
    """All that a window needs."""

    settings: Settings
    replicas: Replicas
    session: aiohttp.ClientSession
    pressures: dict[Where, Pressure]

    async def window(self, situation: Situation, number: int) -> Span:
        vllm = self.replicas.ours if situation.has_engine else self.replicas.plain
        with parted(vllm.engine_core()) if situation.is_parted else nullcontext():
            return await self._window(situation, number, vllm)

    async def _window(self, situation: Situation, number: int, vllm: Vllm) -> Span:
        decodes = Decodes(self.session, vllm.url, self.replicas.model, self.settings.streams)
        tasks = [asyncio.create_task(decodes.run()), *self._work(situation)]
        try:
            await _pass(self.settings.settling_s, tasks)
            moved_bytes, failures = await self._moved(situation)
            from_s = time.monotonic()
            await _pass(self.settings.seconds, tasks)
            to_s = time.monotonic()
            moved_after_bytes, failures_after = await self._moved(situation)
            return Span(
                situation=situation,
                round=number,
                from_s=from_s,
                to_s=to_s,
                moved_bytes=moved_after_bytes - moved_bytes,
                failures=failures_after - failures,
                decodes=decodes,
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _work(self, situation: Situation) -> list[asyncio.Task[None]]:
        if situation.work is None or situation.where is None or situation.pace is None:
            return []
        work = self.pressures[situation.where].run(situation.work, situation.pace)
        return [asyncio.create_task(work)]

    async def _moved(self, situation: Situation) -> tuple[int, int]:
        """Return the bytes that were moved, and the turns that failed, until now."""
        if situation.work is None or situation.where is None:
            return 0, 0
        pressure = self.pressures[situation.where]
        return await pressure.moved_bytes(situation.work), len(pressure.failures)


async def _pass(seconds: float, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait; raise what a task has raised meanwhile."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()
    if len(done) == len(tasks):
        raise BenchError("the decodes have ended")
