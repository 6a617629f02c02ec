"""An engine's process: `python -m bench.soak.engine_process '{...}'`, without vLLM.

It writes a line of JSON when it serves, every second, and at its end. On its standard input the
line "hang" makes its disk hang, and "work" ends that. The line "end" makes it finish its requests,
wait for running reads and writes, and report its final state. It exits at once when that input
closes, so that it never outlives the driver.
"""

import ctypes
import gc
import logging
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from bench.soak.measured_lock import MeasuredLock, measure_lock
from bench.soak.scheduler import Scheduler
from cacheengine.agent.agent import Agent
from cacheengine.engine.engine import CacheEngine
from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.kept_pool import PoolSeals, open_pool_file
from cacheengine.memory import Pool
from cacheengine.record import EventLog, TransferMeter
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.transfer.transfer_server import TransferServer
from warmroute_common.agent_protocol import ReplicaIdentity
from warmroute_common.keys import DEFAULT_SEED

_HOST: Final = "127.0.0.1"
_GB: Final = 1024**3
_TOKENS: Final = 256
_STEP_S: Final = 0.005
_REPORT_EVERY_S: Final = 1.0
_TRIM_S: Final = 5.0
_EVENTS: Final = 2048
_QUIET_S: Final = 60.0
_POLL_S: Final = 0.1
_FILE_EVENTS: Final = ("open", "os.rename", "os.remove", "os.mkdir", "os.scandir")
"""Of Python's audit events."""
_M_ARENA_MAX: Final = -8
"""Constant of the C library's ``malloc.h``."""


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """What an engine's process gets at its start, as JSON."""

    name: str
    seed: str
    agent_port: int
    transfer_port: int
    remote_url: str
    directory: str
    """Of its disk tier."""
    keep: str
    """Directory of its CPU pool, which outlives it."""
    slots: int
    disk_chunks: int
    chunk_bytes: int
    conversations: int
    longest_chunks: int
    requests_per_s: float


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What an engine holds when all requests have ended."""

    slots: int
    reserved_slots: int
    """Slots that a store of new chunks got: the free and the evictable ones."""
    held_bytes: int
    put_queue_bytes: int
    error: str
    """How the engine's state contradicts itself; "" if it does not."""


def _config(config: ProcessConfig) -> EngineConfig:
    # A file takes a page more than its chunk.
    disk_bytes = config.disk_chunks * (config.chunk_bytes + 4096)
    return EngineConfig(
        chunk_size=_TOKENS,
        max_local_cpu_size=config.slots * config.chunk_bytes / _GB,
        local_disk=(Path(config.directory),),
        max_local_disk_size=disk_bytes / _GB,
        remote_url=config.remote_url,
        lmcache_instance_id=config.name,
        lmcache_worker_port=config.agent_port,
        agent_host=_HOST,
        distributed_url=f"{_HOST}:{config.transfer_port}",
    )


def _layout(config: ProcessConfig) -> ChunkLayout:
    return ChunkLayout(
        model="stress",
        dtype="bfloat16",
        block_tokens=_TOKENS,
        chunk_tokens=_TOKENS,
        chunk_bytes=config.chunk_bytes,
    )


def _identity(config: ProcessConfig) -> ReplicaIdentity:
    return ReplicaIdentity(
        instance_id=config.name,
        model="stress",
        hash_algorithm="sha256",
        hash_seed=DEFAULT_SEED,
        block_tokens=_TOKENS,
        chunk_tokens=_TOKENS,
        chunk_bytes=config.chunk_bytes,
        transfer_port=config.transfer_port,
    )


def _open(given: ProcessConfig, undo: ExitStack) -> tuple[CacheEngine, MeasuredLock, TransferMeter]:
    config = _config(given)
    layout, size_bytes = _layout(given), given.slots * given.chunk_bytes
    file = open_pool_file(Path(given.keep), size_bytes + PoolSeals.size_bytes(given.slots))
    memory = memoryview(mmap.mmap(file, 0))
    os.close(file)
    seals = PoolSeals(memory[size_bytes:], layout.fingerprint(), given.slots)
    pool = Pool(memory[:size_bytes], given.slots, given.chunk_bytes)
    engine = CacheEngine(config, layout, pool, seals=seals)
    undo.callback(engine.close, drain_s=1.0)
    lock = measure_lock(engine)
    _keep_few_events(engine)
    engine.start_keeping()
    meter = TransferMeter()
    server = TransferServer(engine, (_HOST, given.transfer_port), meter)
    undo.callback(server.stop)
    server.start()
    agent = Agent(engine, _identity(given), config, meter)
    undo.callback(agent.stop)
    agent.start()
    return engine, lock, meter


def _keep_few_events(engine: CacheEngine) -> None:
    """Bound the log of events, so that it is full when memory is first looked at."""
    decider = engine._decider
    decider.events = decider.state.events = EventLog(_EVENTS)


