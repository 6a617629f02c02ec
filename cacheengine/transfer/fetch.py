"""Fetching chunks from another replica into a tier of this engine.

`FetchWindows` takes and releases the slots and holds of one fetch, however the fetch ends. `Fetch`
opens the connections, requests one window of chunks after another, and receives them directly into
the reserved slots. What has arrived stays, even if the rest fails.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cacheengine.engine.engine import CacheEngine
from cacheengine.record import TransferMeter
from cacheengine.transfer import protocol
from cacheengine.transfer.protocol import Channel, ChunkDigests, PeerGoneError
from warmroute_common.addresses import join_host_port
from warmroute_common.fleet_secret import FleetSecret

logger = logging.getLogger("vllm.warmroute")

CONNECTIONS: Final = 2
TIMEOUT_S: Final = 30.0
_CONNECT_S: Final = 5.0
_GETS_AHEAD: Final = 2
"""Windows per connection that are requested but not completely received."""
_WINDOW_BYTES: Final = 16 * 1024**2
_MAX_POOL_FRACTION: Final = 4
"""All windows together use at most this fraction of the pool: a quarter."""
_WAIT_SLICE_S: Final = 0.2
_MIN_PAUSE_S: Final = 0.002
_MAX_PAUSE_S: Final = 0.256


@dataclass(slots=True, eq=False)
class Window:
    """Consecutive chunks of a prefix, each with a reserved slot."""

    keys: Sequence[bytes]
    slots: Sequence[int]
    arrived: list[bytes] = field(default_factory=list)
    """Chunks that were completely received; the receiver adds them."""


class FetchWindows:
    """Reserves slots for ``keys``, a window at a time, and publishes the chunks that arrived.

    Leaves out chunks that the engine has or is already loading. With ``tier`` "cpu" the arrived
    chunks are held until `close`, so that the end of a long prefix does not evict its beginning.
    With a lower tier the engine writes them there like all stored chunks, and the next window waits
    for that write. ``prefetched`` chunks are counted as unused if no request uses them.
    Thread-safe.
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
        # Guards everything below: all connections of one fetch use this object.
        self._lock = threading.Lock()
        self._left = deque(keys)
        self._held: list[bytes] = []
        self._stopped = False
        self.pool_is_full = False
        """Whether reserving stopped because the pool had no free slot."""
        self.received_chunks = 0
        """Chunks completed so far."""

    @property
    def windows_left(self) -> int:
        """The least number of windows that are still to be reserved."""
        with self._lock:
            return -(-len(self._left) // self._window_chunks)

    def reserve(self) -> Window | None:
        """Return the next window; None at the end, if the pool is full, or after `stop`."""
        with self._lock:
            while self._left and not self._stopped:
                window = self._reserve()
                if window is None:
                    self.pool_is_full = self._stopped = True
                elif window.keys:
                    return window
        return None

    def _reserve(self) -> Window | None:
        """Return the next window, empty if all is here already; None if the pool is full."""
        size = min(self._window_chunks, len(self._left))
        keys = [self._left[position] for position in range(size)]
        reservation = self._engine.prepare_store(keys)
        if reservation is None:
            return None
        if reservation.keys:
            # The keys after the last reserved one are either here already or found no slot. The
            # engine does not say which, so the next window begins with them.
            size = keys.index(reservation.keys[-1]) + 1
        for _ in range(size):
            self._left.popleft()
        return Window(reservation.keys, reservation.slots)

    def complete(self, window: Window) -> None:
        """Publish the window's arrived chunks, and free the slots of the others."""
        arrived = window.arrived
        arrived_keys = set(arrived)
        missing = [key for key in window.keys if key not in arrived_keys]
        if missing:
            self._engine.complete_store(missing, success=False)
        if arrived:
            self._engine.complete_store(arrived, prefetched=self._prefetched)
        if self._tier == "cpu":
            # A chunk that was evicted or cleared meanwhile is not held.
            held = [key for key in arrived if self._engine.try_hold(key) is not None]
        else:
            held = []
            self._wait_for_puts(arrived)
        with self._lock:
            self._held += held
            self.received_chunks += len(arrived)

    def _wait_for_puts(self, keys: Sequence[bytes]) -> None:
        """Wait until the tier has written these chunks; stop reserving if one was dropped."""
        pause_s = _MIN_PAUSE_S
        while self._engine.is_putting(keys, self._tier):
            with self._lock:
                if self._stopped:
                    return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        if self._engine.held_in(keys, self._tier) < len(keys):
            self.stop()

    def stop(self) -> None:
        """Reserve no more windows; reserved ones must still be completed."""
        with self._lock:
            self._stopped = True

    def close(self) -> None:
        """Release the held chunks, after all windows were completed. Idempotent."""
        with self._lock:
            held, self._held = self._held, []
            self._stopped = True
        self._engine.release(held)


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """The result of a fetch."""

    held_chunks: int
    """Leading chunks of the prefix that are here now, received or present before: in the
    requested tier if it is a lower one, else in any tier."""
    received_chunks: int
    """Chunks received from the other replica."""
    received_bytes: int
    error: str = ""
    """Why some chunks are not here; empty if all are."""


class Fetch:
    """Copies the chunks of a prefix from another replica into a tier of this engine.

    ``keys`` are in prefix order and of equal length. ``peer`` is the address of the other replica's
    `TransferServer`. Chunks in the cpu tier are pinned for ``pin_s`` when the fetch is complete.
    With a ``secret`` the peer must prove that it knows it, and every chunk is authenticated.

    `run` blocks and may be called once. Any thread may call `cancel`, which ends it early, and read
    the counts.
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
        # A lower tier writes one window after the other: see `FetchWindows`.
        self._connections = connections if tier == "cpu" else 1
        self._gets_ahead = _GETS_AHEAD if tier == "cpu" else 1
        held_before = len(engine.match(keys)) if tier == "cpu" else engine.held_in(keys, tier)
        self._windows = FetchWindows(
            engine,
            self._keys[held_before:],
            tier=tier,
            window_chunks=self._window_chunks(),
            prefetched=tier == "cpu" and pin_s > 0,
        )
        # Guards the three below: threads open connections and note their errors while `cancel`
        # shuts the open ones.
        self._lock = threading.Lock()
        self._open: set[Channel] = set()
        self._errors: list[str] = []
        self._cancelled = threading.Event()

    def _window_chunks(self) -> int:
        layout = self._engine.layout
        pool_chunks = self._engine.tier_info()["cpu"].capacity_bytes // layout.chunk_bytes
        at_once = self._connections * self._gets_ahead
        limit = min(protocol.MAX_GET_KEYS, pool_chunks // (_MAX_POOL_FRACTION * at_once))
        return max(1, min(limit, _WINDOW_BYTES // layout.chunk_bytes))

    @property
    def received_chunks(self) -> int:
        """Chunks received so far."""
        return self._windows.received_chunks

    def run(self) -> Fetched:
        """Fetch the chunks; faults of the peer or the network end up in `Fetched.error`."""
        try:
            self._receive_all()
            held = self._pin()
        finally:
            self._windows.close()
        received = self._windows.received_chunks
        return Fetched(
            held_chunks=held,
            received_chunks=received,
            received_bytes=received * self._engine.layout.chunk_bytes,
            error="" if held == len(self._keys) else self._why_not_all(held),
        )

    def cancel(self) -> None:
        """Make `run` end soon; chunks that arrived stay."""
        self._windows.stop()
        with self._lock:
            self._cancelled.set()
            for channel in self._open:
                channel.shut()

    def _receive_all(self) -> None:
        wanted = min(self._connections, self._windows.windows_left)
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
        requested: deque[Window] = deque()
        channel: Channel | None = None
        try:
            channel = self._connect()
            self._receive_windows(channel, requested)
        except (OSError, PeerGoneError, protocol.ProtocolError) as error:
            self._meter.add("receive_failures")
            self._meter.add("receive_corrupt", isinstance(error, protocol.DamagedError))
            where = join_host_port(*self._peer)
            self._note(f"{where}: {error or type(error).__name__}")
            if requested:  # chunks after a gap are of no use
                self._windows.stop()
        except Exception as error:  # on the other threads it would get lost
            logger.exception("fetching chunks failed")
            self._note(f"{type(error).__name__}: {error}")
            self._windows.stop()
        finally:
            for window in requested:
                self._windows.complete(window)
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

    def _receive_windows(self, channel: Channel, requested: deque[Window]) -> None:
        """Request windows ahead and receive them in order.

        Leaves the windows that it has not completed in ``requested``.
        """
        layout = self._engine.layout.fingerprint()
        digests = protocol.greet(channel, layout, len(self._keys[0]), self._secret)
        while True:
            while len(requested) < self._gets_ahead:
                window = self._windows.reserve()
                if window is None:
                    break
                requested.append(window)
                protocol.send_get(channel, window.keys)
            if not requested:
                return
            if not self._receive(channel, requested[0], digests):
                self._windows.stop()
                return
            self._windows.complete(requested.popleft())

    def _receive(self, channel: Channel, window: Window, digests: ChunkDigests) -> bool:
        """Receive a window's chunks; return False if the source does not have one of them."""
        for key, slot in zip(window.keys, window.slots, strict=True):
            payload = self._engine.view(slot)
            if not protocol.receive_chunk(channel, key, payload, digests):
                self._note("the source no longer has all of the chunks")
                return False
            window.arrived.append(key)
            self._meter.add("received_chunks")
            self._meter.add("received_bytes", len(payload))
        return True

    def _note(self, error: str) -> None:
        with self._lock:
            self._errors.append(error)

    def _pin(self) -> int:
        """Pin the chunks, and wait for chunks that another call loads; return how many are here.

        Called before the windows' holds end, so that nothing evicts the chunks in between.
        """
        if self._tier != "cpu":
            return self._engine.held_in(self._keys, self._tier)
        promotion = self._engine.promote(self._keys, pin_s=self._pin_s)
        deadline_s = time.monotonic() + self._timeout_s
        while not (promotion.wait(_WAIT_SLICE_S) or self._cancelled.is_set()):
            if time.monotonic() > deadline_s:
                break
        return len(self._engine.match(self._keys))

    def _why_not_all(self, held: int) -> str:
        missing = len(self._keys) - held
        if self._cancelled.is_set():
            return f"cancelled with {missing} chunks missing, because this replica stops"
        if self._errors:
            return self._errors[0]
        if self._windows.pool_is_full:
            return f"this replica's cpu tier has no space for the last {missing} chunks"
        return f"this replica's {self._tier} tier did not store the last {missing} chunks"
