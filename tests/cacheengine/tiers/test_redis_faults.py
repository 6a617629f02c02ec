"""What can go wrong with a server: each is a miss, nothing escapes, and the next call is right."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cacheengine.engine.tier_io import make_remote
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.redis_store import RedisServer, RedisStore
from cacheengine.tiers.remote import HEADER_BYTES, RemoteTier
from cacheengine.tiers.remote_url import parse_remote_url
from cacheengine.tiers.serde import NaiveSerde
from cacheengine.tiers.store import ServerBackoff
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import FakeClock, key, keys, layout, payload, wait_until
from tests.cacheengine.tiers.scripted_redis import Answer, scripted
from tests.servers import PATIENT, RedisProcess, redis_program, running

CHUNK_BYTES = 256 * 1024
FINGERPRINT = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with running(redis_program(), tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture
def server(shared_server: RedisProcess) -> RedisProcess:
    """A server whose values are changed, but which lives."""
    shared_server.do("FLUSHALL")
    return shared_server


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[RedisProcess]:
    """A server that the test may stop."""
    with running(redis_program(), tmp_path / "server") as process:
        yield process


@pytest.fixture
def clock() -> FakeClock:
    """The clock of the rests after failures, and of nothing else."""
    return FakeClock()


OpenTier = Callable[..., RemoteTier]
Play = Callable[..., RemoteTier]

HASTY = "?timeout_s=0.5&connect_timeout_s=0.5"
"""Options of a URL for tests in which a deadline ends a call."""


@pytest.fixture
def open_tier(clock: FakeClock) -> Iterator[OpenTier]:
    opened: list[RemoteTier] = []

    def open_(url: str, options: str = f"?{PATIENT}", chunk_bytes: int = CHUNK_BYTES) -> RemoteTier:
        server = RedisServer.from_url(parse_remote_url(url + options))
        store = RedisStore(server, backoff=ServerBackoff(clock=clock, chance=lambda: 0.0))
        opened.append(RemoteTier(store, FINGERPRINT, chunk_bytes, NaiveSerde()))
        return opened[-1]

    yield open_
    for tier in opened:
        tier.close()


def _name(chunk: bytes) -> str:
    return f"warmroute:{FINGERPRINT}:{chunk.hex()}"


def _put(tier: RemoteTier, *chunks: bytes, size: int = CHUNK_BYTES) -> list[PutOutcome]:
    return tier.put_many([(chunk, memoryview(payload(chunk, size))) for chunk in chunks])


def _get(tier: RemoteTier, *chunks: bytes, size: int = CHUNK_BYTES) -> list[GetOutcome]:
    """Read, and compare every byte of what is said to be right."""
    buffers = [bytearray(b"\xaa" * size) for _ in chunks]
    views = [memoryview(buffer) for buffer in buffers]
    outcomes = tier.get_many(list(zip(chunks, views, strict=True)))
    for chunk, buffer, outcome in zip(chunks, buffers, outcomes, strict=True):
        assert outcome is not GetOutcome.OK or buffer == payload(chunk, size)
    return outcomes


def _at_last(clock: FakeClock, is_right: Callable[[], bool]) -> None:
    """Return when a call after some rest is right: of a busy machine, not the first need be."""

    def after_a_rest() -> bool:
        clock.advance(60)
        return is_right()

    wait_until(after_a_rest)


STORED, PUT_FAILED = PutOutcome.STORED, PutOutcome.FAILED
OK, MISSING, FAILED = GetOutcome.OK, GetOutcome.MISSING, GetOutcome.FAILED
DAMAGED = GetOutcome.DAMAGED


class TestValues:
    """Values that change on the server."""

    @pytest.mark.parametrize("position", [0, 20, HEADER_BYTES - 1, HEADER_BYTES, 200_000])
    def test_a_changed_byte(self, server: RedisProcess, open_tier: OpenTier, position: int) -> None:
        tier = open_tier(server.url)
        _put(tier, *keys(1, 2, 3))
        right = (
            tier._envelope.header(key(2), 0, [payload(key(2), CHUNK_BYTES)])
            + payload(key(2), CHUNK_BYTES)
        )[position]
        server.do("SETRANGE", _name(key(2)), str(position), bytes([right ^ 1]))
        assert _get(tier, *keys(1, 2, 3)) == [OK, DAMAGED, OK]
        assert tier.find(keys(1, 2, 3)) == [True, False, True]
        assert _put(tier, key(2)) == [STORED]
        assert _get(tier, *keys(1, 2, 3)) == [OK] * 3

    @pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, CHUNK_BYTES, 30 * CHUNK_BYTES])
    def test_another_size(self, server: RedisProcess, open_tier: OpenTier, size: int) -> None:
        tier = open_tier(server.url)
        _put(tier, *keys(1, 3))
        server.do("SET", _name(key(2)), bytes(size))
        assert _get(tier, *keys(1, 2, 3)) == [OK, DAMAGED, OK]
        assert tier.find(keys(2)) == [False]

    def test_the_value_of_another_key(self, server: RedisProcess, open_tier: OpenTier) -> None:
        tier = open_tier(server.url)
        _put(tier, *keys(1, 2))
        server.do("COPY", _name(key(1)), _name(key(2)), "REPLACE")
        assert _get(tier, *keys(1, 2)) == [OK, DAMAGED]

    def test_something_that_is_no_value(self, server: RedisProcess, open_tier: OpenTier) -> None:
        tier = open_tier(server.url)
        server.do("RPUSH", _name(key(1)), "a")
        assert _get(tier, key(1)) == [DAMAGED]
        assert tier.find(keys(1)) == [False]

    def test_chunks_that_the_server_evicts(self, tmp_path: Path, open_tier: OpenTier) -> None:
        """Chunks that are still there are right, the others are misses; puts never fail."""
        limit = "--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru"
        with running(redis_program(), tmp_path / "small", *limit) as small:
            tier = open_tier(small.url)
            all_keys = keys(*range(40))
            for start in range(0, 40, 8):
                assert _put(tier, *all_keys[start : start + 8]) == [STORED] * 8
            found = tier.find(all_keys)
            assert found is not None and 0 < found.count(True) < 40
            # Fewer, perhaps: the answers on their way take of the server's memory, too.
            outcomes = _get(tier, *all_keys)
            assert set(outcomes) == {OK, MISSING}
            assert all(there for there, got in zip(found, outcomes, strict=True) if got is OK)


class TestOutage:
    """Servers that end, start again, or never were there."""

    def test_none_at_all(self, mortal: RedisProcess, open_tier: OpenTier) -> None:
        mortal.kill()
        tier = open_tier(mortal.url)
        assert _put(tier, key(1)) == [PUT_FAILED]
        assert _get(tier, key(1)) == [FAILED]
        assert tier.find(keys(1)) is None
        tier.delete(keys(1))

    def test_a_restart_is_survived(
        self, mortal: RedisProcess, open_tier: OpenTier, clock: FakeClock
    ) -> None:
        tier = open_tier(mortal.url)
        _put(tier, *keys(1, 2))
        mortal.kill()
        assert _get(tier, *keys(1, 2)) == [FAILED, FAILED]
        mortal.start()
        # It rests still, and is asked when the rest is over.
        assert _get(tier, key(1)) == [FAILED]
        clock.advance(0.3)
        assert _get(tier, key(1)) == [MISSING]
        assert _put(tier, key(1)) == [STORED]
        assert _get(tier, key(1)) == [OK]

    def test_a_restart_between_two_calls_is_not_even_noticed(
        self, mortal: RedisProcess, open_tier: OpenTier
    ) -> None:
        """Connections that lie idle are looked at before they are used."""
        tier = open_tier(mortal.url)
        _put(tier, key(1))
        mortal.kill()
        mortal.start()
        assert _get(tier, key(1)) == [MISSING]

    @pytest.mark.parametrize("what", ["put", "get"])
    def test_killed_in_the_middle_of_a_batch(
        self, mortal: RedisProcess, open_tier: OpenTier, clock: FakeClock, what: str
    ) -> None:
        """Stopped with the batch half way, then killed: what the buffers held is lost."""
        size, number = 4 << 20, 8
        tier = open_tier(mortal.url, chunk_bytes=size)
        chunks = keys(*range(number))
        _put(tier, *chunks, size=size)
        outcomes: list[object] = []
        call = _put if what == "put" else _get

        def work() -> None:
            outcomes.extend(call(tier, *chunks, size=size))

        with mortal.paused():
            thread = threading.Thread(target=work)
            thread.start()
            # Long enough for the sockets' buffers to fill; a batch is far more than they hold.
            thread.join(0.2)
            assert thread.is_alive()
            mortal.kill()
            thread.join(20)
        assert outcomes == [PUT_FAILED if what == "put" else FAILED] * number
        mortal.start()
        clock.advance(1)
        assert _get(tier, *chunks, size=size) == [MISSING] * number
        assert _put(tier, *chunks, size=size) == [STORED] * number
        assert _get(tier, *chunks, size=size) == [OK] * number

    def test_a_server_that_stands_still_costs_the_deadline_once(
        self, server: RedisProcess, open_tier: OpenTier, clock: FakeClock
    ) -> None:
        _put(open_tier(server.url), *keys(1, 2))
        tier = open_tier(server.url, HASTY)
        with server.paused():
            assert _get(tier, *keys(1, 2)) == [FAILED, FAILED]
            # The clock of the rests stands: no call waits for the server again.
            for _ in range(50):
                assert _get(tier, key(1)) == [FAILED]
                assert tier.find(keys(1)) is None
        _at_last(clock, lambda: _get(tier, *keys(1, 2)) == [OK, OK])

    def test_an_answer_that_comes_too_late_is_never_taken_for_another(
        self, server: RedisProcess, open_tier: OpenTier, clock: FakeClock
    ) -> None:
        _put(open_tier(server.url), *keys(1, 2))
        tier = open_tier(server.url, HASTY)
        for _ in range(3):
            # Then it has a connection, and asks on that.
            _at_last(clock, lambda: _get(tier, key(1)) == [OK])
            with server.paused():
                assert _get(tier, key(1)) == [FAILED]
            clock.advance(60)
            assert _get(tier, key(2)) in ([OK], [FAILED])
            _at_last(clock, lambda: tier.find(keys(9, 2)) == [False, True])

    def test_a_put_that_was_not_finished_is_not_there(
        self, server: RedisProcess, open_tier: OpenTier
    ) -> None:
        size = 8 << 20
        tier = open_tier(server.url, chunk_bytes=size)
        with socket.create_connection(("127.0.0.1", server.port)) as half:
            head = f"*3\r\n$3\r\nSET\r\n${len(_name(key(1)))}\r\n{_name(key(1))}\r\n${size}\r\n"
            half.sendall(head.encode() + bytes(size - 1))
        assert _get(tier, key(1), size=size) == [MISSING]


class TestBadAnswers:
    """A server that says what no server should."""

    @pytest.fixture
    def play(self, open_tier: OpenTier) -> Iterator[Play]:
        """Return a tier whose server answers so."""
        with contextlib.ExitStack() as servers:

            def play_(answer: Answer, options: str = HASTY) -> RemoteTier:
                server = servers.enter_context(scripted(answer))
                return open_tier(server.url, options, chunk_bytes=1000)

            yield play_

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            b"*1\r\n$4\r\nPING\r\n",
            b"\0\0\0\0\r\n",
            b"$\r\n",
            b"$x\r\n",
            b"$-2\r\n",
            b"$99999999999999999999\r\n",
            b"$99999999999\r\n",
            "$٣\r\nabc\r\n".encode(),
            b":x\r\n",
            b"$5\r\nab",
            b"$5\r\nabcdefgh\r\n",
            b"x" * 10_000,
            b"+OK",
            b"-",
            b"-\r\n",
            b"-ERR something\r\n",
            b"-MOVED 3999 127.0.0.1:6381\r\n",
            b"-LOADING Redis is loading the dataset in memory\r\n",
            None,
        ],
    )
    def test_garbage_is_a_failure_and_then_all_is_well(
        self, play: Play, clock: FakeClock, answer: bytes | None
    ) -> None:
        said: list[bytes | None] = [answer]
        tier = play(lambda words: said[0])
        for ask in (
            lambda: _put(tier, key(1), size=1000) == [PUT_FAILED],
            lambda: _get(tier, key(1), size=1000) == [FAILED],
            lambda: tier.find(keys(1)) is None,
        ):
            assert ask()  # type: ignore[no-untyped-call]  # it cannot see the lambdas' types
            clock.advance(3600)
        tier.delete(keys(1))
        clock.advance(3600)
        said[0] = b"$-1\r\n"
        _at_last(clock, lambda: _get(tier, key(1), size=1000) == [MISSING])

    def test_cut_off_in_the_middle_of_a_value(self, play: Play, clock: FakeClock) -> None:
        """The third of four values is half sent: none of the four is taken."""
        stored: dict[bytes, bytes] = {}
        answers: list[int] = []

        def answer(words: list[bytes]) -> bytes | None:
            if words[0] == b"SET":
                stored[words[1]] = words[2]
                return b"+OK\r\n"
            whole = b"$%d\r\n%s\r\n" % (len(stored[words[1]]), stored[words[1]])
            answers.append(0)
            return {3: whole[:500], 4: None}.get(len(answers), whole)

        tier = play(answer, f"?{PATIENT}")
        assert _put(tier, *keys(1, 2, 3, 4), size=1000) == [STORED] * 4
        assert _get(tier, *keys(1, 2, 3, 4), size=1000) == [FAILED] * 4
        clock.advance(3600)
        assert _get(tier, *keys(1, 2, 3, 4), size=1000) == [OK] * 4

    def test_the_answer_to_another_command(self, play: Play) -> None:
        tier = play(lambda words: b"+OK\r\n")
        assert _get(tier, key(1), size=1000) == [FAILED]
        assert tier.find(keys(1)) is None

    def test_an_answer_too_many_is_never_the_answer_to_the_next_question(self, play: Play) -> None:
        said = [b"$-1\r\n:1\r\n"]
        tier = play(lambda words: said[0], f"?{PATIENT}")
        assert _get(tier, key(1), size=1000) == [MISSING]
        said[0] = b":0\r\n"
        assert tier.find(keys(1)) == [False]

    @pytest.mark.parametrize(
        ("login", "options", "answer"),
        [("", "?timeout_s=0.3", b"+PONG\r\n$1048\r\n"), (":p@", "?connect_timeout_s=0.3", b"+")],
        ids=["value", "login"],
    )
    def test_an_answer_byte_by_byte_is_cut_off_at_the_deadline(
        self, open_tier: OpenTier, login: str, options: str, answer: bytes
    ) -> None:
        done = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def drip() -> None:
                connected, _ = listener.accept()
                with connected:
                    connected.recv(1000)
                    connected.sendall(answer)
                    while not done.wait(0.01):
                        try:
                            connected.sendall(b"x")
                        except OSError:
                            return

            thread = threading.Thread(target=drip)
            thread.start()
            url = f"redis://{login}127.0.0.1:{listener.getsockname()[1]}"
            tier = open_tier(url, options, chunk_bytes=1000)
            assert _get(tier, key(1), size=1000) == [FAILED]
            done.set()
            thread.join()

    def test_a_connection_that_failed_is_closed(
        self, open_tier: OpenTier, clock: FakeClock
    ) -> None:
        with scripted(lambda words: b"?\r\n") as server:
            tier = open_tier(server.url, chunk_bytes=1000)
            for number in range(1, 4):
                assert _get(tier, key(1), size=1000) == [FAILED]
                assert server.connections == number
                clock.advance(3600)


class TestBackoff:
    """How a server that fails is left alone: seen at the server."""

    def test_it_is_asked_ever_more_rarely_and_at_most_every_ten_seconds(
        self, open_tier: OpenTier, clock: FakeClock
    ) -> None:
        with scripted(lambda words: None) as server:
            tier = open_tier(server.url, chunk_bytes=1000)
            asked_at_s = []
            for _ in range(600):
                before = server.connections
                assert tier.find(keys(1)) is None
                if server.connections > before:
                    asked_at_s.append(clock.now_s - 1000)
                clock.advance(0.1)
        rests = [b - a for a, b in itertools.pairwise(asked_at_s)]
        assert rests == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, *[10.0] * 4], abs=0.11)

    def test_threads_at_once_are_one_failure(
        self, server: RedisProcess, open_tier: OpenTier, clock: FakeClock
    ) -> None:
        _put(open_tier(server.url), key(1))
        tier = open_tier(server.url, HASTY)
        threads = [threading.Thread(target=tier.find, args=(keys(1),)) for _ in range(8)]
        with server.paused():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        store: RedisStore = tier._store  # type: ignore[assignment]
        assert store._pool._backoff.admit() == pytest.approx(0.2)


def test_closing_ends_a_call_under_way(mortal: RedisProcess, open_tier: OpenTier) -> None:
    tier = open_tier(mortal.url)
    _put(tier, key(1))
    outcomes: list[GetOutcome] = []
    with mortal.paused():
        thread = threading.Thread(target=lambda: outcomes.extend(_get(tier, key(1))))
        thread.start()
        store: RedisStore = tier._store  # type: ignore[assignment]
        wait_until(lambda: bool(store._pool._lent))
        tier.close()
        thread.join(20)
    assert outcomes == [FAILED]
    assert _get(tier, key(1)) == [FAILED]
    assert store._pool.size == 0


@pytest.mark.parametrize("login", ["", ":hunter2-wrong@"])
def test_a_server_that_does_not_let_us_in_is_said_at_the_start_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, login: str
) -> None:
    with running(redis_program(), tmp_path / "s", "--requirepass", "hunter2-right") as guarded:
        url = guarded.url.replace("://", f"://{login}")
        tier = make_remote(EngineConfig(remote_url=f"{url}?{PATIENT}"), layout())
        assert tier is not None
        tier.close()
    assert "fails, and its chunks count as misses" in caplog.text
    assert "password" in caplog.text
    assert "hunter2" not in caplog.text


def test_a_server_that_is_not_there_is_said_at_the_start_and_stops_nothing(
    mortal: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    mortal.kill()
    tier = make_remote(EngineConfig(remote_url=mortal.url), layout())
    assert tier is not None
    tier.close()
    assert "Connection refused" in caplog.text


def test_a_server_that_repeats_a_password_finds_no_one_to_log_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def repeat(words: Sequence[bytes]) -> bytes:
        return b"-ERR unknown command, with args beginning with: " + b" ".join(words) + b"\r\n"

    with scripted(repeat) as server:
        url = server.url.replace("://", "://:hunter2@")
        tier = make_remote(EngineConfig(remote_url=f"{url}?{PATIENT}"), layout())
        assert tier is not None
        tier.close()
    assert "refuses the login" in caplog.text
    assert "hunter2" not in caplog.text


def test_several_addresses_are_tried(
    server: RedisProcess, open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo("127.0.0.1", server.port, type=socket.SOCK_STREAM)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = socket.getaddrinfo("127.0.0.1", closed.getsockname()[1], type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **named: dead + real)
    assert open_tier(server.url).find(keys(1)) == [False]


@pytest.mark.timeout(60)
def test_a_resolver_that_does_not_answer_is_a_miss(
    server: RedisProcess, open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, ask = threading.Event(), socket.getaddrinfo

    def hang(host: str, *rest: object, **options: object) -> object:
        if host == "localhost":
            answers.wait()
        return ask(host, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    tier = open_tier(server.url.replace("127.0.0.1", "localhost"), HASTY)
    assert _put(tier, key(1)) == [PutOutcome.FAILED]
    answers.set()


def test_a_name_that_is_none(open_tier: OpenTier) -> None:
    assert open_tier(f"redis://{'a' * 70}.example").find(keys(1)) is None
    assert open_tier("redis://nowhere.invalid").find(keys(1)) is None
