"""A socket on which every wait ends, and bytes go straight to and from the pool."""

import contextlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from blake3 import blake3

from cacheengine.bulk import checksum
from warmroute_common.fleet_secret import HOW_TO_SET, FleetSecret


class PeerGoneError(Exception):
    """The connection ended in the middle of something."""


class Channel:
    """A connected socket on which every message must go through within ``timeout_s``.

    Blocks in the kernel, not in Python: a chunk is one system call, and the
    other threads of the process run meanwhile. Calls raise TimeoutError,
    `PeerGoneError` or another OSError. `shut` may be called from any thread and
    wakes the one that waits; the rest is for one thread.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket = connected
        self._timeout_s = timeout_s
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's own timeouts: Python's would make the socket
        # non-blocking, and each chunk many calls.
        limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @classmethod
    def connect(cls, address: tuple[str, int], *, timeout_s: float, connect_s: float) -> "Channel":
        """Connect within ``connect_s``."""
        connected = socket.create_connection(address, timeout=connect_s)
        try:
            return cls(connected, timeout_s)
        except BaseException:
            connected.close()
            raise

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all parts, in order, none copied."""
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        deadline_s = time.monotonic() + self._timeout_s
        while left:
            try:
                sent = self._socket.sendmsg(left)
            except BlockingIOError:
                sent = 0
            left = _after(left, sent)
            if left:
                # The kernel's timeout cuts a call short as well; without this
                # check a peer that takes a byte at a time would hold us for ever.
                self._check(deadline_s, "did not take what was sent")

    def receive_parts(self, *parts: memoryview) -> int:
        """Fill buffers, in order; return the bytes received, fewer only if the other side ended."""
        left = [part for part in parts if len(part)]
        total = 0
        deadline_s = time.monotonic() + self._timeout_s
        while left:
            try:
                received = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                self._check(deadline_s, "sent nothing")
                continue
            if received == 0:
                break
            total += received
            left = _after(left, received)
            if left:
                self._check(deadline_s, "did not finish a message")
        return total

    def receive(self, num_bytes: int) -> bytes:
        """Return the next bytes."""
        received = self.receive_or_end(num_bytes)
        if received is None:
            raise PeerGoneError("the connection was closed")
        return received

    def receive_or_end(self, num_bytes: int) -> bytes | None:
        """Return the next bytes; None if the other side ended the connection before them."""
        buffer = bytearray(num_bytes)
        received = self.receive_parts(memoryview(buffer))
        if 0 < received < num_bytes:
            raise PeerGoneError("the connection was closed in the middle of a message")
        return bytes(buffer) if received == num_bytes else None

    def has_input(self) -> bool:
        """Whether a receive would find something (or the end) at once."""
        poll = select.poll()  # select() itself fails for descriptors over 1024
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _check(self, deadline_s: float, what: str) -> None:
        # The kernel counts in ticks, and may wake a little early.
        if time.monotonic() > deadline_s - 0.01:
            raise TimeoutError(f"the other side {what} within {self._timeout_s:g} s")

    def end_sending(self) -> None:
        """Tell the other side that nothing more comes, and go on receiving."""
        self._socket.shutdown(socket.SHUT_WR)

    def shut(self) -> None:
        """End the connection in both directions, waking a thread that waits on it."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back. Idempotent."""
        self._socket.close()


def _after(parts: list[memoryview], done_bytes: int) -> list[memoryview]:
    """Return what is left of buffers when so many bytes of them are done."""
    for position, part in enumerate(parts):
        if done_bytes < len(part):
            return [part[done_bytes:], *parts[position + 1 :]]
        done_bytes -= len(part)
    return []


# TODO of cacheengine.transfer.protocol: Proofs: that a peer knows the fleet's secret, and that a chunk is the one it has sent.
#
# With a secret each side proves to the other that it knows it, for this connection alone (both
# have chosen part of what is proven), and each chunk carries a keyed digest that nobody else can
# make. Without one, a checksum finds damage and no malice.

PROOF_BYTES: Final = 32
NONCE_BYTES: Final = 32
NO_NONCE: Final = bytes(NONCE_BYTES)
"""Sent by a side that has no secret."""


class ChunkProofs(Protocol):
    """How one connection's chunks are proven."""

    def of(self, head: bytes, payload: memoryview) -> bytes:
        """Return `PROOF_BYTES` that go with a chunk's header and bytes, and with no others."""


class Checksums:
    """Of chunks where no secret is set: damage is found, a forgery is not."""

    def of(self, head: bytes, payload: memoryview) -> bytes:
        """Return the payload's checksum; what else a header says the receiver compares."""
        return checksum(payload).ljust(PROOF_BYTES, b"\0")


class KeyedDigests:
    """Of chunks of one authenticated connection, whose key no other connection has.

    One pass over the bytes: a cryptographic digest with a key is as fast as one without.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of(self, head: bytes, payload: memoryview) -> bytes:
        """Return the digest of header and payload under the connection's key."""
        return blake3(head, key=self._key).update(payload).digest()


