"""One connection of another replica that fetches chunks from this one.

The chunks are lent by the engine; those below the pool are brought up first.
"""

import contextlib
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
from cacheengine.transfer.channel import Channel
from cacheengine.transfer.proofs import ChunkProofs

_LOANS: Final = 2
"""Gets whose chunks are read from the lower tiers ahead of being sent, the present one included."""
_PIN_S: Final = 10.0
"""How long a chunk that was read for a transfer is kept for it, if it never comes to be sent."""
_ROOM_S: Final = 5.0
"""How long room in a full pool is waited for."""
_SHORTEST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.128


class Loan:
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
class Sender:
    """Answers gets, in order, until the other side has enough."""

    engine: CacheEngine
    channel: Channel
    meter: TransferMeter
    proofs: ChunkProofs
    key_bytes: int
    timeout_s: float
    _loans: deque[Loan] = field(default_factory=deque, init=False)
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
                self._loans.append(Loan(self.engine, keys, timeout_s=self.timeout_s))
        return bool(self._loans)

    def _send(self, loan: Loan, key: bytes) -> bool:
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
