"""One stress from start to end."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.soak.verdict import Verdict
from bench.stress import damage, verdict
from bench.stress.controls import Controls
from bench.stress.engines import Engine, Life
from bench.stress.inside.process import Told
from bench.stress.settings import CHUNK_BYTES, LONGEST_CHUNKS, Settings, engine_name
from bench.stress.store import Store
from bench.stress.troubles import Kind, Trouble, schedule
from cacheengine.launch.vllm_launch import free_ports

_FLIPPED_FILES: Final = 200
_FLIPPED_VALUES: Final = 100
_POLL_S: Final = 0.5
_BREAKS_COPIES: Final = (Kind.KILL, Kind.HANG)
_COPIES_FLOW_S: Final = 0.1
"""How long others have begun to copy from an engine, at most, before it is gone."""
_BAD_WORDS: Final = ("Traceback", " ERROR ", "Task exception", "never retrieved")


@dataclass(kw_only=True)
class Stressed:
    """What a stress has shown."""

    verdicts: list[Verdict]
    locks: verdict.Locks
    counts: dict[str, Any]
    """Sums over all processes: of requests, of the engines' and the transfers' counters."""
    answers: Counter[tuple[str, str]]
    troubles: Counter[Kind]
    damaged: Counter[Kind]
    lives: list[Life]
    wrong: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether all holds that must."""
        return all(each.holds for each in self.verdicts)


class _Stage:
    """Engines and store, and what happens to them."""

    def __init__(self, settings: Settings, directory: Path, say: Callable[[str], None]) -> None:
        ports = free_ports(2 * settings.engines + 1)
        self._settings = settings
        self._say = say
        self._rng = random.Random(f"damage {settings.seed}")
        self.store = Store(ports.pop(), directory)
        self.engines = [
            _engine(settings, directory, number, ports[2 * number : 2 * number + 2], self.store)
            for number in range(settings.engines)
        ]
        self.troubles: Counter[Kind] = Counter()
        self.damaged: Counter[Kind] = Counter()
        self.ended: set[str] = set()
        """Processes that ended by themselves."""

    async def close(self) -> None:
        """End all processes."""
        self.store.kill()
        for each in self.engines:
            if each.lives:
                await each.kill()

    async def disturb(
        self, troubles: Sequence[Trouble], controls: Controls, began_s: float
    ) -> None:
        """Bring each trouble about when it is due, or as soon as the one before is over."""
        for each in troubles:
            await asyncio.sleep(began_s + each.at_s - time.monotonic())
            engine = self.engines[each.engine]
            self._say(f"{each.at_s:6.0f} s: {each.kind} ({engine.name}, {each.lasts_s:.0f} s)")
            if each.kind in _BREAKS_COPIES:
                controls.copy_from(engine)
                await asyncio.sleep(self._rng.uniform(0, _COPIES_FLOW_S))
            await self._bring_about(each, engine)
            self.troubles[each.kind] += 1

    async def _bring_about(self, trouble: Trouble, engine: Engine) -> None:
        match trouble.kind:
            case Kind.KILL:
                await engine.kill()
                await asyncio.sleep(trouble.lasts_s)
                await engine.start()
            case Kind.HANG:
                with engine.hanging():
                    await asyncio.sleep(trouble.lasts_s)
            case Kind.STORE_KILL:
                self.store.kill()
                await asyncio.sleep(trouble.lasts_s)
                await self.store.start()
            case Kind.STORE_HANG:
                self.store.hang()
                try:
                    await asyncio.sleep(trouble.lasts_s)
                finally:
                    self.store.go_on()
            case Kind.STORE_FLAPS:
                await self.store.flap(trouble.lasts_s)
            case Kind.DISK_FULL:
                await self._with_full_disk(engine, trouble.lasts_s)
            case Kind.DISK_BITS:
                files = damage.flip_bits(engine.directory, _FLIPPED_FILES, self._rng)
                self.damaged[trouble.kind] += files
            case Kind.STORE_BITS:
                values = await self.store.flip_bits(_FLIPPED_VALUES, self._rng)
                self.damaged[trouble.kind] += values

    async def _with_full_disk(self, engine: Engine, lasts_s: float) -> None:
        damage.fill(engine.directory)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            damage.free(engine.directory)

    async def watch(self, disturbing: asyncio.Task[None], until_s: float) -> None:
        """Return when the time is over and the last trouble too, or a process ends by itself."""
        while not self.ended and (time.monotonic() < until_s or not disturbing.done()):
            if disturbing.done():
                disturbing.result()
            for each in self.engines:
                if each.has_ended_by_itself():
                    code = each.life.process.returncode
                    self.ended.add(f"{each.life.name}, with code {code}")
            await asyncio.sleep(_POLL_S)