def main() -> None:
    """Serve until the line "end" comes."""
    use_one_malloc_arena()
    config = ProcessConfig(**orjson.loads(sys.argv[1]))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles it
    disk = HangingDisk(config.directory)
    with ExitStack() as undo:
        engine, lock, meter = _open(config, undo)
        scheduler = Scheduler(
            engine,
            seed=config.seed,
            conversations=config.conversations,
            longest_chunks=config.longest_chunks,
            requests_per_step=config.requests_per_s * _STEP_S,
        )
        signal.signal(signal.SIGCONT, lambda number, frame: scheduler.note_stopped())
        ending = threading.Event()
        threading.Thread(target=_listen, args=(disk, ending), daemon=True).start()
        gc.collect()
        gc.freeze()  # as vLLM does
        threading.Thread(target=_trim, daemon=True).start()
        reporter = _Reporter(engine, scheduler, lock, meter, disk)
        reporter.report()
        _run(scheduler, reporter, ending)
        reporter.report()
        # This holds the lock for long, as no call does in service: it is not measured.
        _write({"left": asdict(_final_state(engine, config.slots))})


def _listen(disk: "HangingDisk", ending: threading.Event) -> None:
    for line in sys.stdin:
        match line.strip():
            case "hang":
                disk.works.clear()
            case "work":
                disk.works.set()
            case "end":
                ending.set()
    os._exit(0)


class HangingDisk:
    """Makes what this process does to the files of a directory wait, unless the disk ``works``.

    The thread waits where Python is about to make the system call, as it would in the kernel for a
    device or a file server that does not answer.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.works = threading.Event()
        self.works.set()
        self.hung = 0
        """Operations that have waited."""
        sys.addaudithook(self._wait)
        # These raise no audit events: they get a descriptor.
        os.preadv, os.pwritev = self._waiting(os.preadv), self._waiting(os.pwritev)

    def _waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(fd: int, *arguments: Any) -> Any:
            if not self.works.is_set():
                self._wait("open", (Path(f"/proc/self/fd/{fd}").readlink(),))
            return call(fd, *arguments)

        return waiting

    def _wait(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.works.is_set() or event not in _FILE_EVENTS:
            return
        if str(arguments[0]).startswith(self._directory):
            self.hung += 1
            self.works.wait()


def use_one_malloc_arena() -> None:
    """Make the C library use one arena for all threads. Call it before there are threads.

    By default each thread has an arena, and `trim_malloc` does not reach its end: after a block of
    megabytes was freed, up to twice as much stays in each arena, and would count as growth.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc alone has all of this
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def trim_malloc() -> None:
    """Make the C library return its free memory to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _trim() -> None:
    """Trim every few seconds: the free memory would otherwise grow for minutes, and hide a leak."""
    while True:
        trim_malloc()
        time.sleep(_TRIM_S)


class _Reporter:
    """Writes the counters to the driver, one line at a time."""

    def __init__(
        self,
        engine: CacheEngine,
        scheduler: Scheduler,
        lock: MeasuredLock,
        meter: TransferMeter,
        disk: HangingDisk,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._lock = lock
        self._meter = meter
        self._disk = disk
        self._due_s = 0.0

    def report_if_due(self) -> None:
        """Write a line if the last one is a second old."""
        if time.monotonic() >= self._due_s:
            self.report()

    def report(self) -> None:
        """Write a line now."""
        self._due_s = time.monotonic() + _REPORT_EVERY_S
        _write(
            {
                "counts": asdict(self._scheduler.counts),
                "lock": self._lock.to_json(),
                "engine": asdict(self._engine.stats()),
                "transfer": asdict(self._meter.stats()),
                "disk": {"hung": self._disk.hung},
            }
        )


def _write(line: Mapping[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(line, option=orjson.OPT_NON_STR_KEYS) + b"\n")
    sys.stdout.buffer.flush()


def _run(scheduler: Scheduler, reporter: _Reporter, ending: threading.Event) -> None:
    wrong = 0
    while scheduler.is_admitting or not scheduler.is_idle:
        due_s = time.monotonic() + _STEP_S
        scheduler.step()
        if scheduler.counts.wrong_chunks > wrong:  # report it before the process may be killed
            wrong = scheduler.counts.wrong_chunks
            reporter.report()
        reporter.report_if_due()
        scheduler.is_admitting = not ending.is_set()
        time.sleep(max(0.0, due_s - time.monotonic()))


def _final_state(engine: CacheEngine, slots: int) -> EngineState:
    """Wait for running reads, writes and pins to end; return what is left after a minute."""
    until_s = time.monotonic() + _QUIET_S
    while True:
        stats = engine.stats()
        if not stats.cpu_held_bytes and not stats.put_queue_bytes:
            break
        if time.monotonic() > until_s:
            break
        time.sleep(_POLL_S)
    error = ""
    try:
        engine.check()
    except AssertionError as found:
        where = traceback.extract_tb(found.__traceback__)[-1]
        error = f"its state contradicts itself: {found or where.line} ({where.name})"
    new = [b"%032d" % number for number in range(slots)]
    reservation = engine.prepare_store(new)
    reserved = () if reservation is None else reservation.keys
    engine.complete_store(reserved, success=False)
    return EngineState(
        slots=slots,
        reserved_slots=len(reserved),
        held_bytes=stats.cpu_held_bytes,
        put_queue_bytes=stats.put_queue_bytes,
        error=error,
    )


if __name__ == "__main__":
    main()
