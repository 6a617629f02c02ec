"""Room for chunks that come from another replica, and what becomes of them there.

The one place where a transfer's reservations and holds are taken and given
back, whatever ends it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cacheengine.engine import CacheEngine
from cacheengine.record import TransferMeter
from cacheengine.transfer import protocol
from cacheengine.transfer.protocol import Channel, ChunkProofs, PeerGoneError
from warmroute_common.addresses import join_host_port
from warmroute_common.fleet_secret import FleetSecret

_SHORTEST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.256


@dataclass(slots=True, eq=False)
class Window:
    """Some of the chunks, in prefix order, with room reserved for each."""

    keys: Sequence[bytes]
    slots: Sequence[int]
    arrived: list[bytes] = field(default_factory=list)
    """Chunks whose bytes are whole; the receiver adds them."""


class FetchWindows:
    """Lends room for ``keys`` a window at a time, and publishes what has arrived.

    Chunks that the engine has, or is getting otherwise, are left out. With
    ``tier`` "cpu" what has arrived is held until `close`, so that the end of
    a long prefix does not evict its beginning. For a lower tier the engine
    writes it there as it does with all that is stored; windows then follow
    each other only as fast as that goes. ``prefetched``: a request is to use
    them, and it counts if none does. Thread-safe.
    """

    def __init__(
        self,
        engine: CacheEngine,
        keys: Sequence[bytes],
        *,
        tier: str,
        window_chunks: int,
        prefetched: bool = False,
    ) -> None:
        self._engine = engine
        self._tier = tier
        self._prefetched = prefetched
        self._window_chunks = window_chunks
        # Guards all below: the connections of one transfer share it.
        self._lock = threading.Lock()
        self._left = deque(keys)
        self._held: list[bytes] = []
        self._stopped = False
        self.no_room = False
        """Whether it ended for want of room."""
        self.received_chunks = 0
        """Chunks completed so far."""

    @property
    def windows_left(self) -> int:
        """How many windows there are at least to be reserved."""
        with self._lock:
            return -(-len(self._left) // self._window_chunks)

    def reserve(self) -> Window | None:
        """Return the next window; None when there is none, no room, or after `stop`."""
        with self._lock:
            while self._left and not self._stopped:
                window = self._reserve()
                if window is None:
                    self.no_room = self._stopped = True
                elif window.keys:
                    return window
        return None

    def _reserve(self) -> Window | None:
        """Return the next window, without keys if what was next is there; None: no room."""
        size = min(self._window_chunks, len(self._left))
        keys = [self._left[position] for position in range(size)]
        reservation = self._engine.prepare_store(keys)
        if reservation is None:
            return None
        if reservation.keys:
            # Of those after the last reserved it is not told which are there
            # and which found no room: they are the beginning of the next window.
            size = keys.index(reservation.keys[-1]) + 1
        for _ in range(size):
            self._left.popleft()
        return Window(reservation.keys, reservation.slots)

    def complete(self, window: Window) -> None:
        """Publish what of a window has arrived, and give the rest's room back."""
        arrived = window.arrived
        whole = set(arrived)
        lost = [key for key in window.keys if key not in whole]
        if lost:
            self._engine.complete_store(lost, success=False)
        if arrived:
            self._engine.complete_store(arrived, prefetched=self._prefetched)
        if self._tier == "cpu":
            # One that was evicted or cleared in between is simply not held.
            held = [key for key in arrived if self._engine.try_hold(key) is not None]
        else:
            held = []
            self._wait_for_puts(arrived)
        with self._lock:
            self._held += held
            self.received_chunks += len(arrived)

    def _wait_for_puts(self, keys: Sequence[bytes]) -> None:
        """Return when none of these is on its way down; lend no more if one was dropped."""
        pause_s = _SHORTEST_PAUSE_S
        while self._engine.is_putting(keys, self._tier):
            with self._lock:
                if self._stopped:
                    return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if self._engine.held_in(keys, self._tier) < len(keys):
            self.stop()

    def stop(self) -> None:
        """Lend no more windows; those lent are still to be completed."""
        with self._lock:
            self._stopped = True

    def close(self) -> None:
        """Let go of what was held. Idempotent; all windows have been completed."""
        with self._lock:
            held, self._held = self._held, []
            self._stopped = True
        self._engine.release(held)


