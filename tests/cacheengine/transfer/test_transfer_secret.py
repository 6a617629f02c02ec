"""With a fleet secret only chunks of a peer that knows it are taken, and only it is given any."""

import struct
import threading
from collections.abc import Callable

import pytest

from cacheengine.transfer import protocol
from cacheengine.transfer.protocol import (
    PROOF_BYTES,
    Channel,
    Checksums,
    ChunkDigests,
    Handshake,
    KeyedDigests,
)
from tests.cacheengine.helpers import CHUNK_BYTES, Bench, payload, wait_until
from tests.cacheengine.transfer.conftest import (
    LAYOUT,
    PREFIX,
    Play,
    Script,
    Serve,
    assert_idle,
    fetch,
)
from warmroute_common.fleet_secret import FleetSecret

SECRET = FleetSecret("known to the fleet".replace(" ", "-"))
OTHER = FleetSecret("of-another-fleet-altogether")
EVIL = b"\x66" * CHUNK_BYTES


def test_chunks_travel_between_those_that_know_it(
    source: Bench, other: Bench, serve: Serve
) -> None:
    peer = serve(source, secret=SECRET)
    fetched, meter = fetch(other, PREFIX, peer.address, secret=SECRET)
    assert (fetched.held_chunks, fetched.error) == (40, "")
    assert other.has_right_bytes(PREFIX)
    assert meter.stats().receive_corrupt == 0


def test_a_chunk_that_is_missing_is_told_with_proof(
    source: Bench, other: Bench, serve: Serve
) -> None:
    source.engine.clear(keys=PREFIX[9:])
    peer = serve(source, secret=SECRET)
    fetched, meter = fetch(other, PREFIX, peer.address, secret=SECRET, connections=1)
    assert fetched.held_chunks == 9
    assert "the source no longer has all of the chunks" in fetched.error
    assert meter.stats().receive_failures == 0


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ((None, SECRET), "the fleet secret: this replica has none; set fleet_secret_file"),
        ((SECRET, None), "the fleet secret: this replica requires it; set fleet_secret_file"),
        ((OTHER, SECRET), "the source does not know the fleet secret"),
    ],
)
def test_strangers_get_and_give_nothing(
    source: Bench,
    other: Bench,
    serve: Serve,
    known: tuple[FleetSecret | None, FleetSecret | None],
    message: str,
) -> None:
    theirs, ours = known
    peer = serve(source, secret=theirs)
    fetched, _ = fetch(other, PREFIX, peer.address, secret=ours)
    assert fetched.held_chunks == 0
    assert message in fetched.error
    assert other.engine.match(PREFIX) == []
    assert peer.meter.stats().sent_chunks == 0
    wait_until(lambda: peer.server.num_connections == 0)


def rogue(greets: Callable[[Channel, protocol.Hello], None], digests: ChunkDigests) -> Script:
    """Play a source that greets in its own way, and sends bytes of its choosing under any key."""

    def script(channel: Channel) -> None:
        hello = protocol.receive_hello(channel, LAYOUT, SECRET)
        greets(channel, hello)
        if channel.receive_or_end(PROOF_BYTES) is None:
            return
        while (asked := protocol.receive_get(channel, hello.key_bytes)) is not None:
            for key in asked:
                protocol.send_chunk(channel, key, memoryview(EVIL), digests)

    return script


def without_a_secret(channel: Channel, hello: protocol.Hello) -> None:
    protocol.welcome(channel, hello, None)


def with_the_nonce_sent_back(channel: Channel, hello: protocol.Hello) -> None:
    """The proof of the other side is of another kind: what it says proves nothing of us."""
    own = hello.message[-32:]
    proof = Handshake(OTHER, hello.message + own).peer_proof()
    channel.send(struct.pack(">4sHH", b"WRKV", 0, 0) + own + proof)


@pytest.mark.parametrize("greets", [without_a_secret, with_the_nonce_sent_back])
def test_a_forged_chunk_of_a_rogue_source_is_refused(
    other: Bench, play: Play, greets: Callable[[Channel, protocol.Hello], None]
) -> None:
    address = play(rogue(greets, Checksums()))
    fetched, _ = fetch(other, PREFIX, address, secret=SECRET)
    assert fetched.held_chunks == 0
    assert "the source does not know the fleet secret" in fetched.error
    assert other.engine.match(PREFIX) == []
    assert_idle(other)


