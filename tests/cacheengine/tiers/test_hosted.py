"""Stores whose library runs in a process of its own: what its faults cost the replica."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cacheengine.tiers.hosted_store import HostedStore
from cacheengine.tiers.store import Blob, ReadTarget, ServerBackoff, StoreError, StoreFullError
from tests.cacheengine.helpers import wait_until
from tests.cacheengine.tiers.fake_library import fake_library
from tests.processes import is_running
from tests.servers import PATIENT_S, answers

LANE_BYTES = 64 * 1024
ROOT = Path(__file__).parents[3]

Open = Callable[..., HostedStore]


@pytest.fixture
def open_store() -> Iterator[Open]:
    opened: list[HostedStore] = []

    def open_(
        timeout_s: float = PATIENT_S, give_up_s: float = 30.0, **settings: Any
    ) -> HostedStore:
        store = HostedStore(
            fake_library(**settings),
            memory_bytes=4 * LANE_BYTES,
            memory_setting="the memory",
            timeout_s=timeout_s,
            backoff=ServerBackoff(first_s=0.01, longest_s=0.05),
            give_up_s=give_up_s,
        )
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()


def connected(store: HostedStore) -> HostedStore:
    """Wait until it answers, so that short deadlines do not have to last for that."""
    wait_until(lambda: answers(store))
    return store


def be_patient(store: HostedStore) -> None:
    """Let later calls take as long as a busy machine may; what hangs hangs on."""
    store._timeout_s = PATIENT_S


def _pid(store: HostedStore) -> int:
    assert store._process is not None
    return store._process._process.pid


def _get(store: HostedStore, name: str, room: int = 100) -> bytes | None:
    into = bytearray(room)
    (size,) = store.get_many([ReadTarget(name, [memoryview(into)])])
    return None if size is None else bytes(into[:size])


def test_settings_are_in_no_argument(open_store: Open) -> None:
    """There may be a password among them, and all of a machine see arguments."""
    store = open_store()
    store.exists(["name"])
    words = Path(f"/proc/{_pid(store)}/cmdline").read_bytes().split(b"\0")
    assert words[1:] == [b"-m", b"cacheengine.tiers.client_host", b""]


def test_a_call_that_hangs_ends_at_its_deadline_and_others_go_on(open_store: Open) -> None:
    store = connected(open_store(timeout_s=0.3))
    with pytest.raises(StoreError, match=r"no answer in 0\.3 s"):
        store.exists(["hang"])
    be_patient(store)
    assert store.put_many([Blob("a", [b"1234"])]) == [True]
    assert _get(store, "a") == b"1234"


def test_calls_that_hang_take_no_more_than_all_lanes(open_store: Open) -> None:
    store = connected(open_store(timeout_s=0.1))
    for _ in range(4):
        with pytest.raises(StoreError, match="no answer"):
            _get(store, "hang")
    with pytest.raises(StoreError, match="other calls were running until the deadline"):
        _get(store, "a")


def test_a_question_does_not_queue_behind_transfers(open_store: Open) -> None:
    """Prompts wait for it. It took one of the lanes, and one of the process's threads."""
    store = connected(open_store(timeout_s=0.2))
    for _ in range(4):
        with pytest.raises(StoreError, match="no answer"):
            _get(store, "hang")
    assert not store._free_lanes
    be_patient(store)
    assert store.exists(["a"] * 1000) == [False] * 1000
    assert not store._free_lanes, "all of them still run"


def test_a_process_that_is_stuck_is_killed_and_the_next_one_serves(open_store: Open) -> None:
    store = connected(open_store(timeout_s=0.2, give_up_s=0.1))
    stuck = _pid(store)
    with pytest.raises(StoreError):
        store.exists(["hang"])
    wait_until(lambda: not is_running(stuck))
    connected(store)
    assert _pid(store) != stuck


