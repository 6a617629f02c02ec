"""The soak of the cache engine: nothing may be wrong, lost or growing.

Four real engines with agent and transfer server, each a process, with disks of their own and one
store: Redis, its replica and a Sentinel. In each process a scheduler makes the calls of vLLM's
connector and compares every byte that it loads. Calls of routers and operators (prefetch, copy,
move, pin, clear) come at random, and every few seconds there is an `EngineFault`. The CPU pools
outlive their processes.

The holds of the engines' locks are measured by the clock and by the holder's CPU time. Where fewer
cores are free than processes want, the clock also counts the time for which the holder did not
run. A hold whose CPU time is as long as its time by the clock is the engine's own work. A hold
with little CPU time has waited for a core, for the interpreter's lock (GIL), which a thread
releases after 5 ms, or for something else, which is a defect. Run it on an idle machine, with a
core for each engine.
"""

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.soak.controls import Controls
from bench.soak.engine_process import ProcessConfig
from bench.soak.engines import (
    CHUNK_BYTES,
    SMALL_DISK_BYTES,
    Engine,
    EngineFault,
    KilledStarts,
    damage_files,
    engine_faults,
    engine_name,
    fill_disk,
    free_disk,
)
from bench.soak.failover_store import STORE_BYTES, FailoverStore
from bench.soak.harness import (
    Fault,
    LongRun,
    Result,
    Sample,
    Verdict,
    at_least_one,
    bad_lines,
    due,
    none_of,
    of_processes,
    samples_json,
    stopped,
)
from bench.soak.measured_lock import Durations, Holds, LongHolds
from bench.soak.scheduler import LATEST_S, LONGEST_CHUNKS
from cacheengine.launch.vllm_launch import free_ports

_FLIPPED_FILES: Final = 200
_FLIPPED_VALUES: Final = 100
_POLL_S: Final = 0.5
_BREAKS_COPIES: Final = (EngineFault.KILL, EngineFault.HANG)
_COPIES_FLOW_S: Final = 0.1
"""The longest time between the start of copies from an engine and its fault."""
_MOST_HELD_NS: Final = 1_000_000
_HELD_SHARE: Final = 0.999
_SETTLING_S: Final = 300.0
"""How long the memory of a new process may grow, however short the run is. Its tables are full
after two minutes, of 3 to 4 MB of Python's objects, and what is allocated is flat from then on. But
keys that stay lie among objects that come and go. So the allocators' free memory, which no trim
returns, grows for some minutes more: by 1 to 2 MB, in a process of 48."""
_SETTLED_S: Final = 60.0
"""A process must live this long after settling before its memory is judged."""
_SHOWN_CALLS: Final = 20


@dataclass(frozen=True, kw_only=True)
class EngineSoak(LongRun):
    """Cache engines, their disks and their Redis. Raises ValueError for impossible settings."""

    minutes: float = 20.0
    engines: int = 4
    seed: int = 1
    fault_every_s: float = 8.0
    fault_length: float = 1.0
    """Of usual faults; less in short runs."""
    slots: int = 2048
    """Size of each engine's pool."""
    disk_chunks: int = 3000
    """That each disk tier may hold."""
    conversations: int = 120
    """Prompts are prefixes of these. They are more than the pool and the disk of an engine hold,
    and few enough to fill its tables soon after a clear. A tier is cleared at random, twice a
    minute: if tables took minutes to fill, memory would depend on the time of the last clear."""
    requests_per_s: float = 10.0
    """Size of each engine's disk."""
    controls_per_s: float = 8.0
    """Calls of routers and operators, to all engines together."""

    def __post_init__(self) -> None:
        if self.engines < 2:
            raise ValueError("--engines must be 2 or more: chunks are copied between engines")


