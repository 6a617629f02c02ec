"""The master that Sentinels name, on real servers: found, and found again after a failover."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from valkey.exceptions import ResponseError

from cacheengine.launch.vllm_launch import free_ports
from cacheengine.tiers.redis_store import RedisServer, RedisStore
from cacheengine.tiers.remote_url import parse_remote_url
from cacheengine.tiers.store import Blob, ReadTarget, ServerBackoff, StoreError
from tests.cacheengine.helpers import wait_until
from tests.servers import (
    PATIENT,
    Program,
    RedisProcess,
    SentinelProcess,
    redis_program,
    running,
    running_sentinel,
    valkey_program,
)

SERVICE = "kv"


@pytest.fixture(params=[redis_program, valkey_program], ids=["redis", "valkey"])
def program(request: pytest.FixtureRequest) -> Program:
    found: Program = request.param()
    return found


@pytest.fixture
def master(program: Program, tmp_path: Path) -> Iterator[RedisProcess]:
    with running(program, tmp_path / "m", "--repl-diskless-sync-delay", "0") as process:
        yield process


@pytest.fixture
def replica(program: Program, tmp_path: Path, master: RedisProcess) -> Iterator[RedisProcess]:
    options = ("--replicaof", f"127.0.0.1 {master.port}", "--repl-diskless-sync-delay", "0")
    with running(program, tmp_path / "r", *options) as process:
        yield process


@pytest.fixture
def sentinel(program: Program, tmp_path: Path, master: RedisProcess) -> Iterator[SentinelProcess]:
    with running_sentinel(program, tmp_path / "sentinel", master, SERVICE) as process:
        yield process


def _store(*ports: int, service: str = SERVICE, options: str = PATIENT) -> RedisStore:
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    url = parse_remote_url(f"redis-sentinel://{hosts}/2?service_name={service}&{options}")
    backoff = ServerBackoff(first_s=1e-9, longest_s=1e-9)
    return RedisStore(RedisServer.from_url(url), backoff=backoff)


def _put(store: RedisStore, name: str, content: bytes) -> None:
    """Store it once a master is named that takes it: on a busy machine one seems down at times."""

    def is_stored() -> bool:
        try:
            return store.put_many([Blob(name, [content])]) == [True]
        except StoreError:  # with READONLY, on a connection to a former master, a StoreFullError
            time.sleep(0.05)
            return False

    wait_until(is_stored)


def _get(store: RedisStore, name: str, size: int) -> bytes | None:
    buffer = bytearray(size)
    (found,) = store.get_many([ReadTarget(name, [memoryview(buffer)])])
    return None if found is None else bytes(buffer)


def test_the_master_is_found_while_another_sentinel_is_down(
    master: RedisProcess, sentinel: SentinelProcess
) -> None:
    store = _store(*free_ports(1), sentinel.port)
    _put(store, "name", b"content")
    assert _get(store, "name", 7) == b"content"
    store.close()
    assert master.do("INFO", "keyspace")["db2"]["keys"] == 1


def test_after_a_failover_the_new_master_is_used(
    master: RedisProcess, replica: RedisProcess, sentinel: SentinelProcess
) -> None:
    store = _store(sentinel.port)
    content = bytes(1_000_000)
    _put(store, "name", content)
    wait_until(lambda: "db2" in replica.do("INFO", "keyspace"))
    wait_until(lambda: bool(sentinel.do("SENTINEL REPLICAS", SERVICE)))
    master.kill()
    _put(store, "other", b"x")
    assert _get(store, "name", len(content)) == content
    assert replica.do("INFO", "replication")["role"] == "master"
    store.close()


def test_a_failover_while_the_former_master_lives(
    master: RedisProcess, replica: RedisProcess, sentinel: SentinelProcess
) -> None:
    store = _store(sentinel.port)
    _put(store, "name", b"x")
    wait_until(lambda: "db2" in replica.do("INFO", "keyspace"))

    def has_begun() -> bool:
        try:
            return bool(sentinel.do("SENTINEL FAILOVER", SERVICE))
        except ResponseError:  # it does not know the replica yet
            time.sleep(0.05)
            return False

    wait_until(has_begun)
    wait_until(
        lambda: bool(sentinel.do("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)[1] == replica.port)
    )
    _put(store, "name", b"y")
    assert _get(store, "name", 1) == b"y"
    store.close()


@pytest.mark.parametrize("service", ["another", SERVICE])
def test_a_master_that_is_not_named(
    master: RedisProcess, sentinel: SentinelProcess, service: str
) -> None:
    ports = [sentinel.port] if service != SERVICE else free_ports(1)
    store = _store(*ports, service=service)
    with pytest.raises(StoreError, match=f"names a master '{service}' that is up"):
        store.exists(["name"])
    store.close()


def test_sentinels_that_do_not_answer_cost_the_timeout_of_a_connection(
    master: RedisProcess, sentinel: SentinelProcess
) -> None:
    store = _store(sentinel.port, sentinel.port, options="connect_timeout_s=0.6&timeout_s=120")
    with sentinel.paused():
        began_s = time.monotonic()
        with pytest.raises(StoreError):
            store.exists(["name"])
        assert time.monotonic() - began_s < 60
    store.close()
