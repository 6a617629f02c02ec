"""One connection of another replica that fetches chunks from this one.

The chunks are lent by the engine; those below the pool are brought up first.
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

from cacheengine.engine import CacheEngine
from cacheengine.record import TransferMeter
from cacheengine.residency import Promotion
from cacheengine.transfer import protocol
from cacheengine.transfer.protocol import Channel, ChunkProofs, PeerGoneError
from warmroute_common.addresses import join_host_port, listening_family
from warmroute_common.fleet_secret import FleetSecret

_LOANS: Final = 2
"""Gets whose chunks are read from the lower tiers ahead of being sent, the present one included."""
_PIN_S: Final = 10.0
"""How long a chunk that was read for a transfer is kept for it, if it never comes to be sent."""
_ROOM_S: Final = 5.0
"""How long room in a full pool is waited for."""
_SHORTEST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.128


class RequestedChunks:
    """Chunks that were asked for together, held one at a time while they are sent.

    Making one starts to read, without waiting, the chunks that are not in the pool:
    so the next loan is read while this one is sent.
    """

    def __init__(self, engine: CacheEngine, keys: Sequence[bytes], *, timeout_s: float) -> None:
        self.keys = keys
        self._engine = engine
        self._timeout_s = timeout_s
        self._holder = f"loan {uuid.uuid4().hex}"
        self._promoted: frozenset[bytes] = frozenset()
        self._promotion: Promotion | None = None
        below = [key for key in keys if engine.match([key]) != ["cpu"]]
        if below:
            self._promotion = engine.promote(below, pin_s=_PIN_S, holder=self._holder)
            self._promoted = frozenset(below)

    @property
    def is_whole(self) -> bool:
        """Whether each of the chunks is there or has room to be read into."""
        return self._promotion is None or self._promotion.counts.missing == 0

    @contextlib.contextmanager
    def hold(self, key: bytes) -> Iterator[memoryview | None]:
        """Lend a chunk's bytes, held meanwhile; None if there is none to be had."""
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
        """Bring up a chunk by itself.

        It was evicted since the loan was made; or it was not read then, because
        one before it was nowhere or there was no room. Room comes as other
        connections send what they have pinned, so that is waited for.
        """
        deadline_s = time.monotonic() + _ROOM_S
        pause_s = _SHORTEST_PAUSE_S
        while True:
            promotion = self._engine.promote([key], pin_s=_PIN_S, holder=self._holder)
            promotion.wait(self._timeout_s)
            slot = self._hold_promoted(key)
            if slot is not None or not self._engine.match([key]):
                return slot
            if time.monotonic() > deadline_s:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _hold_promoted(self, key: bytes) -> int | None:
        # Not try_hold: this is the use that the pin has waited for. A pin that
        # stayed would let a prefix larger than the pool fill it and get stuck.
        try:
            (slot,) = self._engine.hold([key], holder=self._holder)
        except KeyError:
            return None
        return slot


@dataclass(slots=True, eq=False)
class ChunkSender:
    """Answers gets, in order, until the other side has enough."""

    engine: CacheEngine
    channel: Channel
    meter: TransferMeter
    proofs: ChunkProofs
    key_bytes: int
    timeout_s: float
    _loans: deque[RequestedChunks] = field(default_factory=deque, init=False)
    _ended: bool = field(default=False, init=False)

    def run(self) -> None:
        """Send what is asked for, up to a chunk that is not there.

        Raises what the channel does, and `ProtocolError`.
        """
        while self._receive_gets():
            for key in self._loans[0].keys:
                # So that what is asked for next is read while this is sent.
                self._receive_gets()
                if not self._send(self._loans[0], key):
                    return
            self._loans.popleft()

    def _receive_gets(self) -> bool:
        """Take what is asked for, waiting only with nothing left to send; False at the end."""
        while not self._ended and len(self._loans) < _LOANS:
            # Reading ahead of a loan that found no room would keep the room that
            # it waits for. So a waiting sender has nothing pinned, and no two wait
            # for each other.
            if self._loans and not (self._loans[-1].is_whole and self.channel.has_input()):
                break
            keys = protocol.receive_get(self.channel, self.key_bytes)
            if keys is None:
                self._ended = True
            else:
                self._loans.append(RequestedChunks(self.engine, keys, timeout_s=self.timeout_s))
        return bool(self._loans)

    def _send(self, loan: RequestedChunks, key: bytes) -> bool:
        """Send a chunk; False, and the end, if it is not there."""
        with loan.hold(key) as payload:
            if payload is not None:
                protocol.send_chunk(self.channel, key, payload, self.proofs)
                self.meter.add("sent_chunks")
                self.meter.add("sent_bytes", len(payload))
                return True
        self.meter.add("send_missing")
        protocol.send_missing(self.channel, key, self.key_bytes, self.proofs)
        return False


