"""The Mooncake adapter against a real master: replicas that share it, and its faults."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cacheengine.tiers.mooncake_store import MooncakeStore
from cacheengine.tiers.store import Blob, ReadTarget, StoreError, StoreFullError
from tests.cacheengine.helpers import wait_until
from tests.mooncake_master import MooncakeMaster, check_mooncake, running_master
from tests.servers import answers

MIB = 1024 * 1024
SEGMENT_BYTES = 32 * MIB
BLOB_BYTES = MIB
HASTY_S = 2.0
"""Timeout where something dies or hangs: calls may take all of it."""

Open = Callable[..., MooncakeStore]

pytestmark = pytest.mark.slow


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """A master with short leases, that soon forgets a client that is gone."""
    options = ("--default_kv_lease_ttl=500", "--client_ttl=2")
    with running_master(tmp_path, *options) as master:
        yield master


@pytest.fixture
def open_store(master: MooncakeMaster) -> Iterator[Open]:
    """Open a store as a replica does; ``segment_bytes`` is what it contributes.

    It is waited for where there is a master: a busy machine takes seconds to connect it, and
    others find no room before.
    """
    opened: list[MooncakeStore] = []

    def open_(segment_bytes: int = SEGMENT_BYTES, timeout_s: float = 20.0) -> MooncakeStore:
        extra = {"global_segment_size": segment_bytes, "local_buffer_size": 64 * MIB}
        opened.append(MooncakeStore.connect(master.url, extra, timeout_s, {}))
        if master.is_running:
            wait_until(lambda: answers(opened[-1]))
        return opened[-1]

    yield open_
    for store in opened:
        if store._process is not None:
            store._process.kill()  # a client takes two seconds to take its leave
        store.close()


def has_none_of(store: MooncakeStore, name: str) -> bool:
    with suppress(StoreError):
        return store.exists([name]) == [False]
    return False


def is_put(store: MooncakeStore, blob: Blob) -> bool:
    with suppress(StoreError):
        return store.put_many([blob]) == [True]
    return False


def get(store: MooncakeStore, name: str, room: int = BLOB_BYTES) -> bytes | None:
    into = bytearray(room)
    (size,) = store.get_many([ReadTarget(name, [memoryview(into)])])
    return None if size is None else bytes(into[:size])


def content(name: str, size_bytes: int = BLOB_BYTES) -> bytes:
    return (name.encode() * (size_bytes // len(name) + 1))[:size_bytes]


def blob(name: str, size_bytes: int = BLOB_BYTES) -> Blob:
    whole = content(name, size_bytes)
    return Blob(name, [whole[:60], memoryview(whole)[60:]])


def test_what_one_replica_puts_the_other_finds(open_store: Open) -> None:
    giver, taker = open_store(), open_store(segment_bytes=0)
    names = [f"chunk-{number}" for number in range(8)]
    assert giver.put_many([blob(name) for name in names]) == [True] * 8
    assert taker.exists([*names, "other"]) == [True] * 8 + [False]
    assert [get(taker, name) for name in names] == [content(name) for name in names]
    assert taker.put_many([blob("back")]) == [True]
    assert get(giver, "back") == content("back")
    taker.remove(names[:2])
    assert giver.exists(names[:3]) == [False, False, True]


def test_a_master_that_dies_is_a_failure_and_its_successor_is_used(
    master: MooncakeMaster, open_store: Open
) -> None:
    store = open_store(timeout_s=HASTY_S)
    assert store.put_many([blob("a")]) == [True]
    master.kill()
    with pytest.raises(StoreError):
        store.exists(["a"])
    with pytest.raises(StoreError):
        store.put_many([blob("b")])
    with pytest.raises(StoreError):
        get(store, "a")
    with pytest.raises(StoreError):
        store.remove(["a"])
    master.start()
    wait_until(lambda: answers(store))
    assert get(store, "a") is None  # the new master knows of nothing
    wait_until(lambda: is_put(store, blob("a")))
    wait_until(lambda: get(store, "a") == content("a"))


def test_a_master_that_hangs_costs_each_call_its_deadline_only(
    master: MooncakeMaster, open_store: Open
) -> None:
    store = open_store(timeout_s=1.0)
    assert store.put_many([blob("a")]) == [True]
    process = store._process
    with master.paused():
        for call in (
            lambda: store.exists(["a"]),
            lambda: get(store, "a"),
            lambda: store.put_many([blob("b")]),
            lambda: store.remove(["other"]),
        ):
            with pytest.raises(StoreError):
                call()
    wait_until(lambda: answers(store))
    assert store._process is process, "what it contributes was given up for a pause"
    wait_until(lambda: get(store, "a") == content("a"))


def test_a_master_that_is_not_there_yet_is_found_when_it_comes(
    master: MooncakeMaster, open_store: Open
) -> None:
    master.kill()
    store = open_store(timeout_s=HASTY_S)
    with pytest.raises(StoreError):
        store.exists(["a"])
    master.start()
    wait_until(lambda: is_put(store, blob("a")))


def test_a_client_that_dies_is_replaced(open_store: Open) -> None:
    store = open_store(timeout_s=HASTY_S)
    assert store.put_many([blob("a")]) == [True]
    assert store._process is not None
    os.kill(store._process._process.pid, signal.SIGKILL)
    with pytest.raises(StoreError):
        while True:  # the call that is under way when it dies, or the first after
            store.exists(["a"])
    wait_until(lambda: is_put(store, blob("b")))
    assert get(store, "b") == content("b")


def test_a_replica_that_dies_takes_its_blobs_and_nothing_else(open_store: Open) -> None:
    dying, staying = open_store(), open_store(segment_bytes=0, timeout_s=HASTY_S)
    assert staying.put_many([blob("a")]) == [True]  # it lies with the other
    assert dying._process is not None
    os.kill(dying._process._process.pid, signal.SIGKILL)
    with suppress(StoreError):  # until the master has noticed, reading fails
        assert get(staying, "a") is None
    # Until the master has noticed, calls may fail, and again after one that did not.
    wait_until(lambda: has_none_of(staying, "a"))
    replacement = open_store()
    wait_until(lambda: is_put(staying, blob("b")))
    assert get(replacement, "b") == content("b")


def test_a_replica_that_leaves_takes_its_blobs_at_once(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It takes two seconds to take its leave, on a busy machine longer.
    monkeypatch.setattr("cacheengine.tiers.hosted_store._CLOSE_S", 20.0)
    leaving, staying = open_store(), open_store(segment_bytes=0)
    assert staying.put_many([blob("a")]) == [True]
    leaving.close()
    assert staying.exists(["a"]) == [False]


def test_a_replica_that_hangs_costs_its_readers_their_deadline_only(open_store: Open) -> None:
    hanging, staying = open_store(), open_store(segment_bytes=0, timeout_s=HASTY_S)
    assert staying.put_many([blob("a")]) == [True]
    assert hanging._process is not None
    process = staying._process
    stat = Path(f"/proc/{hanging._process._process.pid}/stat")
    os.kill(hanging._process._process.pid, signal.SIGSTOP)
    try:
        # The signal only asks: its threads may serve one more read.
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        with suppress(StoreError):
            assert get(staying, "a") is None
        wait_until(lambda: answers(staying))
        assert staying._process is process
    finally:
        os.kill(hanging._process._process.pid, signal.SIGCONT)


def test_a_full_store_says_so_and_what_it_has_is_right(open_store: Open) -> None:
    store = open_store(segment_bytes=16 * MIB)
    names = [f"chunk-{number}" for number in range(15)]
    stored = store.put_many([blob(name) for name in names])
    assert any(stored)
    # Asking gives a lease: nothing may be evicted now.
    held = store.exists(names)
    with pytest.raises(StoreFullError):
        for number in range(100):
            store.exists(names)
            store.put_many([blob(f"more-{number}")])
    for name, is_held in zip(names, held, strict=True):
        assert not is_held or get(store, name) in (content(name), None)


def test_a_put_of_what_is_there_is_stored_already(open_store: Open) -> None:
    store = open_store()
    store.put_many([blob("a")])
    assert store.put_many([Blob("a", [bytes(1000)]), blob("b")]) == [True, True]
    assert get(store, "a") == content("a")
    assert get(store, "b") == content("b")


def test_a_damaged_blob_can_be_removed_while_it_is_read_and_put_anew(open_store: Open) -> None:
    store, other = open_store(), open_store(segment_bytes=0)
    store.put_many([Blob("a", [bytes(BLOB_BYTES)])])
    assert get(other, "a") == bytes(BLOB_BYTES)  # and has a lease on it
    store.remove(["a"])
    assert store.put_many([blob("a")]) == [True]
    assert get(other, "a") == content("a")


def test_an_empty_blob_is_not_stored(open_store: Open) -> None:
    assert open_store().put_many([Blob("empty", []), blob("a")]) == [False, True]


def test_the_replicas_own_process_stays_free_of_the_library(open_store: Open) -> None:
    """Its signal handlers, its threads and its crashes are the hosting process's."""
    store: Any = open_store()
    store.put_many([blob("a")])
    assert not [name for name in sys.modules if name.split(".")[0] == "mooncake"]


def test_closing_without_a_master_ends(master: MooncakeMaster, open_store: Open) -> None:
    store = open_store(timeout_s=HASTY_S)
    store.put_many([blob("a")])
    master.kill()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.exists(["a"])


def test_all_that_is_called_is_in_the_library() -> None:
    check_mooncake()
    code = (
        "from cacheengine.tiers import mooncake_store\n"
        "from mooncake.store import MooncakeDistributedStore as Store, ReplicateConfig\n"
        "ReplicateConfig().preferred_segment = 'a'\n"
        "import ast, inspect\n"
        "tree = ast.parse(inspect.getsource(mooncake_store))\n"
        "called = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)\n"
        "          and ast.unparse(n.value) == 'self._store'}\n"
        "assert len(called) >= 9, called\n"
        "missing = [name for name in called if not hasattr(Store, name)]\n"
        "assert not missing, missing\n"
        "import os; os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
