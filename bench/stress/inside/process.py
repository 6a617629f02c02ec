"""An engine's process: `python -m bench.stress.inside.process '{...}'`, without vLLM.

Says a line of JSON when it serves, one every second, and one at its end. A line on its standard
input, "end", has it finish its requests, wait for what is under way, and look at what is left; it
ends at once when that input closes, so that none outlives the driver.
"""

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from bench.stress.inside.lock import MeasuredLock, measure_lock
from bench.stress.inside.scheduler import Scheduler
from cacheengine.agent import Agent
from cacheengine.engine import CacheEngine
from cacheengine.identity import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.record import EventLog, TransferMeter
from cacheengine.settings import EngineConfig
from cacheengine.transfer import TransferServer
from warmroute_common.agent_protocol import ReplicaIdentity
from warmroute_common.keys import DEFAULT_SEED

_HOST: Final = "127.0.0.1"
_GB: Final = 1024**3
_TOKENS: Final = 256
_STEP_S: Final = 0.005
_TELL_S: Final = 1.0
_TRIM_S: Final = 5.0
_EVENTS: Final = 2048
_QUIET_S: Final = 60.0
_POLL_S: Final = 0.1
_M_ARENA_MAX: Final = -8
"""Of the C library's ``malloc.h``."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What an engine's process is told at its start."""

    name: str
    seed: str
    agent_port: int
    transfer_port: int
    redis_port: int
    directory: str
    """Of its disk tier."""
    slots: int
    disk_chunks: int
    chunk_bytes: int
    conversations: int
    longest_chunks: int
    requests_per_s: float


@dataclass(frozen=True, kw_only=True)
class Left:
    """What is left when all requests have ended."""

    slots: int
    reserved_slots: int
    """Slots that a store of new chunks got: what is neither free nor to be evicted is missing."""
    held_bytes: int
    put_queue_bytes: int
    error: str
    """How the engine's state contradicts itself; "" if it does not."""


def _config(told: Told) -> EngineConfig:
    # A file takes a page more than its chunk.
    disk_bytes = told.disk_chunks * (told.chunk_bytes + 4096)
    return EngineConfig(
        chunk_size=_TOKENS,
        max_local_cpu_size=told.slots * told.chunk_bytes / _GB,
        local_disk=(Path(told.directory),),
        max_local_disk_size=disk_bytes / _GB,
        remote_url=f"redis://{_HOST}:{told.redis_port}",
        lmcache_instance_id=told.name,
        lmcache_worker_port=told.agent_port,
        agent_host=_HOST,
        distributed_url=f"{_HOST}:{told.transfer_port}",
    )


def _layout(told: Told) -> ChunkLayout:
    return ChunkLayout(
        model="stress",
        dtype="bfloat16",
        block_tokens=_TOKENS,
        chunk_tokens=_TOKENS,
        chunk_bytes=told.chunk_bytes,
    )


def _identity(told: Told) -> ReplicaIdentity:
    return ReplicaIdentity(
        instance_id=told.name,
        model="stress",
        hash_algorithm="sha256",
        hash_seed=DEFAULT_SEED,
        block_tokens=_TOKENS,
        chunk_tokens=_TOKENS,
        chunk_bytes=told.chunk_bytes,
        transfer_port=told.transfer_port,
    )


def _open(told: Told, undo: ExitStack) -> tuple[CacheEngine, MeasuredLock, TransferMeter]:
    config = _config(told)
    engine = CacheEngine(config, _layout(told), Pool.allocate(told.slots, told.chunk_bytes))
    undo.callback(engine.close, drain_s=1.0)
    lock = measure_lock(engine)
    _keep_few_events(engine)
    meter = TransferMeter()
    server = TransferServer(engine, (_HOST, told.transfer_port), meter)
    undo.callback(server.stop)
    server.start()
    agent = Agent(engine, _identity(told), config, meter)
    undo.callback(agent.stop)
    agent.start()
    return engine, lock, meter


def _keep_few_events(engine: CacheEngine) -> None:
    """Bound the log of events, so that it is full when memory is first looked at."""
    decider = engine._decider
    decider.events = decider.state.events = EventLog(_EVENTS)


def main() -> None:
    """Serve until told to end."""
    keep_one_stock()
    told = Told(**orjson.loads(sys.argv[1]))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's to handle
    with ExitStack() as undo:
        engine, lock, meter = _open(told, undo)
        scheduler = Scheduler(
            engine,
            seed=told.seed,
            conversations=told.conversations,
            longest_chunks=told.longest_chunks,
            requests_per_step=told.requests_per_s * _STEP_S,
        )
        ending = threading.Event()
        threading.Thread(target=_listen, args=(ending,), daemon=True).start()
        gc.collect()
        gc.freeze()  # as vLLM does
        threading.Thread(target=_trim, daemon=True).start()
        report = _Reports(engine, scheduler, lock, meter)
        report.tell()
        _run(scheduler, report, ending)
        report.tell()
        # What looks at all that is left holds the lock for long, as nothing does in service.
        _say({"left": asdict(_what_is_left(engine, told.slots))})


def _listen(ending: threading.Event) -> None:
    for line in sys.stdin:
        if line.strip() == "end":
            ending.set()
    os._exit(0)


def keep_one_stock() -> None:
    """Have the C library keep what is free in one stock for all threads; before there are any.

    Else each thread has one of its own, whose end `give_back` does not reach: after one block of
    megabytes was freed up to twice as much stays there, of every thread, and is no use of memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc alone has all of this
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Have the C library give back what it keeps free."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _trim() -> None:
    """Give back again and again: the stock grows for many minutes else, and hides a leak."""
    while True:
        give_back()
        time.sleep(_TRIM_S)


class _Reports:
    """What the driver is told, a line at a time."""

    def __init__(
        self, engine: CacheEngine, scheduler: Scheduler, lock: MeasuredLock, meter: TransferMeter
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._lock = lock
        self._meter = meter
        self._due_s = 0.0

    def tell_if_due(self) -> None:
        """Say a line if the last one is a second old."""
        if time.monotonic() >= self._due_s:
            self.tell()

    def tell(self) -> None:
        """Say a line now."""
        self._due_s = time.monotonic() + _TELL_S
        _say(
            {
                "counts": asdict(self._scheduler.counts),
                "lock": self._lock.to_json(),
                "engine": asdict(self._engine.stats()),
                "transfer": asdict(self._meter.stats()),
            }
        )


def _say(line: Mapping[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(line, option=orjson.OPT_NON_STR_KEYS) + b"\n")
    sys.stdout.buffer.flush()


def _run(scheduler: Scheduler, report: _Reports, ending: threading.Event) -> None:
    wrong = 0
    while scheduler.is_admitting or not scheduler.is_idle:
        due_s = time.monotonic() + _STEP_S
        scheduler.step()
        if scheduler.counts.wrong_chunks > wrong:  # not to be lost if it is killed now
            wrong = scheduler.counts.wrong_chunks
            report.tell()
        report.tell_if_due()
        scheduler.is_admitting = not ending.is_set()
        time.sleep(max(0.0, due_s - time.monotonic()))


def _what_is_left(engine: CacheEngine, slots: int) -> Left:
    """Wait for what is under way to end, then for all pins; say what has not."""
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
    return Left(
        slots=slots,
        reserved_slots=len(reserved),
        held_bytes=stats.cpu_held_bytes,
        put_queue_bytes=stats.put_queue_bytes,
        error=error,
    )


if __name__ == "__main__":
    main()