async def soak_engine(settings: EngineSoak, directory: Path, say: Callable[[str], None]) -> Result:
    """Run a soak, its logs and disks in ``directory``; raise `BenchError` where it cannot."""
    stage = _Stage(settings, directory, say)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(stage.close)
        await asyncio.gather(stage.store.start(), stage.starts.open())
        await asyncio.gather(*(each.start() for each in stage.engines))
        session = await undo.enter_async_context(aiohttp.ClientSession())
        controls = Controls(
            stage.engines,
            session,
            seed=settings.seed,
            conversations=settings.conversations,
            per_s=settings.controls_per_s,
        )
        await _run(settings, stage, controls)
        await controls.unpin_all()
        await asyncio.gather(*(each.end() for each in stage.engines))
        stage.look_at_memory()
        return _result(settings, stage, controls)


class _Stage:
    """The engines and the store, and the faults that are injected into them."""

    def __init__(self, settings: EngineSoak, directory: Path, say: Callable[[str], None]) -> None:
        ports = free_ports(2 * settings.engines + 3)
        self._say = say
        self._rng = random.Random(f"damage {settings.seed}")
        self.store = FailoverStore((ports.pop(), ports.pop(), ports.pop()), directory)
        self.starts = KilledStarts(settings.slots, directory)
        self._pools = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.engines = [
            Engine(
                self._config(settings, directory, number, ports), directory, small_disk=number == 0
            )
            for number in range(settings.engines)
        ]
        self.faults: Counter[EngineFault] = Counter()
        self.damaged: Counter[EngineFault] = Counter()
        self.ended: set[str] = set()
        """Processes that ended by themselves."""

    def _config(
        self, settings: EngineSoak, directory: Path, number: int, ports: Sequence[int]
    ) -> ProcessConfig:
        name = engine_name(number)
        disk = directory / name
        disk.mkdir()
        return ProcessConfig(
            name=name,
            seed=str(settings.seed),
            agent_port=ports[2 * number],
            transfer_port=ports[2 * number + 1],
            remote_url=self.store.url,
            directory=str(disk),
            keep=str(Path(self._pools.name, name)),
            slots=settings.slots,
            disk_chunks=settings.disk_chunks,
            chunk_bytes=CHUNK_BYTES,
            conversations=settings.conversations,
            longest_chunks=LONGEST_CHUNKS,
            requests_per_s=settings.requests_per_s,
        )

    async def close(self) -> None:
        """End all processes."""
        self.store.kill()
        await self.starts.close()
        for each in self.engines:
            if each.lives:
                await each.kill()
        self._pools.cleanup()

    def look_at_memory(self) -> None:
        """Note files in memory that are not the engines' pools."""
        pools = {each.keep / "pool" for each in self.engines}
        found = {each for each in Path(self._pools.name).rglob("*") if each.is_file()}
        self.starts.leaked += sorted(str(each.name) for each in found - pools)

    async def inject(
        self, faults: Iterable[Fault[EngineFault]], controls: Controls, began_s: float
    ) -> None:
        """Inject one fault after the other."""
        async for fault in due(faults, began_s, self._say):
            engine = self.engines[fault.target]
            if fault.kind in _BREAKS_COPIES:
                controls.copy_from(engine)
                await asyncio.sleep(self._rng.uniform(0, _COPIES_FLOW_S))
            if fault.kind is EngineFault.DISK_FULL:
                # Chunks that replace others need no space.
                await controls.clear_disk(engine)
            await self._inject(fault, engine)
            self.faults[fault.kind] += 1

    async def _inject(self, fault: Fault[EngineFault], engine: Engine) -> None:
        match fault.kind:
            case EngineFault.KILL:
                await engine.kill()
                await asyncio.sleep(fault.lasts_s)
                await engine.start()
            case EngineFault.START_KILL:
                await engine.kill()
                for keep in (engine.keep, None):
                    await self.starts.kill_one(keep)
                await engine.start()
            case EngineFault.HANG:
                with stopped(engine.life.process.pid):
                    await asyncio.sleep(fault.lasts_s)
            case EngineFault.DISK_HANGS:
                await engine.hang_disk(fault.lasts_s)
            case EngineFault.DISK_FULL:
                fill_disk(engine.directory)
                try:
                    await asyncio.sleep(fault.lasts_s)
                finally:
                    free_disk(engine.directory)
            case EngineFault.DISK_BITS:
                files = damage_files(engine.directory, _FLIPPED_FILES, self._rng)
                self.damaged[fault.kind] += files
            case EngineFault.STORE_BITS:
                values = await self.store.flip_bits(_FLIPPED_VALUES, self._rng)
                self.damaged[fault.kind] += values
            case _:
                await self._inject_into_store(fault)

    async def _inject_into_store(self, fault: Fault[EngineFault]) -> None:
        match fault.kind:
            case EngineFault.STORE_KILL:
                self.store.kill_servers()
                await asyncio.sleep(fault.lasts_s)
                await self.store.restart()
            case EngineFault.STORE_HANG:
                with stopped(self.store.pid):
                    await asyncio.sleep(fault.lasts_s)
            case EngineFault.STORE_FLAPS:
                await self.store.flap(fault.lasts_s)
            case EngineFault.STORE_FAILOVER:
                await self.store.fail_over(lasts_s=fault.lasts_s, kills=True)
            case EngineFault.STORE_MOVES:
                await self.store.fail_over(lasts_s=fault.lasts_s, kills=False)
            case _:
                raise AssertionError(fault.kind)

    async def watch(self, injecting: asyncio.Task[None], until_s: float) -> None:
        """Return at the end of the time and of the last fault, or when a process ends by itself."""
        while not self.ended and (time.monotonic() < until_s or not injecting.done()):
            if injecting.done():
                injecting.result()
            for each in self.engines:
                if each.has_ended_by_itself():
                    code = each.life.process.returncode
                    self.ended.add(f"{each.life.name}, with code {code}")
            await asyncio.sleep(_POLL_S)


