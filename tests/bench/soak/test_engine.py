"""The schedule, the measured lock, the process and the verdicts of the engine's soak."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import valkey
from hypothesis import given
from hypothesis import strategies as st

from bench.soak import engine as soak
from bench.soak.engine import EngineSoak
from bench.soak.engine_process import EngineState, HangingDisk
from bench.soak.engines import CHUNK_BYTES, SMALL_DISK_BYTES, EngineFault, engine_faults
from bench.soak.failover_store import STORE_BYTES, FailoverStore
from bench.soak.harness import Sample, Verdict
from bench.soak.measured_lock import Durations, Holds, MeasuredLock, bucket, measure_lock
from bench.soak.scheduler import LONGEST_CHUNKS, PAGE_BYTES, Scheduler, content, prefix_keys
from cacheengine.engine.engine import CacheEngine
from cacheengine.launch.vllm_launch import free_ports
from cacheengine.memory import Pool
from tests.cacheengine.helpers import CHUNK_BYTES as SMALL_CHUNK_BYTES
from tests.cacheengine.helpers import (
    Bench,
    FakeClock,
    ManualThreads,
    config,
    key,
    layout,
    wait_until,
)
from tests.cacheengine.scripted_tier import ScriptedTier


def _failing(found: list[Verdict]) -> list[str]:
    return [each.what for each in found if not each.holds]


@given(seed=st.integers(), minutes=st.integers(2, 30), engines=st.integers(2, 6))
def test_each_kind_of_fault_comes_as_often_and_the_first_engine_is_never_killed(
    seed: int, minutes: int, engines: int
) -> None:
    told = {"seed": seed, "duration_s": 60.0 * minutes, "engines": engines, "every_s": 8.0}
    found = list(engine_faults(**told))  # type: ignore[arg-type]  # each is of its own type
    assert found == list(engine_faults(**told))  # type: ignore[arg-type]
    counts = [sum(each.kind is kind for each in found) for kind in EngineFault]
    assert max(counts) - min(counts) <= 1
    kills = (EngineFault.KILL, EngineFault.START_KILL)
    assert all(each.target > 0 for each in found if each.kind in kills)
    assert all(each.target == 0 for each in found if each.kind is EngineFault.DISK_FULL)
    assert all(each.target < engines and each.lasts_s < 8.0 for each in found)


def test_no_two_pages_of_any_chunks_are_alike() -> None:
    keys = prefix_keys(0, 4) + prefix_keys(1, 4)
    chunks = [content(key, 3 * PAGE_BYTES + 100) for key in keys]
    assert {len(chunk) for chunk in chunks} == {3 * PAGE_BYTES + 100}
    pages = {chunk[at : at + PAGE_BYTES] for chunk in chunks for at in range(0, 13000, PAGE_BYTES)}
    assert len(pages) == 4 * len(keys)


def test_one_wrong_chunk_fails_the_soak_and_so_does_none_loaded() -> None:
    good = {"wrong_chunks": 0, "loaded_chunks": 5, "promoted_chunks": 2}
    assert _failing(soak.of_bytes(good)) == []
    assert _failing(soak.of_bytes(good | {"wrong_chunks": 1})) == ["no wrong byte loaded"]
    assert _failing(soak.of_bytes(dict.fromkeys(good, 0))) == [
        "chunks loaded and compared",
        "of these promoted for their request",
    ]


def test_one_request_that_waits_too_long_fails_the_soak() -> None:
    good = {"waits": 5, "late_waits": 0, "latest_ms": 999}
    assert _failing(soak.of_waits([good, good | {"waits": 0}])) == []
    late = "no request waited longer than computing it plus 1 s"
    assert _failing(soak.of_waits([good, good | {"late_waits": 1}])) == [late]
    assert _failing(soak.of_waits([])) == ["requests that waited for chunks"]


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_wait_is_compared_with_computing_without_the_time_of_a_stop(is_stopped: bool) -> None:
    clock = FakeClock()
    engine = CacheEngine(
        config(),
        layout(),
        Pool.allocate(8, SMALL_CHUNK_BYTES),
        clock=clock,
        tier=ScriptedTier(held=prefix_keys(0, 4), items=100),
        make_threads=ManualThreads,  # no read ends
    )
    scheduler = Scheduler(
        engine,
        seed="1",
        conversations=1,
        longest_chunks=4,
        requests_per_step=1.0,
        clock=clock,
    )
    scheduler.step()
    scheduler.is_admitting = False
    clock.advance(10.0)
    if is_stopped:
        scheduler.note_stopped()
    while not scheduler.counts.waits:
        clock.advance(0.01)
        scheduler.step()
    assert scheduler.counts.late_waits == (not is_stopped)


async def test_a_store_fails_over_and_keeps_its_values(tmp_path: Path) -> None:
    store = FailoverStore((*free_ports(3),), tmp_path)  # type: ignore[arg-type]  # three
    try:
        await store.start()
        for kills in (True, False):
            former = store.master.port
            # WAIT counts only what its own connection has written.
            with valkey.Valkey(port=former, single_connection_client=True) as client:
                client.set("key", former)
                assert client.wait(1, 10_000) == 1
            await store.fail_over(lasts_s=0.0, kills=kills)
            assert store.master.port != former
            assert (await store.master.do("GET", "key")).strip() == str(former)
        assert await store.flip_bits(3, random.Random(1)) == 3
    finally:
        store.kill()


def test_a_disk_that_hangs_keeps_who_uses_its_files_until_it_works(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    for name in ("renamed", "removed"):
        (root / name).touch()
    disk = HangingDisk(str(root))
    disk.works.clear()
    (tmp_path / "elsewhere").touch()
    uses: list[Callable[[], object]] = [
        (root / "new").touch,
        partial((root / "renamed").rename, root / "other"),
        (root / "removed").unlink,
    ]
    threads = [threading.Thread(target=use) for use in uses]
    for thread in threads:
        thread.start()
    wait_until(lambda: disk.hung == len(threads))
    assert all(thread.is_alive() for thread in threads)
    disk.works.set()
    for thread in threads:
        thread.join(20)
    assert {each.name for each in root.iterdir()} == {"new", "other"}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"reserved_slots": 9}, "1 slots neither free nor evictable"),
        ({"held_bytes": 64}, "64 bytes held"),
        ({"put_queue_bytes": 64}, "64 bytes still to be put"),
        ({"error": "a slot lost or shared"}, "a slot lost or shared"),
    ],
)
def test_what_is_left_in_one_engine_fails_the_soak(changed: dict[str, object], found: str) -> None:
    whole = EngineState(slots=10, reserved_slots=10, held_bytes=0, put_queue_bytes=0, error="")
    good, bad = asdict(whole), asdict(whole) | changed
    verdicts = soak.of_slots({"engine1": good, "engine2": bad, "engine3": None})
    assert [each.holds for each in verdicts] == [True, False, False]
    assert verdicts[1].found == found


def _durations(*ns: int) -> Durations:
    found = Durations()
    for each in ns:
        found.add(each)
    return found


@given(st.integers(0, 10**12))
def test_a_bucket_ends_at_most_a_sixteenth_above_what_lies_in_it(duration_ns: int) -> None:
    assert duration_ns <= bucket(duration_ns) <= duration_ns * 17 / 16 + 1
    assert bucket(bucket(duration_ns)) == bucket(duration_ns)


def test_quantiles_are_of_all_and_the_longest_is_exact() -> None:
    found = _durations(*[1000] * 998, 2_000_000, 3_000_001)
    assert found.quantile_ns(0.5) == bucket(1000)
    assert found.quantile_ns(0.999) == bucket(2_000_000)
    assert found.quantile_ns(1.0) == found.longest_ns == 3_000_001
    read_again = Durations.from_json(found.to_json())
    read_again.merge(_durations(9_000_000))
    assert (read_again.counts.total(), read_again.longest_ns) == (1001, 9_000_000)


def _locks(held_ns: list[int], computed_ns: list[int]) -> Holds:
    return Holds(held=_durations(*held_ns), computed=_durations(*computed_ns))


def test_holds_are_judged_by_the_clock_and_by_what_was_computed() -> None:
    short, long = [1000] * 995, [2_000_000] * 5
    by_clock = "a hold takes less than 1 ms at p99.9, by the clock"
    by_cpu = "a hold takes less than 1 ms at p99.9, of the holder's CPU time"
    assert _failing(soak.of_locks(_locks(short, short))) == []
    assert _failing(soak.of_locks(_locks(short + long, short))) == [by_clock]
    assert _failing(soak.of_locks(_locks(short, short + long))) == [by_cpu]
    assert {by_clock, by_cpu} < {*_failing(soak.of_locks(Holds()))}


def test_a_measured_lock_says_which_call_held_it_long_and_excludes_others() -> None:
    lock, entered = MeasuredLock(), threading.Event()

    def hold_for_long() -> None:
        lock.acquire()
        entered.set()
        begun_ns = lock._held_from_ns
        while time.perf_counter_ns() - begun_ns < 2_000_000:
            pass
        lock.release()

    def wait_for_it() -> None:
        entered.wait(10)
        lock.acquire()
        lock.release()

    other = threading.Thread(target=wait_for_it)
    other.start()
    hold_for_long()
    other.join(10)
    told = lock.to_json()
    (call,) = [name for name in told["by_call"] if "hold_for_long" in name]
    over, longest_ns, _ = told["by_call"][call]
    assert over == 1 and longest_ns >= 2_000_000
    assert sum(told["held"]["counts"].values()) == 2
    assert sum(told["waited"]["counts"].values()) == 1
    assert sum(told["waited_by_main"]["counts"].values()) == 1


def test_every_hold_of_an_engines_lock_is_measured() -> None:
    engine = Bench(8).engine
    lock = measure_lock(engine)
    for call in (engine.try_hold, engine.lookup):
        before = lock.held.counts.total()
        call(key(1))
        assert lock.held.counts.total() == before + 1
    engine.close()


def _samples(count: int, grows_by: int) -> list[Sample]:
    return [
        Sample(at_s=5.0 * n, rss_bytes=0, own_bytes=10**8 + n * grows_by, fds=20)
        for n in range(count)
    ]


def test_memory_is_judged_of_processes_that_lived_long_enough() -> None:
    lives = {"flat": _samples(100, 0), "grows": _samples(100, 10**6), "young": _samples(70, 10**6)}
    assert _failing(soak.of_memory(lives, 500.0)) == ["own memory of grows grows by less than 5%"]
    assert _failing(soak.of_memory({"young": lives["young"]}, 500.0)) == [
        "processes that lived long enough to judge their memory"
    ]


def test_a_run_that_is_too_short_to_judge_memory_says_so() -> None:
    (verdict,) = soak.of_memory({"grows": _samples(40, 10**6)}, 200.0)
    assert str(verdict) == "holds  memory (not judged): the run has less than 6 minutes"


def test_a_fault_that_was_never_injected_fails_the_soak() -> None:
    injected = dict.fromkeys(EngineFault, 2)
    damaged = {EngineFault.DISK_BITS: 5, EngineFault.STORE_BITS: 5}
    assert _failing(soak.of_faults(injected, damaged)) == []
    assert _failing(soak.of_faults(injected | {EngineFault.KILL: 0}, damaged)) == [
        "every kind of fault was injected"
    ]
    assert len(_failing(soak.of_faults(injected, {}))) == 2


def test_an_engine_that_ends_by_itself_an_answer_500_and_a_traceback_fail_the_soak() -> None:
    assert _failing(soak.of_ends([], [], [])) == []
    assert len(_failing(soak.of_ends(["engine2, process 1"], ["copy: x"], ["y"]))) == 3


def test_counters_of_processes_are_added_up() -> None:
    told = [{"a": 1, "b": {"c": 2}, "words": ["x"]}, {"a": 3, "b": {"c": 4}}]
    assert soak.total(told) == {"a": 4, "b": {"c": 6}}


_FREES = """
import threading
from pathlib import Path
from bench.soak.engine_process import trim_malloc, use_one_malloc_arena

def own_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

def use():
    for big in [bytearray(1 << 20) for _ in range(4)]:
        big[:] = b"x" * len(big)
    all_used.wait()

use_one_malloc_arena()
bytearray(4 << 20)  # freed at once: from here on a block of a megabyte has no mapping of its own
before = own_bytes()
threads = [threading.Thread(target=use) for _ in range(8)]
all_used = threading.Barrier(len(threads) + 1)
for thread in threads:
    thread.start()
all_used.wait()
for thread in threads:
    thread.join()
trim_malloc()
print(own_bytes() - before)
"""


def test_memory_that_threads_have_freed_does_not_count() -> None:
    """The end of a thread's own arena would not be returned: megabytes of each thread."""
    done = subprocess.run(
        [sys.executable, "-c", _FREES], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) < 1 << 20


def test_there_is_more_than_a_tier_holds() -> None:
    """Otherwise nothing would be evicted."""
    settings = EngineSoak()
    chunks = settings.conversations * LONGEST_CHUNKS
    assert chunks > settings.slots + settings.disk_chunks
    assert chunks > STORE_BYTES // CHUNK_BYTES
    assert settings.disk_chunks * (CHUNK_BYTES + 4096) < SMALL_DISK_BYTES
