"""A replica's engine in model time: 20 tokens a chunk, read in 40 ms and written in 20."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from cacheengine.record import KeyEventRecord
from cacheengine.residency.decisions import Promotion
from replay.engine import ModelEngine
from replay.staging import settled
from tests.bench.discrete.building import CHUNK, in_model_time, machine
from tests.cacheengine.helpers import key, keys

READ_S = CHUNK / 500
WRITE_S = CHUNK / 1_000


class Bench:
    """An engine, its clock and what it told."""

    def __init__(self, *, cpu_chunks: int = 8, disk_chunks: int = 100) -> None:
        self.told: list[KeyEventRecord] = []
        self.engine = ModelEngine(
            machine(cpu_tokens=cpu_chunks * CHUNK, disk_tokens=disk_chunks * CHUNK),
            self.told.extend,
        )
        self._loop = asyncio.get_running_loop()

    @property
    def now_s(self) -> float:
        return self._loop.time()

    def store(self, *numbers: int) -> None:
        """Store chunks at once; fails where there is not room for all."""
        reservation = self.engine.prepare_store(keys(*numbers))
        assert reservation is not None
        assert list(reservation.keys) == keys(*numbers)
        self.engine.complete_store(reservation.keys)
        self.engine.check()

    async def store_down(self, *numbers: int) -> None:
        """Store chunks one after the other, and wait until each is on disk."""
        for number in numbers:
            self.store(number)
            await asyncio.sleep(2 * WRITE_S)

    def tiers(self, *numbers: int) -> list[str]:
        return [(*self.engine.match([key(number)]), "nowhere")[0] for number in numbers]

    async def take_s(self, promotion: Promotion) -> float:
        began_s = self.now_s
        await settled(promotion, 1e6)
        assert promotion.done
        self.engine.check()
        return self.now_s - began_s


@in_model_time
async def test_a_stored_chunk_is_written_at_the_disks_rate() -> None:
    bench = Bench()
    bench.store(1)
    await asyncio.sleep(0.99 * WRITE_S)
    assert bench.engine.stats().disk.puts == 0
    await asyncio.sleep(0.02 * WRITE_S)
    assert bench.engine.stats().disk.puts == 1
    told = [(each.tier, each.stored, list(each.keys)) for each in bench.told]
    assert told == [("cpu", True, keys(1)), ("disk", True, keys(1))]


@in_model_time
async def test_what_left_ram_is_read_back_at_the_disks_rate() -> None:
    bench = Bench(cpu_chunks=2)
    await bench.store_down(1, 2, 3)
    assert bench.tiers(1, 2, 3) == ["disk", "cpu", "cpu"]
    promotion = bench.engine.promote(keys(1), pin_s=10.0)
    assert bench.tiers(1) == ["disk"]
    assert await bench.take_s(promotion) == pytest.approx(READ_S)
    assert promotion.counts.promoted == 1
    assert bench.tiers(1) == ["cpu"]
    assert bench.engine.stats().promoted_bytes == CHUNK


@in_model_time
async def test_reads_follow_one_another_in_batches_of_four() -> None:
    bench = Bench(cpu_chunks=8)
    await bench.store_down(*range(1, 15))
    promotion = bench.engine.promote(keys(1, 2, 3, 4, 5), pin_s=10.0)
    await asyncio.sleep(4.01 * READ_S)
    assert bench.tiers(1, 2, 3, 4, 5) == ["cpu"] * 4 + ["disk"]
    assert await bench.take_s(promotion) == pytest.approx(0.99 * READ_S)


@in_model_time
async def test_a_second_reader_waits_for_the_first_ones_read() -> None:
    bench = Bench(cpu_chunks=8)
    await bench.store_down(*range(1, 15))
    first, second = (bench.engine.promote(keys(number), pin_s=10.0) for number in (1, 2))
    assert await bench.take_s(second) == pytest.approx(2 * READ_S)
    assert first.done


@in_model_time
async def test_who_wants_what_is_being_read_waits_for_that_read() -> None:
    bench = Bench(cpu_chunks=2)
    await bench.store_down(1, 2, 3)
    one, other = (bench.engine.promote(keys(1), pin_s=10.0) for _ in range(2))
    assert await bench.take_s(other) == pytest.approx(READ_S)
    assert one.done
    assert bench.engine.stats().promoted_bytes == CHUNK


@in_model_time
async def test_what_is_nowhere_is_missing_at_once() -> None:
    bench = Bench()
    bench.store(1)
    promotion = bench.engine.promote(keys(1, 2, 3), pin_s=1.0)
    assert promotion.done
    assert (promotion.counts.resident, promotion.counts.missing) == (1, 2)


@in_model_time
async def test_a_pin_keeps_a_promoted_chunk_for_its_time() -> None:
    bench = Bench(cpu_chunks=2)
    await bench.store_down(1, 2, 3)
    await bench.take_s(bench.engine.promote(keys(1), pin_s=1.0))  # 2 or 3 has to go
    await bench.store_down(4, 5)
    assert bench.tiers(1, 5) == ["cpu", "cpu"]
    await asyncio.sleep(1.0)
    bench.store(6, 7)  # there is room for both: the pinned chunk has left
    assert bench.tiers(1, 6, 7) == ["disk", "cpu", "cpu"]
    assert bench.engine.stats().prefetch_unused_bytes == CHUNK


@in_model_time
async def test_a_promoted_chunk_that_is_used_was_not_in_vain() -> None:
    bench = Bench(cpu_chunks=2)
    await bench.store_down(1, 2, 3)
    await bench.take_s(bench.engine.promote(keys(1), pin_s=1.0))
    bench.engine.hold(keys(1))
    bench.engine.release(keys(1))
    await asyncio.sleep(2.0)
    bench.store(4, 5)
    assert bench.tiers(1) == ["disk"]
    assert bench.engine.stats().prefetch_unused_bytes == 0


@in_model_time
async def test_what_is_held_stays() -> None:
    bench = Bench(cpu_chunks=2)
    await bench.store_down(1)
    assert bench.engine.try_hold(key(1)) is not None
    await bench.store_down(2, 3, 4)
    assert bench.tiers(1, 2, 3, 4) == ["cpu", "disk", "disk", "cpu"]
    bench.engine.release(keys(1))
    await bench.store_down(5)
    assert bench.tiers(1) == ["disk"]


@in_model_time
async def test_what_is_being_written_is_not_evicted() -> None:
    bench = Bench(cpu_chunks=2)
    bench.store(1)
    bench.store(2)  # half of the RAM may wait to be written: this one is not
    assert bench.engine.stats().lower_tiers.put_drops == 1
    bench.store(3)
    assert bench.tiers(1, 2, 3) == ["cpu", "nowhere", "cpu"]


@in_model_time
async def test_writes_go_in_batches_and_one_batch_after_the_other() -> None:
    bench = Bench(cpu_chunks=60)
    bench.store(1)
    bench.store(*range(2, 20))
    await asyncio.sleep(1.01 * WRITE_S)
    assert bench.engine.stats().disk.puts == 1
    await asyncio.sleep(16 * WRITE_S)
    assert bench.engine.stats().disk.puts == 17
    await asyncio.sleep(2 * WRITE_S)
    assert bench.engine.stats().disk.puts == 19


@in_model_time
async def test_a_full_disk_loses_what_was_not_used_for_longest() -> None:
    bench = Bench(cpu_chunks=2, disk_chunks=3)
    await bench.store_down(1, 2, 3)
    bench.engine.touch(keys(1))
    await bench.store_down(4, 5)
    assert bench.tiers(1, 2, 3, 4, 5) == ["disk", "nowhere", "nowhere", "cpu", "cpu"]
    lost = [each for each in bench.told if each.tier == "disk" and not each.stored]
    assert [list(each.keys) for each in lost] == [keys(2), keys(3)]


@in_model_time
async def test_what_a_full_disk_has_lost_can_be_written_again() -> None:
    bench = Bench(cpu_chunks=2, disk_chunks=2)
    await bench.store_down(1, 2, 3)
    assert bench.tiers(1) == ["nowhere"]
    await bench.store_down(1, 4, 5)
    assert bench.tiers(1, 4, 5) == ["nowhere", "cpu", "cpu"]
    assert bench.engine.stats().disk.puts == 6
    bench.engine.clear_cpu()
    assert bench.tiers(4, 5) == ["disk", "disk"]


@in_model_time
async def test_a_replica_without_a_disk_forgets_what_leaves_its_ram() -> None:
    bench = Bench(cpu_chunks=2, disk_chunks=0)
    await bench.store_down(1, 2, 3)
    assert bench.tiers(1, 2, 3) == ["nowhere", "cpu", "cpu"]
    assert bench.engine.promote(keys(1), pin_s=1.0).counts.missing == 1


@in_model_time
async def test_a_replica_without_ram_stores_nothing() -> None:
    bench = Bench(cpu_chunks=0)
    assert bench.engine.prepare_store(keys(1)) is None
    bench.engine.check()


@in_model_time
async def test_what_is_cleared_from_ram_is_on_disk_still() -> None:
    bench = Bench(cpu_chunks=4)
    await bench.store_down(1, 2)
    bench.store(3)
    bench.engine.clear_cpu()
    bench.engine.check()
    # The third was being written, and its bytes are in use until that is over.
    assert bench.tiers(1, 2, 3) == ["disk", "disk", "nowhere"]
    await asyncio.sleep(2 * WRITE_S)
    bench.engine.check()
    assert bench.tiers(3) == ["disk"]


@in_model_time
async def test_a_read_that_is_under_way_when_ram_is_cleared_is_in_vain() -> None:
    bench = Bench(cpu_chunks=2)
    await bench.store_down(1, 2, 3)
    promotion = bench.engine.promote(keys(1), pin_s=10.0)
    await asyncio.sleep(READ_S / 2)
    bench.engine.clear_cpu()
    assert promotion.counts.missing == 1
    await asyncio.sleep(READ_S)
    bench.engine.check()
    assert bench.tiers(1) == ["disk"]


@in_model_time
async def test_a_store_that_failed_gives_its_room_back() -> None:
    bench = Bench(cpu_chunks=1)
    reservation = bench.engine.prepare_store(keys(1))
    assert reservation is not None
    assert bench.engine.prepare_store(keys(2)) is None
    bench.engine.complete_store(reservation.keys, success=False)
    bench.store(2)
    assert bench.tiers(1, 2) == ["nowhere", "cpu"]


def _of(told: Sequence[KeyEventRecord], tier: str) -> list[Any]:
    return [(each.stored, list(each.keys)) for each in told if each.tier == tier]


@in_model_time
async def test_what_comes_and_goes_is_told_in_order() -> None:
    bench = Bench(cpu_chunks=1)
    await bench.store_down(1, 2)
    assert _of(bench.told, "cpu") == [(True, keys(1)), (False, keys(1)), (True, keys(2))]
    assert _of(bench.told, "disk") == [(True, keys(1)), (True, keys(2))]
