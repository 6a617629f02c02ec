"""Chunks between two real engines over real sockets."""

import threading
from pathlib import Path

import pytest

from cacheengine.record import TransferMeter
from cacheengine.residency.decisions import Presence
from cacheengine.tiers.tier import NullTier
from cacheengine.transfer import fetch as fetching
from cacheengine.transfer.fetch import Fetch
from cacheengine.transfer.transfer_server import TransferServer
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import CHUNK_BYTES, Bench, config, keys, wait_until
from tests.cacheengine.transfer.conftest import PREFIX, Serve, assert_idle, fetch


def test_a_prefix_arrives_as_it_was(source: Bench, make_bench: MakeBench, serve: Serve) -> None:
    peer, other = serve(source), make_bench(64)
    fetched, meter = fetch(other, PREFIX, peer.address)
    assert (fetched.held_chunks, fetched.received_chunks, fetched.error) == (40, 40, "")
    assert fetched.received_bytes == 40 * CHUNK_BYTES
    assert other.has_right_bytes(PREFIX)
    assert meter.stats().received_bytes == 40 * CHUNK_BYTES
    wait_until(lambda: peer.meter.stats().sent_bytes == 40 * CHUNK_BYTES)
    assert source.has_right_bytes(PREFIX)
    assert_idle(other)


def test_several_connections_bring_each_chunk_once(
    source: Bench, make_bench: MakeBench, serve: Serve
) -> None:
    peer, other = serve(source), make_bench(64)
    fetched, _ = fetch(other, PREFIX, peer.address, connections=4)
    assert (fetched.held_chunks, fetched.received_chunks) == (40, 40)
    wait_until(lambda: peer.meter.stats().sent_chunks == 40)
    assert other.has_right_bytes(PREFIX)


def test_what_is_there_already_is_not_fetched(
    source: Bench, make_bench: MakeBench, serve: Serve
) -> None:
    other = make_bench(64)
    other.store(PREFIX[:10])
    other.store(PREFIX[20:22])
    fetched, _ = fetch(other, PREFIX, serve(source).address)
    assert (fetched.held_chunks, fetched.received_chunks) == (40, 28)
    assert fetch(other, PREFIX, ("127.0.0.1", 1))[0].error == ""


def test_what_the_source_lacks_ends_it_there(make_bench: MakeBench, serve: Serve) -> None:
    source, other = make_bench(64), make_bench(64)
    source.store(PREFIX[:5])
    peer = serve(source)
    fetched, _ = fetch(other, PREFIX, peer.address)
    assert (fetched.held_chunks, fetched.received_chunks) == (5, 5)
    assert "the source no longer has all of the chunks" in fetched.error
    # A window or two beyond the gap were asked for, not the whole rest.
    wait_until(lambda: 0 < peer.meter.stats().send_missing < 20)
    assert_idle(other)


def test_the_source_reads_what_it_has_on_disk_only(
    make_bench: MakeBench, serve: Serve, tmp_path: Path
) -> None:
    """A prefix of three times its pool's size flows through it, too."""
    source, other = make_bench(8, config(tmp_path)), make_bench(64)
    for start in range(0, 24, 4):
        source.store(PREFIX[start : start + 4])
        source.finish_puts()
    fetched, _ = fetch(other, PREFIX[:24], serve(source).address)
    assert (fetched.held_chunks, fetched.error) == (24, "")
    assert other.has_right_bytes(PREFIX[:24])


def test_the_source_of_a_pool_that_only_stages(
    make_bench: MakeBench, serve: Serve, tmp_path: Path
) -> None:
    source, other = make_bench(8, config(tmp_path, local_cpu=False)), make_bench(64)
    for start in range(0, 24, 4):
        source.store(PREFIX[start : start + 4])
        source.finish_puts()
    fetched, _ = fetch(other, PREFIX[:24], serve(source).address)
    assert (fetched.held_chunks, fetched.error) == (24, "")
    wait_until(lambda: source.engine.stats().cpu_used_bytes == 0)


def test_without_room_the_beginning_is_kept(
    source: Bench, make_bench: MakeBench, serve: Serve
) -> None:
    other = make_bench(16)
    other.store(keys(*range(100, 116)))
    other.engine.hold(keys(100, 101, 102, 103))
    fetched, _ = fetch(other, PREFIX, serve(source).address)
    assert fetched.held_chunks == 12
    assert fetched.error == "this replica's cpu tier has no space for the last 28 chunks"
    assert other.has_right_bytes(PREFIX[:12])
    assert other.has_right_bytes(keys(100, 101, 102, 103))
    other.engine.release(keys(100, 101, 102, 103))
    assert_idle(other)


