"""Peers that die, stall, lie or are of another kind: both sides stay whole."""

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from cacheengine.record import TransferMeter
from cacheengine.transfer import protocol
from cacheengine.transfer.fetch import Fetch
from cacheengine.transfer.protocol import Channel, Checksums, ChunkDigests
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import CHUNK_BYTES, Bench, keys, layout, payload, wait_until
from tests.cacheengine.scripted_tier import ScriptedTier
from tests.cacheengine.transfer.conftest import (
    LAYOUT,
    PREFIX,
    Play,
    Script,
    Serve,
    assert_idle,
    fetch,
)


def answering(
    answer: Callable[[Channel, int, bytes], None], *, then: Callable[[], None] = lambda: None
) -> Script:
    """Play a source that greets as it should and answers the n-th chunk in its own way."""

    def script(channel: Channel) -> None:
        hello = protocol.receive_hello(channel, LAYOUT, None)
        protocol.welcome(channel, hello, None)
        number = 0
        while (asked := protocol.receive_get(channel, hello.key_bytes)) is not None:
            for key in asked:
                answer(channel, number, key)
                number += 1
        then()

    return script


def header(key: bytes, *, status: int = 0, size: int = CHUNK_BYTES) -> bytes:
    numbers = struct.pack(">HQ", status, size)
    sent = b"" if status else payload(key)
    return numbers + Checksums().of(numbers + key, memoryview(sent)) + key


def right(channel: Channel, key: bytes) -> None:
    channel.send(header(key), payload(key))


# --- a source that goes wrong after seven good chunks ---


def dies_within_a_chunk(channel: Channel, key: bytes) -> None:
    channel.send(header(key), payload(key)[:1000])
    raise OSError("killed")


def dies_within_a_header(channel: Channel, key: bytes) -> None:
    channel.send(header(key)[:9])
    raise OSError("killed")


def flips_a_bit(channel: Channel, key: bytes) -> None:
    damaged = bytearray(payload(key))
    damaged[-1] ^= 1
    channel.send(header(key), bytes(damaged))


def sends_another_chunk(channel: Channel, key: bytes) -> None:
    right(channel, keys(99)[0])


def sends_too_much(channel: Channel, key: bytes) -> None:
    channel.send(header(key, size=2 * CHUNK_BYTES), payload(key) * 2)


def sends_too_little(channel: Channel, key: bytes) -> None:
    channel.send(header(key, size=CHUNK_BYTES // 2), payload(key)[: CHUNK_BYTES // 2])


def sends_garbage(channel: Channel, key: bytes) -> None:
    channel.send(payload(key))


def does_not_have_it(channel: Channel, key: bytes) -> None:
    channel.send(header(key, status=1, size=0))
    channel.end_sending()
    while channel.receive_or_end(1) is not None:
        pass
    raise OSError("it has said all")


# Which of the two is seen depends on what was still on its way to the dead.
_GONE = "closed in the middle of a chunk|closed between two chunks|reset by peer"


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (dies_within_a_chunk, _GONE),
        (dies_within_a_header, _GONE),
        (flips_a_bit, "a chunk was damaged on the way"),
        (sends_another_chunk, "sent another chunk than the one requested"),
        (sends_too_much, f"a chunk of {2 * CHUNK_BYTES} bytes instead of {CHUNK_BYTES}"),
        (sends_too_little, f"a chunk of {CHUNK_BYTES // 2} bytes instead of {CHUNK_BYTES}"),
        (sends_garbage, "a chunk with unknown status"),
        (does_not_have_it, "the source no longer has all of the chunks"),
    ],
)
def test_what_came_before_is_usable(
    other: Bench, play: Play, fails: Callable[[Channel, bytes], None], message: str
) -> None:
    def answer(channel: Channel, number: int, key: bytes) -> None:
        if number == 7:
            fails(channel, key)
        else:
            right(channel, key)

    fetched, meter = fetch(other, PREFIX, play(answering(answer)), connections=1)
    assert fetched.held_chunks == 7
    assert re.search(message, fetched.error)
    assert other.has_right_bytes(PREFIX[:7])
    assert other.engine.match(PREFIX) == ["cpu"] * 7
    assert meter.stats().receive_corrupt == (fails is flips_a_bit)
    assert meter.stats().receive_failures == (fails is not does_not_have_it)
    assert_idle(other)


