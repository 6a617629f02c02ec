"""A cluster on real servers: chunks are spread over its nodes, and nodes that fail are misses."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from valkey.crc import key_slot

from cacheengine.engine.tier_io import make_remote
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.redis_cluster import RedisClusterStore, open_redis
from cacheengine.tiers.redis_store import RedisServer
from cacheengine.tiers.remote_url import parse_remote_url
from cacheengine.tiers.store import Blob, ReadTarget, ServerBackoff, StoreError
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import CHUNK_BYTES, FakeClock, key, keys, layout, payload
from tests.servers import (
    PATIENT,
    RedisProcess,
    redis_program,
    running,
    running_cluster,
    valkey_program,
)

NAMES = [f"warmroute:f:{number:02}" for number in range(30)]
Open = Callable[..., RedisClusterStore]


PARTIAL = ("--cluster-require-full-coverage", "no")


@pytest.fixture(scope="module", params=[redis_program, valkey_program], ids=["redis", "valkey"])
def nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RedisProcess]]:
    """A cluster of each server, which no test changes but for its blobs."""
    directory = tmp_path_factory.mktemp("cluster")
    with running_cluster(request.param(), directory, *PARTIAL) as started:
        yield started


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[list[RedisProcess]]:
    """A cluster whose nodes the test may stop."""
    with running_cluster(valkey_program(), tmp_path, *PARTIAL) as started:
        yield started


@pytest.fixture
def open_store() -> Iterator[Open]:
    """Open stores that make no pauses after failures; they are closed after the test."""
    opened = []

    def open_(*ports: int, login: str = "", options: str = PATIENT) -> RedisClusterStore:
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        url = parse_remote_url(f"redis-cluster://{login}{hosts}?{options}")
        store = RedisClusterStore(
            RedisServer.from_url(url),
            make_backoff=lambda: ServerBackoff(first_s=1e-9, longest_s=1e-9),
        )
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()


def _put(store: RedisClusterStore) -> list[bool]:
    return store.put_many([Blob(name, [name.encode(), bytes(10_000)]) for name in NAMES])


def _get(store: RedisClusterStore) -> list[bool]:
    """Return for each name whether it was read; compare every byte of what was."""
    buffers = [bytearray(len(NAMES[0]) + 10_000) for _ in NAMES]
    sizes = store.get_many(
        [
            ReadTarget(name, [memoryview(buffer)])
            for name, buffer in zip(NAMES, buffers, strict=True)
        ]
    )
    for name, buffer, size in zip(NAMES, buffers, sizes, strict=True):
        assert size is None or buffer == name.encode() + bytes(10_000)
    return [size is not None for size in sizes]


def test_all_with_a_prefix_are_removed_from_all_nodes(
    nodes: list[RedisProcess], open_store: Open
) -> None:
    store = open_store(nodes[0].port)
    assert all(_put(store))
    assert store.remove_all("warmroute:other:") == 0
    assert store.remove_all("warmroute:f:") == len(NAMES)
    assert not any(store.exists(NAMES))


def test_all_nodes_share_the_blobs(nodes: list[RedisProcess], open_store: Open) -> None:
    for node in nodes:
        node.do("FLUSHALL")
    store = open_store(nodes[1].port)
    assert _put(store) == [True] * 30
    held = [node.do("DBSIZE") for node in nodes]
    assert sum(held) == 30 and min(held) > 0
    assert _get(store) == store.exists(NAMES) == [True] * 30
    large = payload(key(1), 3_000_000)
    assert store.put_many([Blob("large", [large])]) == [True]
    store.remove([*NAMES[:20], "large", "absent"])
    assert _get(store) == store.exists(NAMES) == [False] * 20 + [True] * 10
    assert (store.exists([]), store.get_many([]), store.put_many([])) == ([], [], [])


def test_a_node_that_is_down_is_a_miss_and_the_others_serve(
    mortal: list[RedisProcess], open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(*(node.port for node in mortal))
    _put(store)
    mortal[0].kill()
    lost = [key_slot(name.encode()) < 16384 // 3 for name in NAMES]
    left = [not each for each in lost]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert _get(store) == store.exists(NAMES) == _put(store) == left
            store.remove(["absent"])
    assert [record.message.split(",")[0] for record in caplog.records] == [
        f"remote tier: redis://127.0.0.1:{mortal[0].port} fails"
    ]
    for node in mortal[1:]:
        node.kill()
    for call in (store.exists, store.remove):
        with pytest.raises(StoreError, match="refused"):
            call(NAMES)


class CountedFailures(ServerBackoff):
    """Pauses that do not end; counts the calls that failed."""

    def __init__(self) -> None:
        super().__init__(clock=FakeClock())
        self.count = 0

    def failed(self, began_s: float) -> None:
        self.count += 1
        super().failed(began_s)


def test_a_node_that_hangs_costs_its_deadline_once(nodes: list[RedisProcess]) -> None:
    # The nodes that do not hang must answer within it on a busy machine, too.
    url = f"redis-cluster://127.0.0.1:{nodes[1].port}?timeout_s=3&connect_timeout_s=3"
    store = open_redis(RedisServer.from_url(parse_remote_url(url)))
    assert isinstance(store, RedisClusterStore)
    store._make_backoff = CountedFailures
    assert _put(store) == [True] * 30
    with nodes[0].paused():
        for _ in range(20):
            assert 0 < store.exists(NAMES).count(True) < 30
    # Of 20 calls only one waits: the others would if they tried the node after its pause.
    failures = store._nodes["127.0.0.1", nodes[0].port].store._pool._backoff
    assert isinstance(failures, CountedFailures)
    assert failures.count == 1
    store.close()


def test_a_slot_that_moves_to_another_node_is_found_there(
    mortal: list[RedisProcess], open_store: Open
) -> None:
    store = open_store(mortal[0].port)
    _put(store)
    moved = next(name for name in NAMES if key_slot(name.encode()) < 16384 // 3)
    store.remove([moved])
    receiver = mortal[1].do("CLUSTER MYID")
    for node in (mortal[1], mortal[0]):
        node.do("CLUSTER SETSLOT", str(key_slot(moved.encode())), "NODE", receiver)
    with pytest.raises(StoreError, match="cluster"):
        store.put_many([Blob(moved, [b"x"])])
    assert store.put_many([Blob(moved, [b"x"])]) == [True]
    assert mortal[1].do("GET", moved) == b"x"


def test_nodes_with_a_password(tmp_path: Path, open_store: Open) -> None:
    with running_cluster(valkey_program(), tmp_path) as nodes:
        for node in nodes:
            node.do("ACL SETUSER", "warm", "on", ">s3cret", "~*", "+@all")
            node.do("ACL SETUSER", "default", "off")
        port = nodes[0].port
        assert _put(open_store(port, login="warm:s3cret@")) == [True] * 30
        for login in ("", "warm:hunter2@"):
            with pytest.raises(StoreError, match="accepts the user") as caught:
                open_store(port, login=login).exists(NAMES)
            assert "hunter2" not in str(caught.value)


def test_a_server_that_is_no_cluster(tmp_path: Path, open_store: Open) -> None:
    with (
        running(valkey_program(), tmp_path / "s") as server,
        pytest.raises(StoreError, match="in cluster mode"),
    ):
        open_store(server.port).exists(NAMES)


def test_a_node_of_a_cluster_that_is_named_as_one_server(
    nodes: list[RedisProcess],
) -> None:
    url = f"redis://127.0.0.1:{nodes[0].port}"
    store = open_redis(RedisServer.from_url(parse_remote_url(url)))
    with pytest.raises(StoreError, match="write redis-cluster://"):
        store.exists(NAMES)
    store.close()


def test_a_closed_store_calls_no_node(nodes: list[RedisProcess], open_store: Open) -> None:
    store = open_store(nodes[0].port)
    store.exists(NAMES)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.exists(NAMES)


def test_an_engine_with_the_url_of_a_cluster(
    nodes: list[RedisProcess], caplog: pytest.LogCaptureFixture
) -> None:
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    url = f"redis-cluster://{hosts}?{PATIENT}"
    with caplog.at_level(logging.INFO):
        first, second = (make_remote(EngineConfig(remote_url=url), layout()) for _ in range(2))
    assert first is not None and second is not None
    assert f"redis-cluster://{hosts} answers" in caplog.text
    chunks = keys(*range(1, 9))
    pairs = [(each, memoryview(payload(each))) for each in chunks]
    assert first.put_many(pairs) == [PutOutcome.STORED] * 8
    buffers = [bytearray(CHUNK_BYTES) for _ in chunks]
    targets = [(each, memoryview(into)) for each, into in zip(chunks, buffers, strict=True)]
    assert second.get_many(targets) == [GetOutcome.OK] * 8
    assert buffers == [payload(each) for each in chunks]
    first.close()
    second.close()
