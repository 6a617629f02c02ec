"""Two engines and one real Redis: what one stores the other loads, and no fault is more than a
miss that is counted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheengine.settings.engine_config import EngineConfig
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import Bench, key, keys, layout, wait_until
from tests.servers import PATIENT, RedisProcess, moving_address, redis_program, running

NUMBERS = range(40)
"""More chunks than a batch has."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    with running(redis_program(), tmp_path / "server") as process:
        yield process


@pytest.fixture
def pair(make_bench: MakeBench, server: RedisProcess) -> tuple[Bench, Bench]:
    """Two engines of one layout, whose remote tier is the server."""
    config = EngineConfig(remote_url=f"{server.url}?{PATIENT}", put_queue_share=1.0)
    return make_bench(64, config), make_bench(64, config)


def _name(number: int) -> str:
    return f"warmroute:{layout().fingerprint()}:{key(number).hex()}"


def test_what_one_engine_stores_another_loads(pair: tuple[Bench, Bench]) -> None:
    first, second = pair
    first.store(keys(*NUMBERS))
    first.finish_puts()
    assert second.promote(keys(*NUMBERS)) == (0, 40, 0)
    assert second.has_right_bytes(keys(*NUMBERS))
    assert first.engine.stats().remote.puts == 40
    assert second.engine.stats().remote.gets == 40


def test_chunks_that_the_server_lost_are_missing_and_those_before_them_are_loaded(
    pair: tuple[Bench, Bench], server: RedisProcess
) -> None:
    first, second = pair
    first.store(keys(*NUMBERS))
    first.finish_puts()
    server.do("DEL", _name(25))
    resident, promoted, missing = second.promote(keys(*NUMBERS))
    assert (resident, promoted, missing) == (0, 25, 15)
    assert second.has_right_bytes(keys(*range(25)))


def test_after_a_failover_behind_an_address_that_moves_chunks_are_put_to_the_new_master(
    make_bench: MakeBench, server: RedisProcess, tmp_path: Path
) -> None:
    """The former master lives on as a replica, and connections to it stay open."""
    with (
        running(redis_program(), tmp_path / "other") as other,
        moving_address(server.port) as address,
    ):
        url = f"redis://127.0.0.1:{address.port}?{PATIENT}"
        bench = make_bench(64, EngineConfig(remote_url=url, put_queue_share=1.0))
        bench.store(keys(*NUMBERS[:20]))
        bench.finish_puts()
        assert server.do("DBSIZE") == 20
        address.target = other.port
        server.do("REPLICAOF", "127.0.0.1", str(other.port))
        bench.store(keys(*NUMBERS[20:]))

        def are_put() -> bool:
            bench.clock.advance(1.0)
            bench.engine.expire_pins()
            return bool(other.do("EXISTS", *map(_name, NUMBERS[20:])) == 20)

        wait_until(are_put)
        bench.finish_puts()
        reader = make_bench(64, EngineConfig(remote_url=url))
        assert reader.promote(keys(*NUMBERS[20:])) == (0, 20, 0)
        assert reader.has_right_bytes(keys(*NUMBERS[20:]))


@pytest.mark.parametrize("named", [True, False])
def test_clearing_removes_what_others_and_earlier_processes_stored(
    pair: tuple[Bench, Bench], server: RedisProcess, named: bool
) -> None:
    """An operator clears since KV is bad or private: the next prompt must not find it."""
    first, restarted = pair
    first.store(keys(*NUMBERS))
    first.finish_puts()
    server.do("SET", "warmroute:another-layout:1", "kept")
    cleared = keys(*NUMBERS) if named else None
    restarted.engine.clear(["remote"], cleared)
    assert restarted.engine.clear_shared(cleared) == len(NUMBERS)
    assert server.do("DBSIZE") == 1
    assert restarted.promote(keys(*NUMBERS)) == (0, 0, len(NUMBERS))
    server.kill()
    assert restarted.engine.clear_shared(cleared) is None


def test_a_damaged_chunk_is_a_miss_is_counted_and_is_stored_anew(
    pair: tuple[Bench, Bench], server: RedisProcess
) -> None:
    first, second = pair
    first.store(keys(1, 2, 3))
    first.finish_puts()
    server.do("SETRANGE", _name(2), "500", b"damage")
    _, promoted, missing = second.promote(keys(1, 2, 3))
    assert promoted + missing == 3
    assert missing >= 1
    assert second.engine.stats().remote.corrupt == 1
    second.store(keys(1, 2, 3))
    second.finish_puts()
    assert second.has_right_bytes(keys(1, 2, 3))


def test_a_server_that_dies_costs_only_what_it_held(
    pair: tuple[Bench, Bench], server: RedisProcess
) -> None:
    first, second = pair
    first.store(keys(1, 2, 3))
    first.finish_puts()
    server.kill()
    # Storing and using go on, and what was there before is missing.
    first.store(keys(4, 5))
    first.finish_puts()
    assert first.has_right_bytes(keys(1, 2, 3, 4, 5))
    assert second.promote(keys(1, 2, 3)) == (0, 0, 3)
    assert first.engine.stats().remote.io_errors + first.engine.stats().remote.put_drops >= 2
    assert second.engine.stats().remote.unanswered >= 1


def test_a_server_that_comes_back_is_used_again(
    pair: tuple[Bench, Bench], server: RedisProcess
) -> None:
    first, second = pair
    server.kill()
    first.store(keys(1, 2))
    first.finish_puts()
    server.start()
    stored: list[int] = []

    def again() -> bool:
        # The engine's rest and the store's are over some time later; new chunks are put then.
        first.clock.advance(100)
        number = 1000 + len(stored)
        stored.append(number)
        first.store(keys(number))
        first.finish_puts()
        return first.engine.stats().remote.puts > 0

    wait_until(again)
    assert second.promote(keys(stored[-1])) == (0, 1, 0)
    assert second.has_right_bytes(keys(stored[-1]))