def test_what_a_call_leaves_behind_at_its_deadline_never_reaches_its_buffer(
    open_store: Open,
) -> None:
    """The slot may be another chunk's by the time that the library is done."""
    store = connected(open_store(timeout_s=0.2, slow_s=2.0))
    into = bytearray(b"mine")
    with pytest.raises(StoreError, match="no answer"):
        store.get_many([ReadTarget("slow", [memoryview(into)])])
    assert len(store._free_lanes) == 3, "its memory is the library's until the call has ended"
    wait_until(lambda: len(store._free_lanes) == 4)
    assert into == b"mine"


def test_a_process_that_dies_fails_its_calls_at_once_and_is_replaced(open_store: Open) -> None:
    store = connected(open_store())
    store.put_many([Blob("a", [b"1234"])])
    with pytest.raises(StoreError, match=r"process has died \(7\)"):
        store.exists(["die"])
    connected(store)
    assert store.exists(["a"]) == [False]  # this library keeps blobs in its process
    assert store.put_many([Blob("a", [b"5678"])]) == [True]


def test_the_death_of_a_process_fails_all_calls_under_way(open_store: Open) -> None:
    store = connected(open_store(timeout_s=20.0))
    failed: list[str] = []

    def hang() -> None:
        with pytest.raises(StoreError) as caught:
            _get(store, "hang")
        failed.append(str(caught.value))

    threads = [threading.Thread(target=hang) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(store._free_lanes) == 1)
    os.kill(_pid(store), signal.SIGKILL)
    for thread in threads:
        thread.join(10)
    assert failed == ["its client's process has died (-9)"] * 3


