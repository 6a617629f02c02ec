"""The TCP server from which other replicas fetch this replica's chunks.

`TransferServer` accepts connections, a thread each. `ChunkSender` answers the gets of one
connection in order. `RequestedChunks` holds the chunks of one get in the pool while they are sent;
chunks in lower tiers are promoted first, while the previous get is still being sent.
"""

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cacheengine.engine.engine import CacheEngine
from cacheengine.record import TransferMeter
from cacheengine.residency.decisions import Promotion
from cacheengine.transfer import protocol
from cacheengine.transfer.protocol import Channel, ChunkDigests, PeerGoneError
from warmroute_common.addresses import join_host_port, listening_family
from warmroute_common.fleet_secret import FleetSecret

logger = logging.getLogger("vllm.warmroute")

TIMEOUT_S: Final = 30.0
MAX_CONNECTIONS: Final = 16
_MAX_REFUSALS: Final = 16
"""Connections beyond `MAX_CONNECTIONS` that get a refusal at the same time; others are closed."""
_JOIN_S: Final = 5.0
_ACCEPT_PAUSE_S: Final = 0.5
"""Pause after a failed accept: without free descriptors the next one would fail at once."""
_MAX_GETS: Final = 2
"""Gets that are read from the lower tiers at the same time, including the one being sent."""
_PIN_S: Final = 10.0
"""How long a chunk that was promoted for a transfer stays pinned if it is never sent."""
_FREE_SLOT_S: Final = 5.0
"""How long to wait for a free slot in a full pool."""
_MIN_PAUSE_S: Final = 0.002
_MAX_PAUSE_S: Final = 0.128


class RequestedChunks:
    """The chunks of one get, held one at a time while they are sent.

    The constructor starts, without waiting, the promotion of chunks that are not in the pool: so
    the next get is read while this one is sent.
    """

    def __init__(self, engine: CacheEngine, keys: Sequence[bytes], *, timeout_s: float) -> None:
        self.keys = keys
        self._engine = engine
        self._timeout_s = timeout_s
        self._holder = f"get {uuid.uuid4().hex}"
        self._promoted: frozenset[bytes] = frozenset()
        self._promotion: Promotion | None = None
        below = [key for key in keys if engine.match([key]) != ["cpu"]]
        if below:
            self._promotion = engine.promote(below, pin_s=_PIN_S, holder=self._holder)
            self._promoted = frozenset(below)

    @property
    def is_whole(self) -> bool:
        """Whether each of the chunks is in the pool or has a slot to be read into."""
        return self._promotion is None or self._promotion.counts.missing == 0

    def leave(self) -> None:
        """Give up the reads of chunks that will not be sent, and end their pins."""
        self._engine.leave(self.keys, self._holder)

    @contextlib.contextmanager
    def hold(self, key: bytes) -> Iterator[memoryview | None]:
        """Hold a chunk and yield its bytes; None if the engine no longer has it."""
        slot = self._hold(key)
        if slot is None:
            yield None
            return
        try:
            yield self._engine.view(slot)
        finally:
            self._engine.release([key])

    def _hold(self, key: bytes) -> int | None:
        if key in self._promoted:
            assert self._promotion is not None
            self._promotion.wait(self._timeout_s)
            slot = self._hold_promoted(key)
        else:
            slot = self._engine.try_hold(key)
        if slot is not None:
            return slot
        return self._promote_and_hold(key)

    def _promote_and_hold(self, key: bytes) -> int | None:
        """Promote a single chunk, and hold it.

        Either it was evicted meanwhile, or the constructor could not promote it: an earlier chunk
        was missing, or the pool was full. Slots become free as other connections send the chunks
        that they have pinned, so this waits for one.
        """
        deadline_s = time.monotonic() + _FREE_SLOT_S
        pause_s = _MIN_PAUSE_S
        while True:
            promotion = self._engine.promote([key], pin_s=_PIN_S, holder=self._holder)
            promotion.wait(self._timeout_s)
            slot = self._hold_promoted(key)
            if slot is not None or not self._engine.match([key]):
                return slot
            if time.monotonic() > deadline_s:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _hold_promoted(self, key: bytes) -> int | None:
        # Not try_hold: `hold` also ends this holder's pin. If pins stayed, a prefix larger than the
        # pool would fill it, and the transfer would get stuck.
        try:
            (slot,) = self._engine.hold([key], holder=self._holder)
        except KeyError:
            return None
        return slot


