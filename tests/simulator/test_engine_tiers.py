"""The model over a real engine: hits in CPU RAM and on disk, loads, stores, promotions."""

from collections.abc import Callable

import pytest

from simulator.engine_storage import Pacer
from simulator.model.lower_tier_view import LoadableTokens
from tests.simulator.helpers import Bench, keys, request, run


def test_what_left_the_gpu_is_loaded_from_cpu_ram(benches: Callable[..., Bench]) -> None:
    bench = benches(cpu_chunks=50, disk_chunks=100)
    bench.serve("a", 100, 0.0)
    assert bench.model.clear_gpu()
    again = request("again", 95, text="a")
    bench.model.arrive(again, 100.0)
    run(bench.model)
    # Four chunks of 20 in 0.8 s, then 15 tokens in 2.5 s.
    assert (again.cached.gpu, again.cached.cpu, again.cached.disk) == (0, 80, 0)
    assert again.first_token_s == pytest.approx(103.3)
    assert bench.tiers.wrong_chunks == 0
    assert bench.engine.stats().cpu_held_bytes == 0


def test_loads_wait_for_each_other_and_not_for_steps(benches: Callable[..., Bench]) -> None:
    bench = benches(cpu_chunks=50, disk_chunks=100, gpu_tokens=1000)
    for name in ("a", "b"):
        bench.serve(name, 100, 0.0)
    assert bench.model.clear_gpu()
    busy = request("busy", 100)
    bench.model.arrive(busy, 1000.0)  # its step ends at 1011
    loads = [request("again-a", 100, text="a"), request("again-b", 100, text="b")]
    for each in loads:
        bench.model.arrive(each, 1000.0)
    run(bench.model)
    # Found when the next step is planned, at 1011; ready at 1012 and 1013.
    assert [each.first_token_s for each in loads] == pytest.approx([1013.1, 1014.2])


def test_what_a_load_is_bringing_is_not_loaded_twice(benches: Callable[..., Bench]) -> None:
    bench = benches(cpu_chunks=50, disk_chunks=100, gpu_tokens=1000)
    bench.serve("a", 100, 0.0)
    assert bench.model.clear_gpu()
    one, two = request("one", 95, text="a"), request("two", 95, text="a")
    bench.model.arrive(one, 100.0)
    bench.model.arrive(two, 100.0)
    assert bench.model.is_blocked
    run(bench.model)
    assert (one.cached.cpu, two.cached.cpu, two.cached.gpu) == (80, 0, 90)


def test_what_is_on_disk_is_promoted_and_passed_over_meanwhile(
    benches: Callable[..., Bench],
) -> None:
    # Six chunks, of which the engine lets promotions pin four.
    bench = benches(cpu_chunks=6, disk_chunks=100, gpu_tokens=120)
    bench.serve("a", 100, 0.0)
    bench.serve("b", 120, 50.0)  # takes the whole GPU and the whole CPU tier
    assert bench.engine.match(keys("a", 10)[1::2]) == ["disk"] * 5
    again, other = request("again", 95, text="a"), request("other", 10)
    bench.model.arrive(again, 100.0)
    bench.model.arrive(other, 100.0)
    run(bench.model, 102.0)
    assert other.first_token_s == pytest.approx(102.0)
    assert bench.model.is_blocked
    assert not bench.promoted.is_set()
    bench.may_read.set()
    assert bench.promoted.wait(20)
    bench.model.poke(110.0)
    run(bench.model)
    assert (again.cached.gpu, again.cached.cpu, again.cached.disk) == (0, 0, 80)
    assert again.first_token_s == pytest.approx(113.3)
    assert bench.tiers.wrong_chunks == 0
    assert bench.engine.stats().promoted == 4
    assert bench.engine.stats().cpu_held_bytes == 0  # its load has ended its pins


def test_a_prefetch_beforehand_makes_it_a_hit_in_cpu_ram(benches: Callable[..., Bench]) -> None:
    bench = benches(cpu_chunks=10, disk_chunks=100, gpu_tokens=200)
    bench.may_read.set()
    bench.serve("a", 100, 0.0)
    bench.serve("b", 200, 50.0)
    assert bench.engine.promote(keys("a", 10)[1::2], pin_s=60).wait(20)
    again = request("again", 95, text="a")
    bench.model.arrive(again, 100.0)
    run(bench.model)
    assert (again.cached.cpu, again.cached.disk) == (80, 0)
    stats = bench.engine.stats()
    assert stats.promoted == 5
    assert stats.prefetch_unused_bytes == 0


def test_a_request_that_goes_away_lets_go_of_its_load(benches: Callable[..., Bench]) -> None:
    bench = benches(cpu_chunks=50, disk_chunks=100)
    bench.serve("a", 100, 0.0)
    assert bench.model.clear_gpu()
    again = request("again", 95, text="a")
    bench.model.arrive(again, 100.0)
    assert bench.model.loading
    bench.model.cancel(again, 100.1)
    bench.model.check()
    assert bench.engine.stats().cpu_held_bytes == 0
    assert bench.model.next_s() is None


def test_without_room_in_cpu_ram_the_answer_comes_all_the_same(
    benches: Callable[..., Bench],
) -> None:
    bench = benches(cpu_chunks=2, disk_chunks=1)
    bench.serve("a", 200, 0.0)
    assert bench.model.totals.finished == 1


def test_a_chunk_that_the_gpu_holds_in_part_is_found_only_with_those_after_it(
    benches: Callable[..., Bench],
) -> None:
    bench = benches(cpu_chunks=50, disk_chunks=100)
    bench.serve("a", 100, 0.0)
    asked = request("again", 100, text="a")
    assert bench.tiers.find(asked, 90) == LoadableTokens()  # only half a chunk would be new
    assert bench.tiers.find(asked, 70) == LoadableTokens(cpu=30)
    assert bench.tiers.find(asked, 0) == LoadableTokens(cpu=100)
    bench.tiers.end_schedule()
    bench.tiers.forget(asked)


def test_paced_reads_keep_the_schedule_however_late_a_sleep_ends() -> None:
    now_s, slept = 0.0, []

    def sleep(wait_s: float) -> None:
        nonlocal now_s
        slept.append(round(wait_s, 6))
        now_s += 1.5 * wait_s

    pacer = Pacer(100.0, clock=lambda: now_s, sleep=sleep)
    for _ in range(4):
        pacer.pass_through(100)
    # 1 s each: the half second lost by the first is made up for by the second.
    assert slept == [1.0, 0.5, 0.75, 0.625]
    now_s += 100.0
    pacer.pass_through(100)
    assert slept[-1] <= 1.0