def test_one_of_two_connections_dies(other: Bench, play: Play) -> None:
    """What the other one brings stays, and so does the beginning."""
    turns = iter(range(1000))

    def answer(channel: Channel, number: int, key: bytes) -> None:
        if next(turns) == 12:
            dies_within_a_chunk(channel, key)
        right(channel, key)

    fetched, _ = fetch(other, PREFIX, play(answering(answer)), connections=2)
    assert fetched.held_chunks < 40
    assert fetched.error
    assert other.has_right_bytes(PREFIX[: fetched.held_chunks])
    assert_idle(other)


# --- a peer that is none, or of another kind, or slow ---


def test_nobody_listens(other: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    fetched, meter = fetch(other, PREFIX, address)
    assert fetched.held_chunks == 0
    assert "Connection refused" in fetched.error
    assert f"127.0.0.1:{address[1]}: " in fetched.error
    assert meter.stats().receive_failures == 2
    assert_idle(other)


def test_something_else_listens(other: Bench, play: Play) -> None:
    def web_server(channel: Channel) -> None:
        channel.send(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")

    fetched, _ = fetch(other, PREFIX, play(web_server))
    assert "that address is not a replica's distributed_url" in fetched.error
    assert_idle(other)


def test_another_layout_is_refused(source: Bench, serve: Serve, play: Play) -> None:
    from cacheengine.engine.engine import CacheEngine
    from cacheengine.memory import Pool
    from cacheengine.settings.engine_config import EngineConfig

    peer = serve(source)
    pool = Pool.allocate(4, CHUNK_BYTES)
    stranger = CacheEngine(EngineConfig(), layout(model="another"), pool)
    fetched = Fetch(stranger, PREFIX, peer.address, TransferMeter()).run()
    stranger.check()
    stranger.close()
    assert fetched.held_chunks == 0
    assert f"the peer's chunks have layout {layout(model='another').fingerprint()}" in fetched.error
    assert "model, weights, dtype, chunk_size" in fetched.error
    wait_until(lambda: peer.meter.stats().send_refused == 2)
    assert peer.meter.stats().send_failures == 0


@pytest.mark.parametrize("silent_at", ["welcome", "header", "payload"])
def test_a_source_that_stalls_is_left(other: Bench, play: Play, silent_at: str) -> None:
    over = threading.Event()

    def stall(channel: Channel) -> None:
        hello = protocol.receive_hello(channel, LAYOUT, None)
        if silent_at != "welcome":
            protocol.welcome(channel, hello, None)
            (key, *_) = protocol.receive_get(channel, hello.key_bytes) or []
            if silent_at == "payload":
                channel.send(header(key), payload(key)[:10])
        over.wait(20)

    fetched, meter = fetch(other, PREFIX, play(stall), connections=1, timeout_s=0.2)
    over.set()
    assert fetched.held_chunks == 0
    assert "within 0.2 s" in fetched.error
    assert meter.stats().receive_failures == 1
    assert_idle(other)


def test_a_source_that_trickles_is_left(other: Bench, play: Play) -> None:
    """A byte now and then keeps no move alive."""
    over = threading.Event()

    def trickle(channel: Channel, number: int, key: bytes) -> None:
        channel.send(header(key))
        for byte in payload(key):
            if over.wait(0.05):
                return
            channel.send(bytes([byte]))

    fetched, _ = fetch(other, PREFIX, play(answering(trickle)), connections=1, timeout_s=0.3)
    over.set()
    assert "did not finish a message within 0.3 s" in fetched.error
    assert_idle(other)


def test_a_fetch_that_is_cancelled_ends_at_once(other: Bench, play: Play) -> None:
    started, over = threading.Event(), threading.Event()

    def hang(channel: Channel, number: int, key: bytes) -> None:
        started.set()
        over.wait(20)

    under_way = Fetch(other.engine, PREFIX, play(answering(hang)), TransferMeter())
    results = []
    thread = threading.Thread(target=lambda: results.append(under_way.run()))
    thread.start()
    assert started.wait(20)
    under_way.cancel()
    thread.join(10)
    assert not thread.is_alive()
    over.set()
    assert results[0].error == "cancelled with 40 chunks missing, because this replica stops"
    assert_idle(other)


# --- the source's side: destinations that go wrong ---


def connect(address: tuple[str, int]) -> Channel:
    return Channel.connect(address, timeout_s=20, connect_s=20)


def ask(address: tuple[str, int], asked: Sequence[bytes] = PREFIX) -> Channel:
    channel = connect(address)
    protocol.greet(channel, LAYOUT, 32, None)
    protocol.send_get(channel, asked)
    return channel


def test_a_destination_that_dies_within_a_chunk(source: Bench, serve: Serve) -> None:
    peer = serve(source)
    channel = ask(peer.address, PREFIX * 5)
    channel.receive(1000)
    channel.close()
    wait_until(lambda: peer.server.num_connections == 0)
    assert_idle(source)
    assert source.has_right_bytes(PREFIX)


def test_a_destination_that_reads_nothing_times_out(source: Bench, serve: Serve) -> None:
    # Long enough for this side to ask.
    peer = serve(source, timeout_s=1.0)
    channel = ask(peer.address, PREFIX * 6)
    # The source may time out, and close, before it was asked for all of that.
    with contextlib.suppress(OSError, protocol.PeerGoneError):
        for _ in range(200):  # more than any socket buffers
            protocol.send_get(channel, PREFIX * 6)
    wait_until(lambda: peer.meter.stats().send_failures == 1)
    wait_until(lambda: peer.server.num_connections == 0)
    assert_idle(source)
    channel.close()


def test_what_a_connection_leaves_unsent_is_not_read(make_bench: MakeBench, serve: Serve) -> None:
    """It ends at a chunk that is missing; of the others only what had begun is read."""
    tier = ScriptedTier(held=PREFIX)
    bench = make_bench(64, tier=tier)
    tier.gets.clear()
    # Long enough for this side to ask.
    peer = serve(bench, timeout_s=1.0)
    channel = ask(peer.address)
    wait_until(lambda: tier.get_count > 0)
    bench.engine.clear(keys=PREFIX[:1])
    wait_until(lambda: peer.server.num_connections == 0)
    began = tier.get_count
    assert bench.engine.stats().cpu_used_bytes < 20 * CHUNK_BYTES
    tier.gets.set()
    wait_until(lambda: bench.engine.stats().disk.get_misses == began)
    assert tier.get_count == began < 20
    channel.close()


def test_a_destination_that_never_asks_times_out(source: Bench, serve: Serve) -> None:
    peer = serve(source, timeout_s=0.2)
    channel = connect(peer.address)
    wait_until(lambda: peer.meter.stats().send_failures == 1)
    assert channel.receive_or_end(1) is None
    channel.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nhost: replica\r\nuser-agent: lost\r\n\r\n",
        struct.pack(">4sHH32s", b"WRKV", 2, 32, LAYOUT.encode()) + bytes(32) + struct.pack(">I", 0),
        struct.pack(">4sHH32s", b"WRKV", 2, 32, LAYOUT.encode()) + bytes(32) + b"\xff" * 4,
    ],
)
def test_nonsense_ends_a_connection(source: Bench, serve: Serve, said: bytes) -> None:
    peer = serve(source)
    channel = connect(peer.address)
    channel.send(said)
    wait_until(lambda: peer.meter.stats().send_failures == 1)
    wait_until(lambda: peer.server.num_connections == 0)
    channel.close()
    assert fetch_one(peer.address) == payload(PREFIX[0])


