"""The pool of connections and its rests after failures, without any server."""

import threading

import pytest

from cacheengine.tiers.redis_connection import Conversation
from cacheengine.tiers.redis_store import ConnectionPool
from cacheengine.tiers.store import Deadline, ServerBackoff, StoreError
from tests.cacheengine.helpers import FakeClock, wait_until


class Wire(Conversation):
    """A connection that records what becomes of it."""

    def __init__(self) -> None:
        self.stale = False
        self.aborted = threading.Event()
        self.closed = False

    def is_stale(self) -> bool:
        return self.stale

    def abort(self) -> None:
        assert not self.closed
        self.aborted.set()

    def close(self) -> None:
        self.closed = True


class Maker:
    """Makes connections, and remembers them; raises ``error`` when it is set."""

    def __init__(self) -> None:
        self.made: list[Wire] = []
        self.error: Exception | None = None

    def __call__(self, deadline: Deadline) -> Wire:
        if self.error is not None:
            raise self.error
        self.made.append(Wire())
        return self.made[-1]


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def _pool(maker: Maker, clock: FakeClock, limit: int = 2) -> ConnectionPool:
    return ConnectionPool(maker, limit, ServerBackoff(clock=clock, chance=lambda: 0.0))


def _deadline() -> Deadline:
    return Deadline(10)


def test_a_connection_is_used_again(maker: Maker, clock: FakeClock) -> None:
    pool = _pool(maker, clock)
    for _ in range(3):
        with pool.lend(_deadline()) as wire:
            assert wire is maker.made[0]
    assert pool.size == 1


def test_two_at_once_are_two(maker: Maker, clock: FakeClock) -> None:
    pool = _pool(maker, clock)
    with pool.lend(_deadline()) as first, pool.lend(_deadline()) as second:
        assert first is not second
        with pytest.raises(StoreError, match="in use"), pool.lend(Deadline(0.01)):
            pass
    assert pool.size == 2


def test_who_waits_gets_the_one_that_comes_free(maker: Maker, clock: FakeClock) -> None:
    pool = _pool(maker, clock, limit=1)
    got: list[Conversation] = []

    def work() -> None:
        with pool.lend(_deadline()) as wire:
            got.append(wire)

    with pool.lend(_deadline()):
        thread = threading.Thread(target=work)
        thread.start()
    thread.join(10)
    assert got == maker.made
    assert len(got) == 1


@pytest.mark.parametrize("error", [StoreError("x"), OSError("x"), KeyboardInterrupt()])
def test_after_anything_raised_a_connection_is_closed(
    maker: Maker, clock: FakeClock, error: BaseException
) -> None:
    pool = _pool(maker, clock)
    with pytest.raises(type(error)), pool.lend(_deadline()):
        raise error
    assert maker.made[0].closed
    assert pool.size == 0
    clock.advance(1)
    with pool.lend(_deadline()) as wire:
        assert wire is maker.made[1]


def test_a_stale_connection_is_replaced(maker: Maker, clock: FakeClock) -> None:
    pool = _pool(maker, clock)
    with pool.lend(_deadline()), pool.lend(_deadline()):
        pass
    maker.made[0].stale = maker.made[1].stale = True
    with pool.lend(_deadline()) as wire:
        assert wire is maker.made[2]
    assert maker.made[0].closed and maker.made[1].closed


def test_a_connection_that_cannot_be_made_takes_no_place(maker: Maker, clock: FakeClock) -> None:
    pool = _pool(maker, clock, limit=1)
    maker.error = OSError("refused")
    for _ in range(5):
        with pytest.raises(OSError, match="refused"), pool.lend(_deadline()):
            pass
        clock.advance(3600)
    maker.error = None
    with pool.lend(_deadline()):
        pass


def test_while_it_rests_nobody_waits(maker: Maker, clock: FakeClock) -> None:
    pool = _pool(maker, clock, limit=1)
    maker.error = OSError("refused")
    with pytest.raises(OSError, match="refused"), pool.lend(_deadline()):
        pass
    maker.error = None
    with pytest.raises(StoreError, match=r"tried again in 0\.2 s"), pool.lend(_deadline()):
        pass
    clock.advance(0.2)
    with pool.lend(_deadline()):
        pass


def test_close_ends_what_is_under_way_and_nothing_begins(maker: Maker, clock: FakeClock) -> None:
    pool = _pool(maker, clock)
    with pool.lend(_deadline()), pool.lend(_deadline()):
        pass
    with pool.lend(_deadline()) as wire:
        pool.close()
        assert isinstance(wire, Wire) and wire.aborted.is_set()
    pool.close()
    assert [each.closed for each in maker.made] == [True, True]
    with pytest.raises(StoreError, match="closed"), pool.lend(_deadline()):
        pass


def test_close_while_a_connection_is_made_closes_that_too(clock: FakeClock) -> None:
    """The maker has left the lock, so `close` knows nothing of its connection."""
    made: list[Wire] = []

    def make(deadline: Deadline) -> Wire:
        pool.close()
        made.append(Wire())
        return made[0]

    pool = ConnectionPool(make, 1, ServerBackoff(clock=clock))
    with pytest.raises(StoreError, match="closed"), pool.lend(_deadline()):
        pass
    assert made[0].closed


def test_who_waits_for_a_place_is_woken_by_close(maker: Maker, clock: FakeClock) -> None:
    pool = _pool(maker, clock, limit=1)
    said: list[str] = []

    def work() -> None:
        try:
            with pool.lend(Deadline(60)):
                pass
        except StoreError as error:
            said.append(str(error))

    with pool.lend(_deadline()):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(pool._condition._waiters) == 3)  # type: ignore[attr-defined]
        pool.close()
        for thread in threads:
            thread.join(10)
    assert said == ["closed"] * 3


def test_rests_grow_and_end_with_a_success(clock: FakeClock) -> None:
    backoff = ServerBackoff(first_s=1, longest_s=5, clock=clock, chance=lambda: 0.0)
    for rest_s in (1, 2, 4, 5, 5):
        assert backoff.admit() == 0
        backoff.failed(backoff.now_s())
        assert backoff.admit() == pytest.approx(rest_s)
        clock.advance(rest_s)
    assert backoff.admit() == 0
    backoff.succeeded()
    backoff.failed(clock.now_s + 1)
    assert backoff.admit() == pytest.approx(1)


def test_a_rest_is_up_to_a_half_shorter_by_chance(clock: FakeClock) -> None:
    backoff = ServerBackoff(first_s=8, clock=clock, chance=lambda: 0.5)
    backoff.failed(clock.now_s)
    assert backoff.admit() == pytest.approx(6)


def test_after_a_rest_one_is_let_through_until_it_reports(clock: FakeClock) -> None:
    backoff = ServerBackoff(first_s=1, clock=clock, chance=lambda: 0.0)
    backoff.failed(clock.now_s)
    clock.advance(1)
    assert backoff.admit() == 0
    assert backoff.admit() > 0
    clock.advance(1)
    assert backoff.admit() == 0  # the first never reported


def test_calls_of_the_same_moment_fail_as_one(clock: FakeClock) -> None:
    backoff = ServerBackoff(first_s=1, clock=clock, chance=lambda: 0.0)
    began_s = clock.now_s
    clock.advance(3)
    for _ in range(5):
        backoff.failed(began_s)
    assert backoff.admit() == pytest.approx(1)
