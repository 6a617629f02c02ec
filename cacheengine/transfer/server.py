"""The side of a replica that others fetch chunks from."""

import logging
import socket
import threading
from typing import Final

from cacheengine.engine import CacheEngine
from cacheengine.record import TransferMeter
from cacheengine.transfer import protocol
from cacheengine.transfer.channel import Channel, PeerGoneError
from cacheengine.transfer.sender import Sender
from warmroute_common.addresses import join_host_port, listening_family
from warmroute_common.fleet_secret import FleetSecret

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
        Sender(
            *(self._engine, channel, self._meter),
            proofs=proofs,
            key_bytes=hello.key_bytes,
            timeout_s=self._timeout_s,
        ).run()