def test_a_server_that_refuses_is_asked_again_after_rests(open_store: Open, tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    store = open_store(refuses_while=str(obstacle))
    with pytest.raises(StoreError, match="the file is there"):
        store.exists(["a"])
    with pytest.raises(StoreError, match="the file is there; tried again in"):
        while True:  # between the pauses it is asked again, which fails as before
            with pytest.raises(StoreError) as caught:
                store.exists(["a"])
            if "tried again" in str(caught.value):
                raise caught.value
    obstacle.unlink()
    connected(store)


def test_a_process_that_cannot_be_started_is_tried_again_after_a_rest(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory or of descriptors, say: a miss, and nothing that is left open."""
    store = connected(open_store())

    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as broken:
        broken.setattr(subprocess, "Popen", fail)
        os.kill(_pid(store), signal.SIGKILL)
        wait_until(lambda: "cannot be started: Cannot allocate memory" in _failure(store))
    connected(store)


def _failure(store: HostedStore) -> str:
    with pytest.raises(StoreError) as caught:
        store.exists(["a"])
    return str(caught.value)


def test_errors_of_the_library_reach_the_caller_and_change_nothing(open_store: Open) -> None:
    store = connected(open_store())
    pid = _pid(store)
    for _ in range(6):  # more than there are lanes
        with pytest.raises(StoreError, match=r"^refused, as told$"):
            store.remove(["refused"])
    assert store.exists(["a"]) == [False]
    assert _pid(store) == pid


def test_a_package_that_is_missing_is_named(open_store: Open) -> None:
    library = fake_library()
    missing = type(library)(
        module="no_such_package", settings={}, environment={}, log_variable="NONE"
    )
    store = HostedStore(missing, memory_bytes=4 * 4096, memory_setting="-", timeout_s=PATIENT_S)
    with pytest.raises(StoreError, match="no_such_package"):
        store.exists(["a"])
    store.close()


def test_a_batch_larger_than_a_lane_goes_in_rounds(open_store: Open) -> None:
    store = connected(open_store())
    blobs = {f"b{number}": os.urandom(LANE_BYTES // 3 + number) for number in range(10)}
    assert store.put_many([Blob(name, [blob]) for name, blob in blobs.items()]) == [True] * 10
    buffers = {name: bytearray(len(blob)) for name, blob in blobs.items()}
    targets = [
        ReadTarget(name, [memoryview(into)[:7], memoryview(into)[7:]])
        for name, into in buffers.items()
    ]
    assert store.get_many(targets) == [len(blob) for blob in blobs.values()]
    assert {name: bytes(into) for name, into in buffers.items()} == blobs


def test_a_blob_larger_than_a_lane_is_refused_and_the_setting_named(open_store: Open) -> None:
    store = connected(open_store())
    blob = Blob("a", [bytes(LANE_BYTES), b"1"])
    with pytest.raises(StoreError, match=f"the memory must be at least {4 * (LANE_BYTES + 64)}"):
        store.put_many([blob])
    with pytest.raises(StoreError, match="the memory must be at least"):
        store.get_many([ReadTarget("a", [memoryview(bytearray(LANE_BYTES + 1))])])


def test_a_blob_smaller_than_its_target_leaves_the_rest_as_it_was(open_store: Open) -> None:
    store = connected(open_store())
    store.put_many([Blob("large", [b"x" * 50]), Blob("small", [b"12345"])])
    assert _get(store, "large") == b"x" * 50  # lay where the small one is to lie
    into = memoryview(bytearray(b"." * 12))
    targets = [ReadTarget("small", [into[:2], into[2:8], into[8:]])]
    assert store.get_many(targets) == [5]
    assert bytes(into) == b"12345......."


def test_many_names_are_asked_for_in_rounds(open_store: Open) -> None:
    store = connected(open_store())
    store.put_many([Blob(f"n{number}", [b"1"]) for number in range(0, 700, 2)])
    names = [f"n{number}" for number in range(700)]
    assert store.exists(names) == [True, False] * 350
    store.remove(names)
    assert not any(store.exists(names))


def test_a_full_store_is_told_from_one_that_is_full_for_some(open_store: Open) -> None:
    store = connected(open_store(room=2))
    blobs = [Blob(name, [b"1"]) for name in ("a", "b", "c")]
    assert store.put_many(blobs) == [True, True, False]
    with pytest.raises(StoreFullError):
        store.put_many([Blob("d", [b"1"])])


def test_blobs_that_cannot_be_read_are_missed_unless_none_can(open_store: Open) -> None:
    store = connected(open_store())
    store.put_many([Blob("a", [b"1234"])])
    into = [memoryview(bytearray(10)) for _ in range(2)]
    assert store.get_many([ReadTarget("unread", [into[0]]), ReadTarget("a", [into[1]])]) == [
        None,
        4,
    ]
    with pytest.raises(StoreError, match="none could be read"):
        store.get_many([ReadTarget("unread", [into[0]])])


def test_close_ends_the_process_and_every_later_call(open_store: Open) -> None:
    store = connected(open_store())
    pid = _pid(store)
    store.close()
    store.close()
    assert not is_running(pid)
    with pytest.raises(StoreError, match="closed"):
        store.exists(["a"])


def test_close_does_not_wait_for_a_process_that_hangs(open_store: Open) -> None:
    store = connected(open_store(timeout_s=0.1))
    pid = _pid(store)
    with pytest.raises(StoreError):
        store.exists(["hang"])
    store.close()
    assert not is_running(pid)


@pytest.mark.parametrize("connects", [True, False])
def test_the_process_does_not_outlive_a_replica_that_was_killed(connects: bool) -> None:
    code = (
        "import time\n"
        "from cacheengine.tiers.hosted_store import HostedStore\n"
        "from tests.cacheengine.tiers.fake_library import fake_library\n"
        f"library = fake_library(never_connects={not connects})\n"
        "store = HostedStore(library, memory_bytes=65536, memory_setting='', timeout_s=60)\n"
        f"{connects} and store.exists(['a'])\n"
        "print(store._process._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE
    ) as replica:
        assert replica.stdout is not None
        pid = int(replica.stdout.readline())
        assert is_running(pid)
        replica.kill()
    wait_until(lambda: not is_running(pid))


def test_threads_do_not_get_each_others_bytes(open_store: Open) -> None:
    store = connected(open_store())
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(20):
            name = f"t{number}-{turn}"
            blob = name.encode() * 500
            store.put_many([Blob(name, [blob])])
            if _get(store, name, room=len(blob)) != blob:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert len(store._free_lanes) == 4