@dataclass(frozen=True)
class Handshake:
    """What both sides of one connection have said: the greeting, and the source's nonce."""

    secret: FleetSecret
    said: bytes

    def source_proof(self) -> bytes:
        """Return what proves the source, which has the chunks."""
        return self._key(b"source")

    def peer_proof(self) -> bytes:
        """Return what proves the replica that wants them."""
        return self._key(b"peer")

    def chunk_proofs(self) -> ChunkProofs:
        """Return how the connection's chunks are proven."""
        return KeyedDigests(self._key(b"chunks"))

    def _key(self, use: bytes) -> bytes:
        return hmac.digest(self.secret.key("transfer"), use + b"\0" + self.said, "sha256")


def nonce(secret: FleetSecret | None) -> bytes:
    """Return a number that was never used before, or `NO_NONCE` without a secret."""
    return NO_NONCE if secret is None else os.urandom(NONCE_BYTES)


def is_proof(shown: bytes, expected: bytes) -> bool:
    """Whether a proof is right, in constant time."""
    return hmac.compare_digest(shown, expected)


# TODO of cacheengine.transfer.protocol: What two replicas say on a transfer connection.
#
# All numbers are big-endian. The replica that wants chunks connects and sends
#
#     hello    magic, version, bytes of a key, layout fingerprint, nonce;
#     proof    with a fleet secret: that it knows it, once the source has proven the same;
#     get      a count and so many keys, whole digests: what it has room for;
#              the next ones without waiting for the answers, so that the source
#              can read ahead from its lower tiers;
#
# and closes the connection when it has enough. The replica that has them answers
#
#     welcome  a status, and a text that says why not, unless it is `Status.OK`: then a nonce
#              and a proof of the fleet secret (zeros where there is none);
#     chunk    for each key, in the order asked: status, size, proof (`proofs`), key,
#              then the payload. After one that is `Status.MISSING`
#              nothing more comes: what follows a gap in a prefix is of no use.

VERSION: Final = 2
MAX_GET_KEYS: Final = 256
"""Most keys of one get: few enough that those under way fit in any socket's buffer."""

_MAGIC: Final = b"WRKV"
_MAX_KEY_BYTES: Final = 64
_HELLO: Final = struct.Struct(">4sHH32s")
_WELCOME: Final = struct.Struct(">4sHH")
_COUNT: Final = struct.Struct(">I")
_CHUNK: Final = struct.Struct(">HQ")
_LONGEST_REASON: Final = 500
_NOTHING: Final = memoryview(b"")


class ProtocolError(Exception):
    """The other side is none of ours, refused, or spoke nonsense."""


class TransferRefusedError(ProtocolError):
    """The other side said no, and why."""


class DamagedError(ProtocolError):
    """A chunk's bytes do not fit their proof: damaged, or forged."""


class Status(IntEnum):
    """How an answer begins."""

    OK = 0
    MISSING = 1
    REFUSED = 2


# --- the side that wants chunks ---


def greet(channel: Channel, layout: str, key_bytes: int, secret: FleetSecret | None) -> ChunkProofs:
    """Introduce oneself; return, when welcome, how the chunks to come are proven.

    Raises `TransferRefusedError` with the other side's reason, or if that does
    not prove the secret, and `ProtocolError` if it is no replica.
    """
    hello = _HELLO.pack(_MAGIC, VERSION, key_bytes, layout.encode()) + nonce(secret)
    channel.send(hello)
    magic, status, text_bytes = _WELCOME.unpack(channel.receive(_WELCOME.size))
    if magic != _MAGIC:
        raise ProtocolError("what listens there is no replica's distributed_url")
    text = channel.receive(text_bytes).decode(errors="replace")[:_LONGEST_REASON]
    if status != Status.OK:
        raise TransferRefusedError(text or f"refused with status {status}")
    theirs, proof = channel.receive(NONCE_BYTES), channel.receive(PROOF_BYTES)
    if secret is None:
        return Checksums()
    handshake = Handshake(secret, hello + theirs)
    if not is_proof(proof, handshake.source_proof()):
        raise TransferRefusedError(f"the source does not know the fleet secret: {HOW_TO_SET}")
    channel.send(handshake.peer_proof())
    return handshake.chunk_proofs()


def send_get(channel: Channel, keys: Sequence[bytes]) -> None:
    """Ask for chunks: 1 to `MAX_GET_KEYS`, their keys as long as `greet` said."""
    channel.send(_COUNT.pack(len(keys)) + b"".join(keys))


