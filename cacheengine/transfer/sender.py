"""One connection of another replica that fetches chunks from this one."""

from collections import deque
from typing import Final

from cacheengine.engine import CacheEngine
from cacheengine.transfer import protocol
from cacheengine.transfer.channel import Channel
from cacheengine.transfer.source import Loan
from cacheengine.transfer.stats import TransferMeter

_LOANS: Final = 2
"""Gets whose chunks are read from the lower tiers ahead of being sent, the present one included."""


class Sender:
    """Answers gets, in order, until the other side has enough."""

    def __init__(
        self,
        engine: CacheEngine,
        channel: Channel,
        meter: TransferMeter,
        *,
        key_bytes: int,
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._meter = meter
        self._key_bytes = key_bytes
        self._timeout_s = timeout_s
        self._loans: deque[Loan] = deque()
        self._ended = False

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
            if self._loans and not (self._loans[-1].is_whole and self._channel.has_input()):
                break
            keys = protocol.receive_get(self._channel, self._key_bytes)
            if keys is None:
                self._ended = True
            else:
                self._loans.append(Loan(self._engine, keys, timeout_s=self._timeout_s))
        return bool(self._loans)

    def _send(self, loan: Loan, key: bytes) -> bool:
        """Send a chunk; False, and the end, if it is not there."""
        with loan.hold(key) as payload:
            if payload is not None:
                protocol.send_chunk(self._channel, key, payload)
                self._meter.add("sent_chunks")
                self._meter.add("sent_bytes", len(payload))
                return True
        self._meter.add("send_missing")
        protocol.send_missing(self._channel, key, self._key_bytes)
        return False