@pytest.mark.parametrize(
    ("version", "key_bytes", "message"),
    [(9, 32, "version 9 of the transfer protocol"), (2, 65, "keys of 65 bytes"), (2, 0, "keys of")],
)
def test_other_versions_and_keys_are_refused(
    source: Bench, serve: Serve, version: int, key_bytes: int, message: str
) -> None:
    peer = serve(source)
    channel = connect(peer.address)
    channel.send(struct.pack(">4sHH32s", b"WRKV", version, key_bytes, LAYOUT.encode()))
    if version == protocol.VERSION:
        channel.send(bytes(32))
    magic, status, size = struct.unpack(">4sHH", channel.receive(8))
    assert (magic, status) == (b"WRKV", 2)
    assert message in channel.receive(size).decode()
    channel.close()


def fetch_one(address: tuple[str, int]) -> bytes:
    channel = ask(address, PREFIX[:1])
    received = bytearray(CHUNK_BYTES)
    assert protocol.receive_chunk(channel, PREFIX[0], memoryview(received), Checksums())
    channel.close()
    return bytes(received)


def test_a_server_that_stops_in_the_middle_of_a_chunk(
    source: Bench, other: Bench, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between a chunk's header and its end; here everything is real but the timing."""
    peer = serve(source)
    send = protocol.send_chunk
    sent = iter(range(1000))

    def stops(channel: Channel, key: bytes, view: memoryview, digests: ChunkDigests) -> None:
        if next(sent) == 10:
            channel.send(header(key), view[:100])
            channel.shut()
        send(channel, key, view, digests)

    monkeypatch.setattr(protocol, "send_chunk", stops)
    fetched, _ = fetch(other, PREFIX, peer.address, connections=1)
    assert fetched.held_chunks == 10
    assert other.has_right_bytes(PREFIX[:10])
    assert_idle(other)
    assert source.has_right_bytes(PREFIX)
    wait_until(lambda: peer.server.num_connections == 0)
    assert_idle(source)


def test_stop_ends_what_is_being_sent(source: Bench, serve: Serve) -> None:
    peer = serve(source)
    channel = ask(peer.address, PREFIX * 6)
    channel.receive(10)
    peer.server.stop()
    assert peer.server.num_connections == 0
    channel.close()
    assert_idle(source)


def test_a_connection_that_cannot_be_served_keeps_no_other_out(
    source: Bench, other: Bench, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = serve(source)
    start = threading.Thread.start

    def no_more_threads(thread: threading.Thread) -> None:
        if thread.name == "kv-send":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    fetched, _ = fetch(other, PREFIX, peer.address, connections=1)
    assert fetched.held_chunks == 0
    monkeypatch.undo()
    fetched, _ = fetch(other, PREFIX, peer.address, connections=1)
    assert fetched.held_chunks == len(PREFIX)
    wait_until(lambda: peer.server.num_connections == 0)


def test_stop_waits_for_all_connections_together(
    serve: Serve, source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for one after the other: vLLM kills the replica after five seconds."""
    peer = serve(source)
    channels = [Channel.connect(peer.address, timeout_s=20, connect_s=20) for _ in range(4)]
    wait_until(lambda: peer.server.num_connections == 4)
    now_s, waits_s = [1000.0], list[float]()

    def hang(thread: threading.Thread, timeout: float) -> None:
        waits_s.append(timeout)
        now_s[0] += timeout

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", hang)
        patch.setattr(time, "monotonic", lambda: now_s[0])
        peer.server.stop(2.0)
    assert len(waits_s) >= 4
    assert sum(waits_s) == 2.0
    for channel in channels:
        channel.close()