# TODO of cacheengine.transfer.fetch: The side of a replica that fetches chunks from another.

logger = logging.getLogger("vllm.warmroute")

CONNECTIONS: Final = 2
TIMEOUT_S: Final = 30.0
_CONNECT_S: Final = 5.0
_GETS_AHEAD: Final = 2
"""Windows that one connection has asked for and not received whole."""
_WINDOW_BYTES: Final = 16 * 1024**2
_POOL_SHARE: Final = 4
"""All windows together take at most this part of the pool: a quarter."""
_SLICE_S: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """How a fetch ended."""

    held_chunks: int
    """Leading chunks held now, also from before: in the wanted tier if it is a lower
    one, else in any."""
    received_chunks: int
    """Chunks that came from the other replica."""
    received_bytes: int
    error: str = ""
    """Why not all are held; empty if they are."""


class Fetch:
    """Brings the chunks of a prefix from another replica into a tier of this engine.

    ``keys`` in prefix order, all of one length. ``peer`` is where the other
    replica's `TransferServer` listens. What has arrived in the cpu tier is
    pinned for ``pin_s`` from the moment it is complete. With a ``secret`` only a
    peer that proves it is taken for one, and only what it has sent itself is kept.

    `run` blocks, and may be called once; `cancel` ends it early from any
    thread, and the counts may be read at any time.
    """

    def __init__(
        self,
        engine: CacheEngine,
        keys: Sequence[bytes],
        peer: tuple[str, int],
        meter: TransferMeter,
        *,
        tier: str = "cpu",
        pin_s: float = 0.0,
        secret: FleetSecret | None = None,
        connections: int = CONNECTIONS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._engine = engine
        self._keys = list(keys)
        self._peer = peer
        self._meter = meter
        self._tier = tier
        self._pin_s = pin_s
        self._secret = secret
        self._timeout_s = timeout_s
        # A lower tier takes one window after the other: see `FetchWindows`.
        self._connections = connections if tier == "cpu" else 1
        self._gets_ahead = _GETS_AHEAD if tier == "cpu" else 1
        held_before = len(engine.match(keys)) if tier == "cpu" else engine.held_in(keys, tier)
        self._arrivals = FetchWindows(
            engine,
            self._keys[held_before:],
            tier=tier,
            window_chunks=self._window_chunks(),
            prefetched=tier == "cpu" and pin_s > 0,
        )
        # Guards the three below: connections are opened while `cancel` shuts
        # those there are, and each notes how it ended.
        self._lock = threading.Lock()
        self._open: set[Channel] = set()
        self._errors: list[str] = []
        self._cancelled = threading.Event()

    def _window_chunks(self) -> int:
        layout = self._engine.layout
        pool_chunks = self._engine.tier_info()["cpu"].capacity_bytes // layout.chunk_bytes
        at_once = self._connections * self._gets_ahead
        most = min(protocol.MAX_GET_KEYS, pool_chunks // (_POOL_SHARE * at_once))
        return max(1, min(most, _WINDOW_BYTES // layout.chunk_bytes))

    @property
    def received_chunks(self) -> int:
        """Chunks that have come so far."""
        return self._arrivals.received_chunks

    def run(self) -> Fetched:
        """Fetch; never raises for what the other side or the network does."""
        try:
            self._receive_all()
            held = self._settle()
        finally:
            self._arrivals.close()
        received = self._arrivals.received_chunks
        return Fetched(
            held_chunks=held,
            received_chunks=received,
            received_bytes=received * self._engine.layout.chunk_bytes,
            error="" if held == len(self._keys) else self._why_not_all(held),
        )

    def cancel(self) -> None:
        """End `run` soon; what has arrived stays."""
        self._arrivals.stop()
        with self._lock:
            self._cancelled.set()
            for channel in self._open:
                channel.shut()

    def _receive_all(self) -> None:
        wanted = min(self._connections, self._arrivals.windows_left)
        others = [
            threading.Thread(target=self._receive_some, name="kv-fetch", daemon=True)
            for _ in range(wanted - 1)
        ]
        for thread in others:
            thread.start()
        if wanted:
            self._receive_some()
        for thread in others:
            thread.join()

    def _receive_some(self) -> None:
        """Fetch windows over one connection until there are no more."""
        asked: deque[Window] = deque()
        channel: Channel | None = None
        try:
            channel = self._connect()
            self._converse(channel, asked)
        except (OSError, PeerGoneError, protocol.ProtocolError) as error:
            self._meter.add("receive_failures")
            self._meter.add("receive_corrupt", isinstance(error, protocol.DamagedError))
            where = join_host_port(*self._peer)
            self._note(f"{where}: {error or type(error).__name__}")
            if asked:  # what comes after a gap is of no use
                self._arrivals.stop()
        except Exception as error:  # on the other threads it would be lost
            logger.exception("fetching chunks failed")
            self._note(f"{type(error).__name__}: {error}")
            self._arrivals.stop()
        finally:
            for window in asked:
                self._arrivals.complete(window)
            if channel is not None:
                with self._lock:
                    self._open.remove(channel)
                    channel.close()

    def _connect(self) -> Channel:
        channel = Channel.connect(
            self._peer, timeout_s=self._timeout_s, connect_s=min(_CONNECT_S, self._timeout_s)
        )
        with self._lock:
            self._open.add(channel)
            if self._cancelled.is_set():
                channel.shut()
        return channel

    def _converse(self, channel: Channel, asked: deque[Window]) -> None:
        """Ask ahead, receive in order; leaves in ``asked`` what is not completed."""
        layout = self._engine.layout.fingerprint()
        proofs = protocol.greet(channel, layout, len(self._keys[0]), self._secret)
        while True:
            while len(asked) < self._gets_ahead:
                window = self._arrivals.reserve()
                if window is None:
                    break
                asked.append(window)
                protocol.send_get(channel, window.keys)
            if not asked:
                return
            if not self._receive(channel, asked[0], proofs):
                self._arrivals.stop()
                return
            self._arrivals.complete(asked.popleft())

    def _receive(self, channel: Channel, window: Window, proofs: ChunkProofs) -> bool:
        """Receive a window's chunks; False at one that the source does not have."""
        for key, slot in zip(window.keys, window.slots, strict=True):
            payload = self._engine.view(slot)
            if not protocol.receive_chunk(channel, key, payload, proofs):
                self._note("the source does not have all of it any more")
                return False
            window.arrived.append(key)
            self._meter.add("received_chunks")
            self._meter.add("received_bytes", len(payload))
        return True

    def _note(self, error: str) -> None:
        with self._lock:
            self._errors.append(error)

    def _settle(self) -> int:
        """Pin what is there, wait for what another call is bringing; return how much is held.

        Before the holds of the arrivals end, so that nothing evicts them in between.
        """
        if self._tier != "cpu":
            return self._engine.held_in(self._keys, self._tier)
        promotion = self._engine.promote(self._keys, pin_s=self._pin_s)
        deadline_s = time.monotonic() + self._timeout_s
        while not (promotion.wait(_SLICE_S) or self._cancelled.is_set()):
            if time.monotonic() > deadline_s:
                break
        return len(self._engine.match(self._keys))

    def _why_not_all(self, held: int) -> str:
        lacking = len(self._keys) - held
        if self._cancelled.is_set():
            return f"given up with {lacking} chunks to come: this replica stops"
        if self._errors:
            return self._errors[0]
        if self._arrivals.no_room:
            return f"the cpu tier here has no room for the last {lacking} chunks"
        return f"the {self._tier} tier here did not take the last {lacking} chunks"
