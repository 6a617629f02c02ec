"""The contract of `tiers.stores.base`, for every store there is, on real servers."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cacheengine.tiers.hosted_store import HostedStore
from cacheengine.tiers.infinistore_store import InfiniStore
from cacheengine.tiers.mooncake_store import MooncakeStore
from cacheengine.tiers.redis_cluster import open_redis
from cacheengine.tiers.redis_store import RedisServer, RedisStore
from cacheengine.tiers.remote_url import parse_remote_url
from cacheengine.tiers.store import Blob, BlobStore, ReadTarget, StoreError
from tests.cacheengine.helpers import wait_until
from tests.cacheengine.tiers.fake_library import fake_library
from tests.servers import PATIENT, PATIENT_S, answers, redis_program, running_cluster

STAND_INS = Path(__file__).parents[1] / "stand_ins"
MIB = 1024 * 1024
SIZES = (1, 60, 4096, MIB + 17)

Open = Callable[[], BlobStore]


@pytest.fixture(scope="module")
def redis(redis_url: str) -> Open:
    return lambda: RedisStore(RedisServer.from_url(parse_remote_url(f"{redis_url}?{PATIENT}")))


@pytest.fixture(scope="module")
def valkey(valkey_url: str) -> Open:
    return lambda: RedisStore(RedisServer.from_url(parse_remote_url(f"{valkey_url}?{PATIENT}")))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    with running_cluster(redis_program(), tmp_path_factory.mktemp("cluster")) as nodes:
        url = f"redis-cluster://127.0.0.1:{nodes[0].port}?{PATIENT}"
        yield lambda: open_redis(RedisServer.from_url(parse_remote_url(url)))


@pytest.fixture(scope="module")
def mooncake(mooncake_url: str) -> Open:
    extra = {"global_segment_size": 64 * MIB, "local_buffer_size": 64 * MIB}

    def open_() -> BlobStore:
        store = MooncakeStore.connect(mooncake_url, extra, PATIENT_S, environment={})
        wait_until(lambda: answers(store))  # a busy machine takes seconds to connect it
        return store

    return open_


@pytest.fixture(scope="module")
def infinistore() -> Iterator[Open]:
    """Against a stand-in of the client's library, for what is ours: see `InfiniStore`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STAND_INS))
        url = "infinistore://here:1/?buffer_mib=16"
        yield lambda: InfiniStore.connect(url, {}, timeout_s=PATIENT_S)


@pytest.fixture(scope="module")
def hosted() -> Iterator[Open]:
    yield lambda: HostedStore(
        fake_library(), memory_bytes=16 * MIB, memory_setting="", timeout_s=PATIENT_S
    )


@pytest.fixture(
    scope="module",
    params=[
        "redis",
        "valkey",
        "cluster",
        "hosted",
        "infinistore",
        pytest.param("mooncake", marks=pytest.mark.slow),
    ],
)
def shared(request: pytest.FixtureRequest) -> Iterator[BlobStore]:
    """One store of each kind, for all tests: starting one takes its time."""
    open_: Open = request.getfixturevalue(request.param)
    store = open_()
    yield store
    store.close()


@pytest.fixture
def store(shared: BlobStore) -> BlobStore:
    return shared


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test's blobs have."""
    return f"warmroute:{request.node.name}"