# TODO of cacheengine.transfer.transfer_server: The side of a replica that others fetch chunks from.

logger = logging.getLogger("vllm.warmroute")

TIMEOUT_S: Final = 30.0
MAX_CONNECTIONS: Final = 16
_REFUSALS: Final = 16
"""How many connections beyond those are answered, with a refusal, at the same time."""
_JOIN_S: Final = 5.0
_REST_S: Final = 0.5
"""Pause after an accept that failed: without descriptors the next one would fail at once."""


class TransferServer:
    """Serves an engine's chunks to other replicas from `start` to `stop`.

    Listens on ``address`` (port 0: any free one) and nowhere else. With a ``secret``
    each peer proves that it knows it, and each chunk is proven to be ours; without
    one any host that reaches the port and knows a prompt's keys can read its KV. There
    is no encryption, so it belongs on a private network.

    A connection beyond ``max_connections`` is refused, one on which nothing
    moves for ``timeout_s`` is closed. `start` raises OSError, naming the
    setting, when the address cannot be listened on; `stop` is idempotent and
    may be called without a start.
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
        # Guards the table, and that a connection which comes while `stop` shuts
        # those there are is either among them or turned away.
        self._lock = threading.Lock()
        self._open: dict[Channel, threading.Thread] = {}
        self.address: tuple[str, int] | None = None
        """Host and port listened on, once started."""

    def start(self) -> None:
        """Listen; returns when connections are taken."""
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

    def stop(self) -> None:
        """Take no more connections, end those there are, wait for their threads."""
        with self._lock:
            self._stopping.set()
            serving = dict(self._open)
            # Under the lock: a thread that is done gives its socket back under it too.
            for channel in serving:
                channel.shut()
        if self._listening is not None:
            # Shut first: closing alone does not wake a thread that accepts.
            self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
            self._listening = None
        for thread in (self._accepting, *serving.values()):
            if thread is not None:
                thread.join(_JOIN_S)

    @property
    def num_connections(self) -> int:
        """Replicas' connections that are open now."""
        with self._lock:
            return len(self._open)

    def _accept(self, listening: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                connected, peer = listening.accept()
            except OSError as error:
                if not self._stopping.is_set():
                    logger.warning("a transfer connection could not be accepted: %s", error)
                    self._stopping.wait(_REST_S)
            else:
                self._take(connected, peer[0])

    def _take(self, connected: socket.socket, peer: str) -> None:
        """Serve a connection, or close it: whatever happens, others are accepted after it."""
        try:
            self._open_channel(Channel(connected, self._timeout_s), peer)
        except (OSError, RuntimeError) as error:  # RuntimeError: no more threads to be had
            connected.close()
            self._meter.add("send_failures")
            logger.warning("a transfer connection of %s could not be served: %s", peer, error)

    def _open_channel(self, channel: Channel, peer: str) -> None:
        with self._lock:
            others = len(self._open)
            is_taken = others < self._max_connections + _REFUSALS and not self._stopping.is_set()
            if is_taken:
                thread = threading.Thread(
                    target=self._serve_and_close,
                    args=(channel, peer, others >= self._max_connections),
                    name="kv-send",
                    daemon=True,
                )
                # Under the lock, so that `stop` never joins one not started, and
                # that one which ends at once finds itself noted.
                thread.start()
                self._open[channel] = thread
        if not is_taken:
            self._meter.add("send_refused")
            channel.close()

    def _serve_and_close(self, channel: Channel, peer: str, is_too_many: bool) -> None:
        try:
            self._serve(channel, peer, is_too_many)
        except (OSError, PeerGoneError, protocol.ProtocolError) as error:
            if not self._stopping.is_set():
                self._meter.add("send_failures")
                logger.warning("sending chunks to %s ended: %s", peer, error)
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
            reason = f"{self._max_connections} connections are served already; try again later"
        if reason is not None:
            protocol.refuse(channel, reason)
            self._meter.add("send_refused")
            logger.warning("chunks were refused to %s: %s", peer, reason)
            return
        proofs = protocol.welcome(channel, hello, self._secret)
        ChunkSender(
            *(self._engine, channel, self._meter),
            proofs=proofs,
            key_bytes=hello.key_bytes,
            timeout_s=self._timeout_s,
        ).run()