def test_into_the_disk_tier_flows_more_than_the_pool_holds(
    source: Bench, make_bench: MakeBench, serve: Serve, tmp_path: Path
) -> None:
    other = make_bench(8, config(tmp_path))
    fetched, _ = fetch(other, PREFIX, serve(source).address, tier="disk")
    assert (fetched.held_chunks, fetched.error) == (40, "")
    assert other.engine.held_in(PREFIX, "disk") == 40
    assert other.promote(PREFIX[:6])[2] == 0
    assert other.has_right_bytes(PREFIX[:6])


class FullTier(NullTier):
    """A disk without room."""

    capacity_bytes = 100 * CHUNK_BYTES
    item_bytes = CHUNK_BYTES


def test_a_disk_that_takes_nothing_ends_it(
    source: Bench, make_bench: MakeBench, serve: Serve
) -> None:
    other = make_bench(64, tier=FullTier())
    fetched, _ = fetch(other, PREFIX, serve(source).address, tier="disk")
    assert fetched.held_chunks == 0
    assert fetched.error == "this replica's disk tier did not store the last 40 chunks"
    # The fetch stopped before all 40 chunks had arrived.
    assert 0 < fetched.received_chunks < 40
    assert_idle(other)


def test_what_has_arrived_is_pinned_for_a_while(
    source: Bench, make_bench: MakeBench, serve: Serve
) -> None:
    other = make_bench(56)  # at most three quarters can be pinned
    assert fetch(other, PREFIX, serve(source).address, pin_s=60.0)[0].error == ""
    assert len(other.store(keys(*range(100, 120))) or ()) == 16
    assert other.has_right_bytes(PREFIX[-1:])  # a use, which may be another request's
    other.engine.clear(["cpu"], keys(*range(100, 120)))
    assert len(other.store(keys(*range(100, 120))) or ()) == 16
    other.clock.advance(60)
    assert len(other.store(keys(*range(200, 220))) or ()) == 20


def test_two_fetches_of_the_same_share_the_work(
    source: Bench, make_bench: MakeBench, serve: Serve
) -> None:
    peer, other = serve(source), make_bench(64)
    together = threading.Barrier(2)
    results = []

    def run() -> None:
        together.wait()
        results.append(fetch(other, PREFIX, peer.address)[0])

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.held_chunks for each in results] == [40, 40]
    assert sum(each.received_chunks for each in results) == 40
    assert other.has_right_bytes(PREFIX)
    assert_idle(other)


def test_chunks_cleared_while_they_arrive_are_gone(
    source: Bench, make_bench: MakeBench, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_bench(64)
    receive = fetching.Fetch._receive

    def cleared_first(self: Fetch, *given: object) -> bool:
        received = receive(self, *given)  # type: ignore[arg-type]
        other.engine.clear(["cpu"])
        return received

    monkeypatch.setattr(fetching.Fetch, "_receive", cleared_first)
    fetched, _ = fetch(other, PREFIX, serve(source).address, connections=1)
    assert fetched.held_chunks == 0
    assert other.engine.lookup(PREFIX[0]) is Presence.MISS
    assert_idle(other)


def test_a_server_that_has_enough_says_so(
    source: Bench, make_bench: MakeBench, serve: Serve
) -> None:
    peer, other = serve(source, max_connections=0), make_bench(64)
    fetched, meter = fetch(other, PREFIX, peer.address)
    assert "all 0 connections are in use; try again later" in fetched.error
    assert meter.stats().receive_failures == 2
    # The server counts after it has answered.
    wait_until(lambda: peer.meter.stats().send_refused == 2)
    assert_idle(other)


def test_a_second_connection_that_is_refused_does_no_harm(
    source: Bench, make_bench: MakeBench, serve: Serve
) -> None:
    other = make_bench(64)
    fetched, _ = fetch(other, PREFIX, serve(source, max_connections=1).address, connections=4)
    assert (fetched.held_chunks, fetched.error) == (40, "")


def test_an_address_that_is_taken_is_named(source: Bench, serve: Serve) -> None:
    taken = serve(source).address
    with pytest.raises(OSError, match=f"distributed_url: cannot listen on 127.0.0.1:{taken[1]}"):
        TransferServer(source.engine, taken, TransferMeter()).start()


def test_a_server_stops_without_a_start_and_twice(source: Bench) -> None:
    server = TransferServer(source.engine, ("127.0.0.1", 0), TransferMeter())
    server.stop()
    server = TransferServer(source.engine, ("localhost", 0), TransferMeter())
    server.start()
    server.stop()
    server.stop()