@dataclass(slots=True, eq=False)
class ChunkSender:
    """Answers the gets of one connection in order, until the peer closes it."""

    engine: CacheEngine
    channel: Channel
    meter: TransferMeter
    digests: ChunkDigests
    key_bytes: int
    timeout_s: float
    _gets: deque[RequestedChunks] = field(default_factory=deque, init=False)
    _ended: bool = field(default=False, init=False)

    def run(self) -> None:
        """Send the requested chunks, up to the first missing one.

        Raises the channel's exceptions and `ProtocolError`.
        """
        try:
            while self._receive_gets():
                for key in self._gets[0].keys:
                    # The next get is received here, so that it is read while this one is sent.
                    self._receive_gets()
                    if not self._send(self._gets[0], key):
                        return
                self._gets.popleft()
        finally:
            for get in self._gets:
                get.leave()

    def _receive_gets(self) -> bool:
        """Receive gets, waiting only if nothing is left to send; return False at the end."""
        while not self._ended and len(self._gets) < _MAX_GETS:
            # To read ahead of a get that found the pool full would take the slots that it waits
            # for. So a waiting sender pins nothing, and no two senders wait for each other.
            if self._gets and not (self._gets[-1].is_whole and self.channel.has_input()):
                break
            keys = protocol.receive_get(self.channel, self.key_bytes)
            if keys is None:
                self._ended = True
            else:
                self._gets.append(RequestedChunks(self.engine, keys, timeout_s=self.timeout_s))
        return bool(self._gets)

    def _send(self, get: RequestedChunks, key: bytes) -> bool:
        """Send a chunk; if it is missing, report that and return False."""
        with get.hold(key) as payload:
            if payload is not None:
                protocol.send_chunk(self.channel, key, payload, self.digests)
                self.meter.add("sent_chunks")
                self.meter.add("sent_bytes", len(payload))
                return True
        self.meter.add("send_missing")
        protocol.send_missing(self.channel, key, self.key_bytes, self.digests)
        return False