def test_without_a_secret_the_rogue_would_succeed(other: Bench, play: Play) -> None:
    """So the other tests here can fail: its chunks are whole in all but their origin."""

    def script(channel: Channel) -> None:
        hello = protocol.receive_hello(channel, LAYOUT, None)
        digests = protocol.welcome(channel, hello, None)
        while (asked := protocol.receive_get(channel, hello.key_bytes)) is not None:
            for key in asked:
                protocol.send_chunk(channel, key, memoryview(EVIL), digests)

    fetched, _ = fetch(other, PREFIX, play(script))
    assert fetched.held_chunks == 40
    (slot,) = other.engine.hold(PREFIX[:1])
    assert bytes(other.engine.view(slot)) == EVIL
    other.engine.release(PREFIX[:1])


@pytest.mark.parametrize(
    "digests",
    [Checksums(), KeyedDigests(OTHER.key("chunks")), KeyedDigests(SECRET.key("transfer"))],
)
def test_a_chunk_forged_in_the_middle_of_a_true_connection_is_refused(
    other: Bench, play: Play, digests: ChunkDigests
) -> None:
    """As by a machine between the two, which has seen all and knows all but the secret."""

    def script(channel: Channel) -> None:
        hello = protocol.receive_hello(channel, LAYOUT, SECRET)
        true = protocol.welcome(channel, hello, SECRET)
        number = 0
        while (asked := protocol.receive_get(channel, hello.key_bytes)) is not None:
            for key in asked:
                forged = number == 7
                sent = EVIL if forged else payload(key)
                protocol.send_chunk(channel, key, memoryview(sent), digests if forged else true)
                number += 1

    fetched, meter = fetch(other, PREFIX, play(script), secret=SECRET, connections=1)
    assert fetched.held_chunks == 7
    assert "a chunk was damaged on the way, or forged" in fetched.error
    assert meter.stats().receive_corrupt == 1
    assert other.has_right_bytes(PREFIX[:7])
    assert other.engine.match(PREFIX) == ["cpu"] * 7
    assert_idle(other)


def test_a_true_chunk_proves_no_other_key_and_no_other_connection(
    source: Bench, serve: Serve
) -> None:
    """What was recorded of one connection is worth nothing on the next, nor for another key."""
    peer = serve(source, secret=SECRET)
    recorded = []
    for _ in range(2):
        channel = Channel.connect(peer.address, timeout_s=20, connect_s=20)
        protocol.greet(channel, LAYOUT, 32, SECRET)
        protocol.send_get(channel, PREFIX[:1])
        recorded.append(channel.receive(10 + PROOF_BYTES + 32 + CHUNK_BYTES))
        channel.close()
    assert recorded[0][:10] == recorded[1][:10]
    assert recorded[0][10:42] != recorded[1][10:42]
    assert recorded[0][42:] == recorded[1][42:]
    digests = KeyedDigests(bytes(32))
    chunk = memoryview(payload(PREFIX[0]))
    assert digests.of(PREFIX[0], chunk) != digests.of(PREFIX[1], chunk)


def test_a_peer_that_does_not_prove_it_has_nothing_read_for_it(source: Bench, serve: Serve) -> None:
    """It greets as if it knew it, and then proves another's."""
    peer = serve(source, secret=SECRET)
    channel = Channel.connect(peer.address, timeout_s=20, connect_s=20)
    hello = struct.pack(">4sHH32s", b"WRKV", 2, 32, LAYOUT.encode()) + b"\x01" * 32
    channel.send(hello)
    welcome = channel.receive(8 + 32 + PROOF_BYTES)
    channel.send(Handshake(OTHER, hello + welcome[8:40]).peer_proof())
    with pytest.MonkeyPatch.context() as patch:
        asked = threading.Event()
        patch.setattr(source.engine, "promote", lambda *args, **kw: asked.set())
        patch.setattr(source.engine, "try_hold", lambda *args, **kw: asked.set())
        assert channel.receive_or_end(1) is None
        assert not asked.is_set()
    channel.close()
    wait_until(lambda: peer.meter.stats().send_failures == 1)
    assert peer.meter.stats().sent_chunks == 0