def content(name: str, size_bytes: int) -> bytes:
    return (name.encode() * (size_bytes // len(name) + 1))[:size_bytes]


def put(store: BlobStore, name: str, whole: bytes) -> None:
    third = len(whole) // 3
    parts: list[memoryview | bytes] = [whole[:third], memoryview(whole)[third:]]
    assert store.put_many([Blob(name, parts)]) == [True]


def get(store: BlobStore, name: str, room: int = 2 * MIB) -> bytes | None:
    into = memoryview(bytearray(room))
    (size,) = store.get_many([ReadTarget(name, [into[:16], into[16:16], into[16:]])])
    return None if size is None else bytes(into[:size])


@pytest.mark.parametrize("size_bytes", SIZES)
def test_gives_what_was_put(store: BlobStore, name: str, size_bytes: int) -> None:
    put(store, name, content(name, size_bytes))
    assert get(store, name) == content(name, size_bytes)
    assert get(store, name, room=size_bytes) == content(name, size_bytes)


def test_what_was_never_put_is_not_there(store: BlobStore, name: str) -> None:
    assert store.exists([name]) == [False]
    assert get(store, name) is None
    store.remove([name])


def test_a_batch_answers_for_each_name_in_its_order(store: BlobStore, name: str) -> None:
    wholes = {f"{name}-{number}": content(str(number), 1000 + number) for number in range(40)}
    assert store.put_many([Blob(each, [whole]) for each, whole in wholes.items()]) == [True] * 40
    asked = [each for held in wholes for each in (held, f"{held}-not")]
    assert store.exists(asked) == [True, False] * 40
    into = {each: bytearray(2000) for each in asked}
    sizes = store.get_many([ReadTarget(each, [memoryview(into[each])]) for each in asked])
    assert sizes == [each for whole in wholes.values() for each in (len(whole), None)]
    assert all(bytes(into[each][: len(whole)]) == whole for each, whole in wholes.items())


def test_an_empty_batch_is_no_work(store: BlobStore) -> None:
    assert (store.exists([]), store.get_many([]), store.put_many([])) == ([], [], [])
    store.remove([])


def test_a_blob_larger_than_its_target_tells_its_size(store: BlobStore, name: str) -> None:
    put(store, name, content(name, 5000))
    put(store, f"{name}-next", content("next", 300))
    memory, next_ = bytearray(100) + b"beside", bytearray(300)
    targets = [
        ReadTarget(name, [memoryview(memory)[:100]]),
        ReadTarget(f"{name}-next", [memoryview(next_)]),
    ]
    assert store.get_many(targets) == [5000, 300]
    assert next_ == content("next", 300)
    assert memory[100:] == b"beside"


def test_what_was_removed_is_gone_and_can_be_put_anew(store: BlobStore, name: str) -> None:
    put(store, name, content("old", 3000))
    put(store, f"{name}-stays", content("stays", 10))
    assert get(store, name) is not None  # whatever reading may mean to a server
    store.remove([name, f"{name}-never-was"])
    assert store.exists([name, f"{name}-stays"]) == [False, True]
    put(store, name, content("new", 3000))
    assert get(store, name) == content("new", 3000)


def test_a_put_again_replaces_or_leaves_it_whole(store: BlobStore, name: str) -> None:
    """Mooncake's objects do not change: there names must be those of the content."""
    old, new = content("old", 3000), content("new!", 2000)
    put(store, name, old)
    put(store, name, new)
    assert get(store, name) == (old if isinstance(store, MooncakeStore) else new)


def test_threads_do_not_get_each_others_bytes(store: BlobStore, name: str) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(10):
            mine = f"{name}-{number}-{turn}"
            try:
                put(store, mine, content(mine, 70_000))
                if get(store, mine) != content(mine, 70_000):
                    wrong.append(mine)
            except (StoreError, AssertionError) as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "kind",
    [
        "redis",
        "valkey",
        "cluster",
        "hosted",
        "infinistore",
        pytest.param("mooncake", marks=pytest.mark.slow),
    ],
)
def test_a_closed_store_fails_every_call(kind: str, request: pytest.FixtureRequest) -> None:
    open_: Open = request.getfixturevalue(kind)
    store = open_()
    put(store, "closing", b"1234")
    store.close()
    store.close()
    for call in (
        lambda: store.exists(["closing"]),
        lambda: store.get_many([ReadTarget("closing", [memoryview(bytearray(4))])]),
        lambda: store.put_many([Blob("closing", [b"1234"])]),
        lambda: store.remove(["closing"]),
    ):
        with pytest.raises(StoreError):
            call()
