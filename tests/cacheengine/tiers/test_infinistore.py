"""The InfiniStore adapter: its settings, and that the library has what it calls.

No test here meets a server: it needs an RDMA device to start.
"""

import ast
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheengine.launch.vllm_launch import free_ports
from cacheengine.tiers.infinistore_store import InfiniStore
from cacheengine.tiers.store import Blob, ReadTarget, StoreError, StoreFullError
from tests.servers import PATIENT_S, missing
from warmroute_common.config_reader import BadValueError

TESTS = Path(__file__).parents[2]
STAND_INS = TESTS / "stand_ins"
CLIENT = TESTS.parent / "cacheengine/tiers/infinistore_store.py"
MIB = 1024 * 1024


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))
    yield


def described(path: list[str]) -> str:
    """Return the calls that a process with this import path finds in its infinistore."""
    code = (
        "import inspect, infinistore\n"
        "connection = infinistore.InfinityConnection\n"
        f"names = {sorted(called_on_the_connection())!r}\n"
        "for name in names:\n"
        "    call = inspect.getattr_static(connection, name)\n"
        "    call = getattr(call, 'func', call)\n"  # singledispatchmethod
        "    parameters = list(inspect.signature(call).parameters)\n"
        "    print(name, parameters, inspect.iscoroutinefunction(call))\n"
        "print(issubclass(infinistore.InfiniStoreKeyNotFound, Exception), infinistore.TYPE_RDMA)\n"
        "infinistore.ClientConfig(host_addr='a', service_port=1, dev_name='d', link_type='IB',\n"
        "    ib_port=1, log_level='warning', connection_type=infinistore.TYPE_RDMA)\n"
        "import os, sys; sys.stdout.flush(); os._exit(0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment
    )
    if "No module named 'infinistore'" in done.stderr:
        missing("infinistore (the lock for tests has it)")
    assert done.returncode == 0, done.stderr
    return done.stdout


def called_on_the_connection() -> set[str]:
    tree = ast.parse(CLIENT.read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self._connection"
    }


@pytest.mark.slow
def test_the_library_has_each_call_with_its_parameters() -> None:
    """So the stand-in, against which the rest is tested, has the real one's face."""
    called = called_on_the_connection()
    assert {"connect", "register_mr", "rdma_read_cache_async", "delete_keys"} <= called
    real = described([])
    assert real == described([str(STAND_INS)])
    assert len(real.splitlines()) == len(called) + 1


@pytest.mark.slow
def test_the_library_takes_the_settings_that_it_is_given() -> None:
    """`verify` of the real configuration knows link types, log levels and connection types."""
    code = (
        "import infinistore\n"
        "for link in ('Ethernet', 'IB'):\n"
        "    infinistore.ClientConfig(connection_type=infinistore.TYPE_RDMA, log_level='warning',\n"
        "        host_addr='a', service_port=1, dev_name='d', link_type=link, ib_port=1).verify()\n"
        "import os; os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    if "No module named 'infinistore'" in done.stderr:
        missing("infinistore (the lock for tests has it)")
    assert done.returncode == 0, done.stderr


def test_says_that_it_is_untested_on_hardware(
    stand_in: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        InfiniStore.connect("infinistore://here:1/?buffer_mib=1", {}).close()
    assert "untested on hardware" in caplog.text
    assert "UNTESTED ON HARDWARE" in (inspect.getdoc(InfiniStore) or "")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("infinistore://here:1/?devise=a", "no option 'devise'"),
        ("infinistore://here:1/?link_type=Token", "link_type=Token is unknown"),
        ("infinistore://here:1/?ib_port=0", "ib_port: 0 is out of range"),
        ("infinistore://here:1/?buffer_mib=much", "buffer_mib: 'much' is not a whole number"),
        ("infinistore://user@here:1/", "more than a host and a port"),
        ("infinistore://:1/", "names no host"),
    ],
)
def test_settings_that_cannot_work_are_refused(url: str, problem: str) -> None:
    with pytest.raises(BadValueError) as caught:
        InfiniStore.connect(url, {})
    assert problem in caught.value.problem
    assert caught.value.fix


def test_a_key_of_extra_config_that_looks_like_its_own_is_refused() -> None:
    with pytest.raises(BadValueError, match="infinistore_device is not a known key"):
        InfiniStore.connect("infinistore://here:1/", {"infinistore_device": "a"})


def test_a_server_that_is_not_there_is_a_failure_of_the_call(stand_in: None) -> None:
    store = InfiniStore.connect("infinistore://nowhere:1/?buffer_mib=1", {}, PATIENT_S)
    with pytest.raises(StoreError, match="Failed to initialize remote connection"):
        store.exists(["a"])
    store.close()


@pytest.mark.slow
def test_the_library_itself_fails_a_call_when_nobody_listens() -> None:
    """As far as it goes without an RDMA device: the connection before that."""
    (port,) = free_ports(1)
    store = InfiniStore.connect(f"infinistore://127.0.0.1:{port}/?buffer_mib=1", {}, PATIENT_S)
    with pytest.raises(StoreError, match="Failed to initialize remote connection"):
        store.exists(["a"])
    store.close()


def test_a_blob_that_does_not_fit_is_not_read(stand_in: None) -> None:
    """It would be written over what lies behind, and at last beyond the memory."""
    store = InfiniStore.connect("infinistore://here:1/?buffer_mib=1", {}, PATIENT_S)
    lane_bytes = MIB // 4
    large = [Blob(name, [bytes(lane_bytes // 2 + 1000)]) for name in ("a", "b")]
    assert store.put_many(large) == [True, True]
    into = [memoryview(bytearray(size)) for size in (lane_bytes // 2 + 1000, 100)]
    targets = [ReadTarget(each.name, [part]) for each, part in zip(large, into, strict=True)]
    assert store.get_many(targets) == [lane_bytes // 2 + 1000] * 2
    store.close()


def test_a_server_without_room_is_full(stand_in: None) -> None:
    store = InfiniStore.connect("infinistore://here:1/?buffer_mib=64", {}, PATIENT_S)
    blobs = [Blob(f"b{number}", [bytes(9 * MIB)]) for number in range(8)]
    assert store.put_many(blobs) == [True] * 7 + [False]
    with pytest.raises(StoreFullError):
        store.put_many([Blob("more", [bytes(9 * MIB)])])
    into = memoryview(bytearray(9 * MIB))
    assert store.get_many([ReadTarget("b6", [into]), ReadTarget("b7", [into])]) == [9 * MIB, None]
    store.close()