def _engine(
    settings: Settings, directory: Path, number: int, ports: Sequence[int], store: Store
) -> Engine:
    name = engine_name(number)
    disk = directory / name
    disk.mkdir()
    told = Told(
        name=name,
        seed=str(settings.seed),
        agent_port=ports[0],
        transfer_port=ports[1],
        redis_port=store.port,
        directory=str(disk),
        slots=settings.slots,
        disk_chunks=settings.disk_chunks,
        chunk_bytes=CHUNK_BYTES,
        conversations=settings.conversations,
        longest_chunks=LONGEST_CHUNKS,
        requests_per_s=settings.requests_per_s,
    )
    return Engine(told, directory, small_disk=number == 0)


async def stress(settings: Settings, directory: Path, say: Callable[[str], None]) -> Stressed:
    """Run a stress, its logs and disks in ``directory``; raise `BenchError` where it cannot."""
    stage = _Stage(settings, directory, say)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(stage.close)
        await stage.store.start()
        await asyncio.gather(*(each.start() for each in stage.engines))
        session = await undo.enter_async_context(aiohttp.ClientSession())
        controls = Controls(stage.engines, settings, session)
        await _run(settings, stage, controls)
        await controls.unpin_all()
        await asyncio.gather(*(each.end() for each in stage.engines))
        return _stressed(settings, stage, controls)


async def _run(settings: Settings, stage: _Stage, controls: Controls) -> None:
    began_s = time.monotonic()
    troubles = schedule(
        seed=settings.seed,
        duration_s=settings.duration_s,
        engines=settings.engines,
        every_s=settings.trouble_every_s,
    )
    calling = asyncio.create_task(controls.run())
    disturbing = asyncio.create_task(stage.disturb(troubles, controls, began_s))
    try:
        await stage.watch(disturbing, began_s + settings.duration_s)
    finally:
        for each in (calling, disturbing):
            each.cancel()
        ended = await asyncio.gather(calling, disturbing, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


def _stressed(settings: Settings, stage: _Stage, controls: Controls) -> Stressed:
    lives = [life for engine in stage.engines for life in engine.lives]
    told = [life.told for life in lives]
    locks = verdict.Locks()
    for each in told:
        locks.add(each["lock"])
    counts = {
        name: verdict.total(each[name] for each in told)
        for name in ("counts", "engine", "transfer")
    }
    verdicts = [
        *verdict.of_bytes(counts["counts"]),
        *verdict.of_slots({engine.name: engine.life.left for engine in stage.engines}),
        *verdict.of_locks(locks),
        *verdict.of_memory({life.name: life.samples for life in lives}, settings.settling_s),
        *verdict.of_ends(stage.ended, controls.failures, _bad_lines(stage.engines)),
        *verdict.of_troubles(stage.troubles, stage.damaged),
        *verdict.of_ways(counts["engine"], counts["transfer"]),
    ]
    return Stressed(
        verdicts=verdicts,
        locks=locks,
        counts=counts,
        answers=controls.answers,
        troubles=stage.troubles,
        damaged=stage.damaged,
        lives=lives,
        wrong=[line for each in told for line in each["counts"]["wrong"]],
    )


def _bad_lines(engines: Sequence[Engine]) -> list[str]:
    return [
        f"{log.name}: {line}"
        for engine in engines
        for log in engine.logs
        for line in log.read_text(errors="replace").splitlines()
        if any(word in line for word in _BAD_WORDS)
    ]