async def _run(settings: EngineSoak, stage: _Stage, controls: Controls) -> None:
    began_s = time.monotonic()
    faults = engine_faults(
        seed=settings.seed,
        duration_s=settings.duration_s,
        engines=settings.engines,
        every_s=settings.fault_every_s,
        length=settings.fault_length,
    )
    calling = asyncio.create_task(controls.run())
    injecting = asyncio.create_task(stage.inject(faults, controls, began_s))
    try:
        await stage.watch(injecting, began_s + settings.duration_s)
    finally:
        for each in (calling, injecting):
            each.cancel()
        ended = await asyncio.gather(calling, injecting, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


# --- Verdicts ---


def of_bytes(counts: Mapping[str, int]) -> list[Verdict]:
    """Return the verdicts on what was loaded: sums of `scheduler.Counts`."""
    wrong = counts["wrong_chunks"]
    return [
        Verdict(what="no wrong byte loaded", holds=not wrong, found=f"{wrong} wrong chunks"),
        at_least_one("chunks loaded and compared", counts["loaded_chunks"]),
        at_least_one("of these promoted for their request", counts["promoted_chunks"]),
    ]


def of_waits(counts: Iterable[Mapping[str, int]]) -> list[Verdict]:
    """Return the verdicts on the waits of requests: the `scheduler.Counts` of each process."""
    all_counts = [*counts]
    late = sum(each["late_waits"] for each in all_counts)
    latest_ms = max((each["latest_ms"] for each in all_counts), default=0)
    return [
        at_least_one("requests that waited for chunks", sum(each["waits"] for each in all_counts)),
        Verdict(
            what=f"no request waited longer than computing it plus {LATEST_S:g} s",
            holds=not late,
            found=f"{late} did; the latest: {latest_ms} ms longer than computing it",
        ),
    ]


def of_paths(
    engine: Mapping[str, Any], transfer: Mapping[str, int], disk: Mapping[str, int]
) -> list[Verdict]:
    """Return whether every path was taken: sums of the processes' counters."""
    local, remote = engine["disk"], engine["remote"]
    paths = {
        "chunks read from disk": local["gets"],
        "chunks read from the store": remote["gets"],
        "damaged chunks found on disk": local["corrupt"],
        "damaged chunks found in the store": remote["corrupt"],
        "operations on a disk that hung": disk["hung"],
        "calls of the store that failed": remote["io_errors"] + remote["unanswered"],
        "chunks copied between engines": transfer["received_chunks"],
        "copies between engines that broke off": transfer["moves_failed"],
        "evictions": engine["evictions"],
    }
    return [at_least_one(what, count) for what, count in paths.items()]


def of_faults(
    injected: Mapping[EngineFault, int], damaged: Mapping[EngineFault, int]
) -> list[Verdict]:
    """Return whether each kind of fault was injected, and whether bits were flipped."""
    never = [kind.value for kind in EngineFault if not injected.get(kind)]
    found = ", ".join(f"never: {each}" for each in never) or f"{sum(injected.values())} times"
    return [
        Verdict(what="every kind of fault was injected", holds=not never, found=found),
        *(
            at_least_one(f"{kind} somewhere", damaged.get(kind, 0))
            for kind in (EngineFault.DISK_BITS, EngineFault.STORE_BITS)
        ),
    ]


def of_slots(left: Mapping[str, Mapping[str, Any] | None]) -> list[Verdict]:
    """Return the verdicts on the engines' final states."""
    found = []
    for name, each in left.items():
        bad = "no final state was reported" if each is None else _leaked(each)
        text = bad or f"a store got all {each['slots'] if each else 0} slots"
        found.append(Verdict(what=f"no slot or pin of {name} leaked", holds=not bad, found=text))
    return found


def _leaked(left: Mapping[str, Any]) -> str:
    missing = left["slots"] - left["reserved_slots"]
    bad = {
        f"{missing} slots neither free nor evictable": missing,
        f"{left['held_bytes']} bytes held": left["held_bytes"],
        f"{left['put_queue_bytes']} bytes still to be put": left["put_queue_bytes"],
        str(left["error"]): left["error"],
    }
    return "; ".join(what for what, is_so in bad.items() if is_so)


def of_locks(holds: Holds) -> list[Verdict]:
    """Return the verdicts on the holds, by the clock and by the holder's CPU time."""
    count = holds.held.counts.total()
    longest = holds.by_call.get(holds.longest_call, LongHolds())
    return [
        at_least_one("holds of the engines' locks", count),
        _of_holds("by the clock", holds.held, f", by {holds.longest_call}"),
        _of_holds("of the holder's CPU time", holds.computed, ""),
        Verdict(
            what="calls that held a lock for more than a millisecond (reported, not judged)",
            holds=True,
            found=f"{sum(each.count for each in holds.by_call.values())} of {count} holds; "
            f"the longest computed for {longest.cpu_ns / 1e6:.2f} ms of its time",
        ),
    ]


def _of_holds(of_what: str, durations: Durations, by: str) -> Verdict:
    p50, p99, p999 = (durations.quantile_ns(share) for share in (0.5, 0.99, _HELD_SHARE))
    return Verdict(
        what=f"a hold takes less than 1 ms at p99.9, {of_what}",
        holds=durations.counts.total() > 0 and p999 < _MOST_HELD_NS,
        found=f"p50 {p50 / 1e3:.1f} us, p99 {p99 / 1e3:.0f} us, p99.9 {p999 / 1e3:.0f} us, "
        f"longest {durations.longest_ns / 1e6:.2f} ms{by}",
    )


def of_memory(lives: Mapping[str, Sequence[Sample]], duration_s: float) -> list[Verdict]:
    """Return the verdicts on the processes that lived long enough to judge their memory."""
    least_s = _SETTLING_S + _SETTLED_S
    if duration_s < least_s:
        found = f"the run has less than {least_s / 60:.0f} minutes"
        return [Verdict(what="memory (not judged)", holds=True, found=found)]
    judged = {
        name: samples for name, samples in lives.items() if samples and samples[-1].at_s >= least_s
    }
    return [
        at_least_one("processes that lived long enough to judge their memory", len(judged)),
        *of_processes(judged, _SETTLING_S),
    ]


def of_ends(
    ended: Collection[str], failures: Sequence[str], bad_lines: Sequence[str]
) -> list[Verdict]:
    """Return the verdicts on processes that ended by themselves, status 500, and logs."""
    return [
        none_of("no engines that ended by themselves", sorted(ended)),
        none_of("no answers 500 of an agent", failures),
        none_of("no tracebacks in the engines' logs", bad_lines),
    ]


def total(counters: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of nested counters; values that are not numbers are left out."""
    sums: dict[str, Any] = {}
    for each in counters:
        for name, value in each.items():
            if isinstance(value, Mapping):
                sums[name] = total([sums.get(name, {}), value])
            elif isinstance(value, int | float):
                sums[name] = sums.get(name, 0) + value
    return sums


# --- Result ---


def _result(settings: EngineSoak, stage: _Stage, controls: Controls) -> Result:
    lives = [life for engine in stage.engines for life in engine.lives]
    counters = [life.counters for life in lives]
    holds = Holds()
    for each in counters:
        holds.add(each["lock"])
    counts = {
        name: total(each[name] for each in counters)
        for name in ("counts", "engine", "transfer", "disk")
    }
    counts["counts"]["latest_ms"] = max(each["counts"]["latest_ms"] for each in counters)
    logs = [log for engine in stage.engines for log in engine.logs]
    verdicts = [
        *of_bytes(counts["counts"]),
        *of_waits(each["counts"] for each in counters),
        none_of("no leaked shared memory", stage.starts.leaked),
        *of_slots({engine.name: engine.life.left for engine in stage.engines}),
        *of_locks(holds),
        *of_memory({life.name: life.samples for life in lives}, settings.duration_s),
        *of_ends(stage.ended, controls.failures, bad_lines(logs)),
        *of_faults(stage.faults, stage.damaged),
        *of_paths(counts["engine"], counts["transfer"], counts["disk"]),
    ]
    wrong = [line for each in counters for line in each["counts"]["wrong"]]
    calls, answers = _calls(holds), sorted(controls.answers.items())
    processes = {
        life.name: {
            "cpu_s": round(sum(life.watch.cpu_s.values()), 1),
            "samples": samples_json(life.samples),
        }
        for life in lives
    }
    report = {
        "what": "faulty engines, disks and store: wrong bytes, leaks, long holds",
        **{each.name: getattr(settings, each.name) for each in fields(settings)},
        "chunk_bytes": CHUNK_BYTES,
        "store_bytes": STORE_BYTES,
        "small_disk_bytes": SMALL_DISK_BYTES,
        "faults": {kind.value: count for kind, count in stage.faults.items()},
        "damaged": {kind.value: count for kind, count in stage.damaged.items()},
        "lock": {
            "held": _durations(holds.held),
            "of_it_computed": _durations(holds.computed),
            "waited_for_by_the_scheduler": _durations(holds.waited_by_main),
            "waited_for_by_others": _durations(holds.waited),
            "calls": calls,
        },
        "counts": counts,
        "calls_of_agents": [
            {"call": what, "ended": end, "count": count} for (what, end), count in answers
        ],
        "wrong": wrong,
        "processes": processes,
    }
    lines = [
        *(
            f"{each['longest_ms']:>8.2f} ms, {each['of_it_cpu_ms']:.2f} ms of it computed: "
            f"longest hold by {each['call']}; {each['over_1_ms']} over 1 ms"
            for each in calls
        ),
        *(f"{name}: CPU {each['cpu_s']:.0f} s" for name, each in processes.items()),
        *(f"{counts[name]}" for name in ("counts", "transfer")),
        *(f"{count:>7} {what}: {end}" for (what, end), count in answers),
        *wrong,
    ]
    return Result(verdicts=verdicts, report=report, lines=lines)


def _durations(durations: Durations) -> dict[str, Any]:
    shares = {"p50_us": 0.5, "p99_us": 0.99, "p99.9_us": 0.999}
    return {
        "count": durations.counts.total(),
        **{name: round(durations.quantile_ns(each) / 1e3, 1) for name, each in shares.items()},
        "longest_us": round(durations.longest_ns / 1e3, 1),
    }


def _calls(holds: Holds) -> list[dict[str, Any]]:
    """Return the calls that held a lock longest, the longest first."""
    longest = sorted(holds.by_call.items(), key=lambda each: -each[1].longest_ns)
    return [
        {
            "call": call,
            "over_1_ms": each.count,
            "longest_ms": round(each.longest_ns / 1e6, 3),
            "of_it_cpu_ms": round(each.cpu_ns / 1e6, 3),
        }
        for call, each in longest[:_SHOWN_CALLS]
    ]
