"""The adapter for Redis and Valkey against real servers, as operators may have set them up."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cacheengine.engine.tier_io import make_remote
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.redis_store import RedisServer, RedisStore
from cacheengine.tiers.remote import RemoteTier
from cacheengine.tiers.remote_url import parse_remote_url
from cacheengine.tiers.serde import NaiveSerde
from cacheengine.tiers.store import (
    Blob,
    ReadTarget,
    ServerBackoff,
    StoreError,
    StoreFullError,
)
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import CHUNK_BYTES, key, keys, layout, payload
from tests.cacheengine.tiers.scripted_redis import scripted
from tests.servers import (
    PATIENT,
    Certificates,
    Program,
    RedisProcess,
    make_certificates,
    redis_program,
    running,
    valkey_program,
)

OpenStore = Callable[[str], RedisStore]


@pytest.fixture(scope="module", params=[redis_program, valkey_program], ids=["redis", "valkey"])
def program(request: pytest.FixtureRequest) -> Program:
    """Each server there is."""
    found: Program = request.param()
    return found


@pytest.fixture(scope="module")
def server(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with running(program, tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        request.getfixturevalue("server").do("FLUSHALL")


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    """Open stores that rest for no time after a failure; they are closed after the test."""
    opened: list[RedisStore] = []

    def open_(url: str) -> RedisStore:
        if "timeout_s" not in url:
            url += f"{'&' if '?' in url else '?'}{PATIENT}"
        server = RedisServer.from_url(parse_remote_url(url))
        opened.append(RedisStore(server, backoff=ServerBackoff(first_s=1e-9, longest_s=1e-9)))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


def _get(store: RedisStore, name: str, capacity: int) -> tuple[int | None, bytes]:
    buffer = bytearray(capacity)
    (size,) = store.get_many([ReadTarget(name, [memoryview(buffer)])])
    return size, bytes(buffer)


def test_blobs_come_back_whole_whatever_their_parts(
    server: RedisProcess, open_store: OpenStore
) -> None:
    store = open_store(server.url)
    content = payload(key(1), 1_000_003)
    view = memoryview(content)
    blobs = [
        Blob("one", [content]),
        Blob("many", [view[:1], b"", view[1:5000], view[5000:5001], view[5001:]]),
        Blob("none", []),
    ]
    assert store.put_many(blobs) == [True, True, True]
    buffers = [memoryview(bytearray(size)) for size in (7, 500_000, 499_996, 1_000_003, 5)]
    targets = [
        ReadTarget("one", buffers[:3]),
        ReadTarget("absent", [memoryview(bytearray(10))]),
        ReadTarget("many", buffers[3:4]),
        ReadTarget("none", buffers[4:]),
    ]
    assert store.get_many(targets) == [1_000_003, None, 1_000_003, 0]
    assert b"".join(buffers[:3]) == buffers[3] == content


def test_a_blob_larger_than_its_target_tells_its_size_and_harms_no_other(
    server: RedisProcess, open_store: OpenStore
) -> None:
    store = open_store(server.url)
    large, small = payload(key(1), 3_000_000), payload(key(2), 1000)
    store.put_many([Blob("large", [large]), Blob("small", [small])])
    buffers = [memoryview(bytearray(1000)) for _ in range(2)]
    targets = [ReadTarget("large", buffers[:1]), ReadTarget("small", buffers[1:])]
    assert store.get_many(targets) == [3_000_000, 1000]
    assert buffers[1] == small
    assert _get(store, "small", 1000) == (1000, small)


def test_all_with_a_prefix_are_removed(server: RedisProcess, open_store: OpenStore) -> None:
    """More than one portion, and names that others chose."""
    store = open_store(server.url)
    others = ["two:1", "one", "two:one:1"]
    for start in range(0, 5000, 500):
        names = [f"one:{number}" for number in range(start, start + 500)]
        assert all(store.put_many([Blob(name, [b"1"]) for name in names]))
    for name in others:
        store.put_many([Blob(name, [b"1"])])
    assert store.remove_all("one:") == 5000
    assert store.exists([*others, "one:7"]) == [True, True, True, False]
    assert store.remove_all("one:") == 0


def test_a_question_is_a_use(program: Program, tmp_path: Path, open_store: OpenStore) -> None:
    """The server, which evicts what is used least, counts it."""
    policy = "--maxmemory-policy", "allkeys-lfu", "--lfu-log-factor", "0"
    # Else a count falls by one when a minute of the clock begins.
    no_decay = "--lfu-decay-time", "0"
    with running(program, tmp_path / "lfu", *policy, *no_decay) as server:
        store = open_store(server.url)
        store.put_many([Blob("name", [b"1"])])
        before = server.do("OBJECT", "FREQ", "name")
        assert store.exists(["name", "other"]) == [True, False]
        assert server.do("OBJECT", "FREQ", "name") > before


def test_find_and_remove_take_any_number_of_names(
    server: RedisProcess, open_store: OpenStore
) -> None:
    store = open_store(server.url)
    names = [f"name {number}" for number in range(2500)]
    store.put_many([Blob(name, [b"x"]) for name in names[::2]])
    assert store.exists(names) == [True, False] * 1250
    store.remove(names[:2000])
    assert store.exists(names).count(True) == 250
    assert (store.exists([]), store.get_many([]), store.put_many([])) == ([], [], [])
    store.remove([])


@pytest.mark.parametrize("ttl_s", [0, 3600])
def test_what_is_put_expires(server: RedisProcess, ttl_s: int) -> None:
    url = parse_remote_url(f"{server.url}?{PATIENT}")
    store = RedisStore(RedisServer.from_url(url, ttl_s=ttl_s))
    content = payload(key(1), 100_003)
    blobs = [Blob("one", [content[:7], content[7:]]), Blob("none", [])]
    assert store.put_many(blobs) == [True, True]
    for name in ("one", "none"):
        left_s = server.do("TTL", name)
        assert left_s == -1 if ttl_s == 0 else 3500 < left_s <= 3600
    assert _get(store, "one", 100_003) == (100_003, content)
    store.close()


def test_what_is_removed_is_freed_in_the_background(open_store: OpenStore) -> None:
    asked: list[bytes] = []

    def answer(words: list[bytes]) -> bytes:
        asked.append(words[0])
        return b":1\r\n"

    with scripted(answer) as server:
        open_store(server.url).remove(["one"])
    assert asked == [b"UNLINK"]


def test_what_no_put_of_ours_made_is_there_and_empty(
    server: RedisProcess, open_store: OpenStore
) -> None:
    store = open_store(server.url)
    server.do("RPUSH", "list", "a")
    assert _get(store, "list", 5)[0] == 0
    assert store.exists(["list"]) == [True]
    assert store.put_many([Blob("list", [b"ours"])]) == [True]
    assert _get(store, "list", 4) == (4, b"ours")


def test_databases_are_apart(server: RedisProcess, open_store: OpenStore) -> None:
    first, third = open_store(server.url), open_store(f"{server.url}/3")
    third.put_many([Blob("name", [b"x"])])
    assert (first.exists(["name"]), third.exists(["name"])) == ([False], [True])
    with pytest.raises(StoreError, match="out of range"):
        open_store(f"{server.url}/99999").exists(["name"])


def test_a_unix_socket(server: RedisProcess, open_store: OpenStore) -> None:
    store = open_store(f"unix://{server.socket_path}?database=2")
    store.put_many([Blob("name", [b"x" * 3_000_000])])
    assert _get(store, "name", 3_000_000)[1] == b"x" * 3_000_000


def test_no_more_connections_than_allowed(server: RedisProcess, open_store: OpenStore) -> None:
    store = open_store(f"{server.url}?connections=2")
    content = payload(key(1), 2_000_000)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            store.put_many([Blob(f"name {number}", [content])])
            if _get(store, f"name {number}", len(content)) != (len(content), content):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store._pool.size <= 2


def test_a_server_that_lets_too_many_in_no_more(
    program: Program, tmp_path: Path, open_store: OpenStore
) -> None:
    with running(program, tmp_path / "s", "--maxclients", "1") as full:
        first = open_store(full.url)
        first.exists(["name"])
        with pytest.raises(StoreError, match="max number of clients"):
            open_store(full.url).exists(["name"])
        first.exists(["name"])


class TestPassword:
    """A server that wants one, of the default user and of another."""

    @pytest.fixture
    def guarded(self, program: Program, tmp_path: Path) -> Iterator[RedisProcess]:
        users = ("--user", "reader", "on", ">hunter2", "~warmroute:*", "+ping", "+get", "+touch")
        with running(program, tmp_path / "s", "--requirepass", "s3cret/:@", *users) as process:
            yield process

    def _url(self, guarded: RedisProcess, login: str) -> str:
        return guarded.url.replace("://", f"://{login}@")

    def test_right(self, guarded: RedisProcess, open_store: OpenStore) -> None:
        store = open_store(self._url(guarded, ":s3cret%2F%3A%40"))
        assert store.put_many([Blob("name", [b"x"])]) == [True]

    @pytest.mark.parametrize("login", ["", ":", ":wrong-one", "nobody:wrong-one"])
    def test_wrong_or_missing(
        self, guarded: RedisProcess, open_store: OpenStore, login: str
    ) -> None:
        store = open_store(self._url(guarded, login) if login else guarded.url)
        with pytest.raises(StoreError, match="password") as caught:
            store.exists(["name"])
        assert "wrong-one" not in str(caught.value)

    def test_a_user_who_may_not_write(self, guarded: RedisProcess, open_store: OpenStore) -> None:
        store = open_store(self._url(guarded, "reader:hunter2"))
        assert store.exists(["warmroute:x"]) == [False]
        with pytest.raises(StoreError, match="allow ping, set, get"):
            store.put_many([Blob("warmroute:x", [b"x"])])

    def test_a_password_that_the_server_does_not_want(
        self, server: RedisProcess, open_store: OpenStore
    ) -> None:
        store = open_store(self._url(server, ":hunter2"))
        with pytest.raises(StoreError, match="password") as caught:
            store.exists(["name"])
        assert "hunter2" not in str(caught.value)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisProcess]:
    options = [
        *("--tls-cert-file", str(certificates.server), "--tls-key-file", str(certificates.key)),
        *("--tls-ca-cert-file", str(certificates.ca), "--tls-auth-clients", "optional"),
    ]
    directory = tmp_path_factory.mktemp("tls")
    with running(redis_program(), directory, *options, tls=True) as process:
        yield process


class TestTls:
    """Redis only: the Valkey of the tests has no TLS in it."""

    def _url(self, secure: RedisProcess, options: str) -> str:
        return secure.url.replace("://", "s://") + options

    def test_with_the_right_authority(
        self, secure: RedisProcess, certificates: Certificates, open_store: OpenStore
    ) -> None:
        store = open_store(self._url(secure, f"?tls_ca_file={certificates.ca}"))
        content = payload(key(1), 3_000_001)
        view = memoryview(content)
        blobs = [Blob(f"name {n}", [b"head", view[:9], view[9:]]) for n in range(4)]
        assert store.put_many(blobs) == [True] * 4
        for blob in blobs:
            assert _get(store, blob.name, 3_000_005) == (3_000_005, b"head" + content)

    def test_an_authority_that_is_not_trusted(
        self, secure: RedisProcess, open_store: OpenStore
    ) -> None:
        with pytest.raises(StoreError, match="CERTIFICATE_VERIFY_FAILED"):
            open_store(self._url(secure, "")).exists(["name"])

    def test_another_hosts_certificate(
        self, secure: RedisProcess, certificates: Certificates, open_store: OpenStore
    ) -> None:
        url = self._url(secure, f"?tls_ca_file={certificates.ca}")
        with pytest.raises(StoreError, match="CERTIFICATE_VERIFY_FAILED"):
            open_store(url.replace("127.0.0.1", "localhost")).exists(["name"])

    def test_without_verification(self, secure: RedisProcess, open_store: OpenStore) -> None:
        assert open_store(self._url(secure, "?tls_verify=false")).exists(["name"]) == [False]

    def test_a_plain_client_is_told_nothing_and_fails(
        self, secure: RedisProcess, open_store: OpenStore
    ) -> None:
        with pytest.raises(StoreError):
            open_store(secure.url).exists(["name"])

    def test_a_plain_server(self, server: RedisProcess, open_store: OpenStore) -> None:
        url = f"rediss://127.0.0.1:{server.port}?connect_timeout_s=0.5"
        with pytest.raises(StoreError):
            open_store(url).exists(["name"])

    def test_a_file_that_is_no_certificate(self, tmp_path: Path, open_store: OpenStore) -> None:
        (tmp_path / "ca.pem").write_text("nonsense")
        with pytest.raises(StoreError, match="TLS files cannot be used"):
            open_store(f"rediss://h?tls_ca_file={tmp_path}/ca.pem")


class TestNoWrites:
    """A server that takes no writes, and whose values can be read all the same."""

    @pytest.mark.parametrize(
        ("command", "said"),
        [
            (("REPLICAOF", "127.0.0.1", "1"), "name its master"),
            (("CONFIG", "SET", "min-replicas-to-write", "1"), "NOREPLICAS"),
            (("ACL", "SETUSER", "default", "-set"), "allow ping, set"),
        ],
    )
    def test_a_put_that_is_refused_keeps_nobody_from_reading(
        self,
        program: Program,
        tmp_path: Path,
        open_store: OpenStore,
        command: tuple[str, ...],
        said: str,
    ) -> None:
        with running(program, tmp_path / "s") as process:
            store = open_store(process.url)
            assert store.put_many([Blob("name", [b"content"])]) == [True]
            process.do(*command)
            for _ in range(3):
                with pytest.raises(StoreFullError, match=said):
                    store.put_many([Blob("one", [b"1"]), Blob("two", [b"2"])])
                assert _get(store, "name", 10)[0] == 7
            assert store._pool.size == 1


def test_a_server_that_has_become_a_replica_is_connected_to_again(
    server: RedisProcess, open_store: OpenStore
) -> None:
    """Where the name leads elsewhere after a failover, the next connection goes there."""
    store = open_store(server.url)
    assert store.put_many([Blob("name", [b"content"])]) == [True]
    server.do("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(StoreFullError):
            store.put_many([Blob("name", [b"other"])])
        assert store._pool.size == 0
        assert _get(store, "name", 7) == (7, b"content")
    finally:
        server.do("REPLICAOF", "NO", "ONE")
    assert store.put_many([Blob("name", [b"other"])]) == [True]


class TestFull:
    """A server at its limit that evicts nothing."""

    @pytest.fixture
    def full(self, program: Program, tmp_path: Path) -> Iterator[RedisProcess]:
        limit = "--maxmemory", "8mb", "--maxmemory-policy", "noeviction"
        with running(program, tmp_path / "s", *limit) as process:
            yield process

    def test_it_takes_what_it_can_and_then_nothing(
        self, full: RedisProcess, open_store: OpenStore
    ) -> None:
        store = open_store(full.url)
        content = bytes(1 << 20)
        stored = store.put_many([Blob(f"name {n}", [content]) for n in range(16)])
        assert 0 < stored.count(True) < 16
        assert store.exists([f"name {n}" for n in range(16)]) == stored
        with pytest.raises(StoreFullError):
            store.put_many([Blob("another", [content])])
        # What is there can be read, on the same connection, and room be made.
        assert _get(store, "name 0", 1 << 20) == (1 << 20, content)
        store.remove([f"name {n}" for n in range(16)])
        assert store.put_many([Blob("another", [content])]) == [True]

    def test_more_than_a_value_may_have_is_refused_before_it_is_sent(
        self, full: RedisProcess, open_store: OpenStore
    ) -> None:
        """The server would end the connection, and the next calls would rest for it."""
        store = open_store(full.url)
        part = memoryview(bytes(1 << 20))
        with pytest.raises(StoreFullError, match="chunk_size"):
            store.put_many([Blob("large", [part] * 512 + [b"."])])
        assert store._pool.size == 0

    def test_that_is_no_space_for_the_tier(self, full: RedisProcess, open_store: OpenStore) -> None:
        tier = RemoteTier(open_store(full.url), "f", 1 << 20, NaiveSerde())
        chunks = [(each, memoryview(payload(each, 1 << 20))) for each in keys(*range(16))]
        outcomes = tier.put_many(chunks)
        assert set(outcomes) == {PutOutcome.STORED, PutOutcome.NO_SPACE}
        assert tier.put(*chunks[-1]) is PutOutcome.NO_SPACE
        assert tier.get(chunks[0][0], memoryview(bytearray(1 << 20))) is GetOutcome.OK


def test_chunks_that_one_replica_puts_are_found_by_another(server: RedisProcess) -> None:
    config = EngineConfig(remote_url=f"{server.url}?{PATIENT}")
    first, second = (make_remote(config, layout()) for _ in range(2))
    other = make_remote(config, layout(model="another"))
    assert first is not None and second is not None and other is not None
    assert first.put(key(1), memoryview(payload(key(1)))) is PutOutcome.STORED
    buffer = bytearray(CHUNK_BYTES)
    assert second.find(keys(1, 2)) == [True, False]
    assert second.get(key(1), memoryview(buffer)) is GetOutcome.OK
    assert buffer == payload(key(1))
    assert other.find(keys(1)) == [False]
    for tier in (first, second, other):
        tier.close()
