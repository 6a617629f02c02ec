"""Engines that serve their chunks, servers that play a peer gone wrong."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cacheengine.record import TransferMeter
from cacheengine.transfer.fetch import Fetch, Fetched
from cacheengine.transfer.protocol import Channel, PeerGoneError, ProtocolError
from cacheengine.transfer.transfer_server import TransferServer
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import Bench, keys, layout, wait_until

TIMEOUT_S = 20.0
PREFIX = keys(*range(40))
LAYOUT = layout().fingerprint()


class Peer:
    """An engine with a transfer server over it."""

    def __init__(self, bench: Bench, **options: Any) -> None:
        self.bench = bench
        self.meter = TransferMeter()
        self.server = TransferServer(bench.engine, ("127.0.0.1", 0), self.meter, **options)
        self.server.start()
        assert self.server.address is not None
        self.address = self.server.address


@pytest.fixture
def source(make_bench: MakeBench) -> Bench:
    bench = make_bench(64)
    bench.store(PREFIX)
    return bench


@pytest.fixture
def other(make_bench: MakeBench) -> Bench:
    return make_bench(64)


Serve = Callable[..., Peer]
Script = Callable[[Channel], None]
Play = Callable[[Script], tuple[str, int]]


def fetch(
    bench: Bench, keys: list[bytes], address: tuple[str, int], **options: Any
) -> tuple[Fetched, TransferMeter]:
    """Fetch into an engine; return how it went and what was counted."""
    meter = TransferMeter()
    return Fetch(bench.engine, keys, address, meter, **options).run(), meter


def assert_idle(bench: Bench) -> None:
    """Nothing is held or reserved, and the books are right."""
    wait_until(lambda: bench.engine.stats().put_queue_bytes == 0)
    bench.clock.advance(3600)  # past every pin
    wait_until(lambda: bench.engine.stats().cpu_held_bytes == 0)
    bench.engine.check()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve an engine until the end of the test."""
    peers: list[Peer] = []

    def make(bench: Bench, **options: Any) -> Peer:
        peers.append(Peer(bench, **options))
        return peers[-1]

    yield make
    for peer in peers:
        peer.server.stop()
        assert peer.server.num_connections == 0
        assert_idle(peer.bench)


@pytest.fixture
def play() -> Iterator[Play]:
    """Listen, and let a script answer each connection; it is closed when the script ends."""
    listening: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def act(connected: socket.socket, script: Script) -> None:
        channel = Channel(connected, TIMEOUT_S)
        try:
            # The other side may leave: its own outcome says whether rightly.
            with contextlib.suppress(OSError, PeerGoneError, ProtocolError):
                script(channel)
        finally:
            channel.close()

    def accept(server: socket.socket, script: Script) -> None:
        while True:
            try:
                connected, _ = server.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=act, args=(connected, script), daemon=True))
            threads[-1].start()

    def make(script: Script) -> tuple[str, int]:
        server = socket.create_server(("127.0.0.1", 0))
        listening.append(server)
        threads.append(threading.Thread(target=accept, args=(server, script), daemon=True))
        threads[-1].start()
        host, port = server.getsockname()
        return host, port

    yield make
    for server in listening:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
    for thread in list(threads):
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
