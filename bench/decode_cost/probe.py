"""Inside vLLM's engine-core process: a thread that wakes every millisecond, steps, and the lock.

How late it wakes is what any thread of the process suffers, the scheduler's among them. The kernel
tells for how long the thread was ready and had no core (``/proc/thread-self/schedstat``); what is
left of the delay is the wait for the interpreter's lock (GIL), beside some 0.1 ms of timer.

A step's end, when the scheduler takes what the model has made, is when a token of each running
answer comes, before it goes through vLLM's other processes to its client.
"""

import functools
import itertools
import multiprocessing
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import orjson

DIRECTORY: Final = "WARMROUTE_PROBE"
"""Environment variable: where the samples are written."""
MEASURES_LOCK: Final = "WARMROUTE_PROBE_LOCK"
"""Environment variable: set where the engine's lock is to be measured."""
SAMPLES: Final = "probe.bin"
STEPS: Final = "steps.bin"
"""When each step has ended, and what its thread had computed and waited for a core by then."""
LOCKS: Final = "lock.jsonl"
PID: Final = "pid"
"""Of the engine core: its main thread, of the same number, computes the model where no GPU does."""
SAMPLE: Final = struct.Struct("<ddd")
"""When (of the monotonic clock), how late, and of that how long without a core; in seconds."""
STEP: Final = struct.Struct("<ddd")
"""The three, of the monotonic clock and since the thread's start; in seconds."""
_PERIOD_S: Final = 0.001
_WRITE_EVERY: Final = 1000
_SCHEDSTAT: Final = "/proc/thread-self/schedstat"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler"
_POLL_S: Final = 0.5
_IS_ENGINE_S: Final = 120.0
"""How long a process may take to say what it is."""


_of_thread = threading.local()


def begin() -> None:
    """Have this process measured if it turns out to be vLLM's engine core."""
    if DIRECTORY not in os.environ:
        return
    directory = Path(os.environ[DIRECTORY])
    if MEASURES_LOCK in os.environ:
        _measure_lock(directory)
    thread = threading.Thread(target=_probe_engine_core, args=(directory,), daemon=True)
    thread.start()


def _probe_engine_core(directory: Path) -> None:
    until_s = time.monotonic() + _IS_ENGINE_S
    while "EngineCore" not in multiprocessing.current_process().name:
        if time.monotonic() > until_s:
            return
        time.sleep(_POLL_S)
    (directory / PID).write_text(str(os.getpid()))
    steps = _note_steps()
    with (
        (directory / SAMPLES).open("ab", buffering=0) as file,
        (directory / STEPS).open("ab", buffering=0) as steps_file,
    ):
        _probe(file.fileno(), steps_file.fileno(), steps)


def _note_steps() -> bytearray:
    """Return what gets the time of each step's end from now on."""
    steps = bytearray()
    # Imported by vLLM when it needs it: before that there is no scheduler.
    while not hasattr(sys.modules.get(_SCHEDULER), "Scheduler"):
        time.sleep(_POLL_S)
    scheduler: Any = sys.modules[_SCHEDULER]
    take = scheduler.Scheduler.update_from_output

    @functools.wraps(take)
    def take_noted(*given: Any, **named: Any) -> Any:
        steps.extend(_step())
        return take(*given, **named)

    scheduler.Scheduler.update_from_output = take_noted
    return steps


def _probe(out: int, steps_out: int, steps: bytearray) -> None:
    schedstat = os.open(_SCHEDSTAT, os.O_RDONLY)
    due_s = time.monotonic()
    while True:
        samples = bytearray()
        for _ in range(_WRITE_EVERY):
            due_s = max(due_s, time.monotonic()) + _PERIOD_S
            without_core_s = _without_core_s(schedstat)
            time.sleep(max(0.0, due_s - time.monotonic()))
            now_s = time.monotonic()
            without_core_s = _without_core_s(schedstat) - without_core_s
            samples += SAMPLE.pack(now_s, now_s - due_s, without_core_s)
        os.write(out, samples)
        ended = bytes(steps)
        os.write(steps_out, ended)
        del steps[: len(ended)]


def _step() -> bytes:
    """Return what is noted of a step, on the thread that has made it."""
    schedstat: int | None = getattr(_of_thread, "schedstat", None)
    if schedstat is None:
        schedstat = _of_thread.schedstat = os.open(_SCHEDSTAT, os.O_RDONLY)
    return STEP.pack(time.monotonic(), time.thread_time(), _without_core_s(schedstat))


def _without_core_s(schedstat: int) -> float:
    """Return for how long this thread was ready to run and did not, since its start."""
    return int(os.pread(schedstat, 64, 0).split()[1]) / 1e9


def _measure_lock(directory: Path) -> None:
    """Have every engine of this process use a measured lock, and tell of it each second."""
    # Only where the engine is: vLLM without it is to be without it.
    from bench.stress.inside.lock import MeasuredLock, measure_lock  # noqa: PLC0415
    from cacheengine.engine.engine import CacheEngine  # noqa: PLC0415

    make = CacheEngine.__init__

    def tell(lock: MeasuredLock) -> None:
        with (directory / LOCKS).open("ab", buffering=0) as file:
            for _ in itertools.count():
                line = {"at_s": time.monotonic(), **lock.to_json()}
                file.write(orjson.dumps(line, option=orjson.OPT_NON_STR_KEYS) + b"\n")
                time.sleep(_POLL_S)

    def make_measured(self: CacheEngine, *given: object, **named: object) -> None:
        make(self, *given, **named)  # type: ignore[arg-type]  # whatever it takes
        threading.Thread(target=tell, args=(measure_lock(self),), daemon=True).start()

    CacheEngine.__init__ = make_measured  # type: ignore[method-assign]  # in this process alone