def receive_chunk(channel: Channel, key: bytes, into: memoryview, proofs: ChunkProofs) -> bool:
    """Receive the chunk that was asked for next; False if the source does not have it.

    What ``into`` holds is the chunk only after True. Raises `DamagedError` or
    another `ProtocolError` for anything but that chunk whole.
    """
    head = bytearray(_CHUNK.size + PROOF_BYTES + len(key))
    # Both at once: to be woken for the header alone, and again for the
    # payload, costs a tenth of the speed.
    received = channel.receive_parts(memoryview(head), into)
    if received < len(head):
        raise PeerGoneError("the connection was closed between two chunks")
    status, num_bytes = _CHUNK.unpack_from(head)
    if status not in (Status.OK, Status.MISSING):
        raise ProtocolError(f"a chunk of unknown status {status}")
    if head[_CHUNK.size + PROOF_BYTES :] != key:
        raise ProtocolError("the source answered for another chunk")
    if status == Status.OK and num_bytes != len(into):
        raise ProtocolError(f"a chunk of {num_bytes} bytes instead of {len(into)}")
    if status == Status.OK and received < len(head) + len(into):
        raise PeerGoneError("the connection was closed in the middle of a chunk")
    proof = bytes(head[_CHUNK.size : _CHUNK.size + PROOF_BYTES])
    payload = into if status == Status.OK else _NOTHING
    if not is_proof(proof, proofs.of(bytes(head[: _CHUNK.size]) + key, payload)):
        raise DamagedError("a chunk was damaged on the way, or forged")
    return bool(status == Status.OK)


# --- the side that has them ---


@dataclass(frozen=True)
class Hello:
    """What a replica that wants chunks has said first."""

    key_bytes: int
    said: bytes
    """All of it; the proofs are of it too."""
    refusal: str | None
    """Why it cannot be served; None if it can."""


def receive_hello(channel: Channel, layout: str, secret: FleetSecret | None) -> Hello:
    """Return how the other side greets. Raises `ProtocolError` if it is no replica."""
    said = channel.receive(_HELLO.size)
    magic, version, key_bytes, greeted = _HELLO.unpack(said)
    theirs = greeted.decode("ascii", errors="replace")
    if magic != _MAGIC:
        raise ProtocolError("not the greeting of a replica")
    if version != VERSION:
        refusal = f"version {version} of the transfer protocol; this replica speaks {VERSION}"
        return Hello(key_bytes, said, refusal)
    said += channel.receive(NONCE_BYTES)
    return Hello(key_bytes, said, _refusal(said, key_bytes, theirs, layout, secret))


def _refusal(
    said: bytes, key_bytes: int, theirs: str, layout: str, secret: FleetSecret | None
) -> str | None:
    has_secret = said[-NONCE_BYTES:] != NO_NONCE
    if has_secret is not (secret is not None):
        which = "this replica has none" if has_secret else "it is asked for here"
        return f"the fleet secret: {which}; {HOW_TO_SET}"
    if theirs != layout:
        return (
            f"its chunks have layout {theirs}, those here {layout}: model, weights, dtype, "
            "chunk_size, parallel sizes and hash seed must be equal"
        )
    if not 0 < key_bytes <= _MAX_KEY_BYTES:
        return f"keys of {key_bytes} bytes; at most {_MAX_KEY_BYTES} are possible"
    return None


def refuse(channel: Channel, reason: str) -> None:
    """Refuse the other side for a reason."""
    text = reason.encode()
    channel.send(_WELCOME.pack(_MAGIC, Status.REFUSED, len(text)), text)


def welcome(channel: Channel, hello: Hello, secret: FleetSecret | None) -> ChunkProofs:
    """Welcome the other side; return how the chunks sent to it are proven.

    Raises `ProtocolError` if it does not prove that it knows the secret.
    """
    own, head = nonce(secret), _WELCOME.pack(_MAGIC, Status.OK, 0)
    if secret is None:
        channel.send(head + own + bytes(PROOF_BYTES))
        return Checksums()
    handshake = Handshake(secret, hello.said + own)
    channel.send(head + own + handshake.source_proof())
    if not is_proof(channel.receive(PROOF_BYTES), handshake.peer_proof()):
        raise ProtocolError("it does not know the fleet secret")
    return handshake.chunk_proofs()


def receive_get(channel: Channel, key_bytes: int) -> list[bytes] | None:
    """Return the keys asked for next; None when the other side has enough."""
    head = channel.receive_or_end(_COUNT.size)
    if head is None:
        return None
    (count,) = _COUNT.unpack(head)
    if not 0 < count <= MAX_GET_KEYS:
        raise ProtocolError(f"{count} chunks asked for at once; 1 to {MAX_GET_KEYS} may be")
    joined = channel.receive(key_bytes * count)
    return [joined[start : start + key_bytes] for start in range(0, len(joined), key_bytes)]


def send_chunk(channel: Channel, key: bytes, payload: memoryview, proofs: ChunkProofs) -> None:
    """Send a chunk's header and its bytes, straight from the pool."""
    channel.send(_head(Status.OK, key, payload, proofs), payload)


def send_missing(channel: Channel, key: bytes, key_bytes: int, proofs: ChunkProofs) -> None:
    """Say that a chunk is not there, and end the conversation.

    Returns when the other side has heard it and left: closing with something
    unread would take back what was sent.
    """
    channel.send(_head(Status.MISSING, key, _NOTHING, proofs))
    channel.end_sending()
    while receive_get(channel, key_bytes) is not None:
        pass


def _head(status: Status, key: bytes, payload: memoryview, proofs: ChunkProofs) -> bytes:
    numbers = _CHUNK.pack(status, len(payload))
    return numbers + proofs.of(numbers + key, payload) + key