class TransferServer:
    """Serves an engine's chunks to other replicas from `start` to `stop`.

    Listens on ``address`` only; port 0 means any free port. With a ``secret`` each peer must prove
    that it knows it, and each chunk is authenticated. Without one, any host that reaches the port
    and knows a prompt's keys can read its KV. Nothing is encrypted, so use a private network.

    Connections beyond ``max_connections`` are refused, and idle ones are closed after
    ``timeout_s``. `start` raises OSError, which names the setting, if it cannot listen on the
    address. `stop` is idempotent and may be called without a start.
    """

    def __init__(
        self,
        engine: CacheEngine,
        address: tuple[str, int],
        meter: TransferMeter,
        *,
        secret: FleetSecret | None = None,
        timeout_s: float = TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._engine = engine
        self._wanted = address
        self._meter = meter
        self._secret = secret
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._layout = engine.layout.fingerprint()
        self._listening: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._stopping = threading.Event()
        # Guards the table: a connection that arrives while `stop` shuts the open ones is either
        # among them or refused.
        self._lock = threading.Lock()
        self._open: dict[Channel, threading.Thread] = {}
        self.address: tuple[str, int] | None = None
        """The host and port that it listens on, once started."""

    def start(self) -> None:
        """Listen; returns when connections are accepted."""
        host, port = self._wanted
        try:
            family = listening_family(host, port)
            self._listening = socket.create_server(
                (host, port), family=family, dualstack_ipv6=host == "::"
            )
        except OSError as error:
            where = join_host_port(host, port)
            raise OSError(f"distributed_url: cannot listen on {where}: {error}") from error
        self.address = self._listening.getsockname()[:2]
        self._accepting = threading.Thread(
            target=self._accept, args=(self._listening,), name="kv-serve", daemon=True
        )
        self._accepting.start()
        logger.info(
            "Warmroute serves chunks to other replicas on %s", join_host_port(*self.address)
        )

    def stop(self, timeout_s: float = _JOIN_S) -> None:
        """Stop listening, close all connections; wait ``timeout_s`` for all threads together."""
        ends_s = time.monotonic() + timeout_s
        with self._lock:
            self._stopping.set()
            serving = dict(self._open)
            # Under the lock, because a finished thread closes its channel under it too.
            for channel in serving:
                channel.shut()
        if self._listening is not None:
            # Shut down first: closing alone does not wake a thread in accept().
            self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
            self._listening = None
        for thread in (self._accepting, *serving.values()):
            if thread is not None:
                thread.join(max(0.0, ends_s - time.monotonic()))

    @property
    def num_connections(self) -> int:
        """The number of open connections."""
        with self._lock:
            return len(self._open)

    def _accept(self, listening: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                connected, peer = listening.accept()
            except OSError as error:
                if not self._stopping.is_set():
                    logger.warning("could not accept a transfer connection: %s", error)
                    self._stopping.wait(_ACCEPT_PAUSE_S)
            else:
                self._take(connected, peer[0])

    def _take(self, connected: socket.socket, peer: str) -> None:
        """Serve a connection, or close it; errors do not stop the accepting thread."""
        try:
            self._open_channel(Channel(connected, self._timeout_s), peer)
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            connected.close()
            self._meter.add("send_failures")
            logger.warning("could not serve a transfer connection from %s: %s", peer, error)

    def _open_channel(self, channel: Channel, peer: str) -> None:
        with self._lock:
            others = len(self._open)
            limit = self._max_connections + _MAX_REFUSALS
            is_accepted = others < limit and not self._stopping.is_set()
            if is_accepted:
                thread = threading.Thread(
                    target=self._serve_and_close,
                    args=(channel, peer, others >= self._max_connections),
                    name="kv-send",
                    daemon=True,
                )
                # Under the lock, so that `stop` never joins a thread before its start, and so that
                # a thread that ends at once finds itself in the table.
                thread.start()
                self._open[channel] = thread
        if not is_accepted:
            self._meter.add("send_refused")
            channel.close()

    def _serve_and_close(self, channel: Channel, peer: str, is_too_many: bool) -> None:
        try:
            self._serve(channel, peer, is_too_many)
        except (OSError, PeerGoneError, protocol.ProtocolError) as error:
            if not self._stopping.is_set():
                self._meter.add("send_failures")
                logger.warning("sending chunks to %s failed: %s", peer, error)
        except Exception:
            self._meter.add("send_failures")
            logger.exception("sending chunks to %s failed", peer)
        finally:
            with self._lock:
                del self._open[channel]
                channel.close()

    def _serve(self, channel: Channel, peer: str, is_too_many: bool) -> None:
        hello = protocol.receive_hello(channel, self._layout, self._secret)
        reason = hello.refusal
        if is_too_many and reason is None:
            reason = f"all {self._max_connections} connections are in use; try again later"
        if reason is not None:
            protocol.refuse(channel, reason)
            self._meter.add("send_refused")
            logger.warning("refused to send chunks to %s: %s", peer, reason)
            return
        digests = protocol.welcome(channel, hello, self._secret)
        ChunkSender(
            *(self._engine, channel, self._meter),
            digests=digests,
            key_bytes=hello.key_bytes,
            timeout_s=self._timeout_s,
        ).run()
