"""The protocol in which one replica fetches chunks from another, over TCP.

All numbers are big-endian. The replica that wants chunks (the peer) connects and sends

    hello    magic, version, bytes per key, layout fingerprint, nonce;
    proof    with a fleet secret: that it knows it, after the source has proven the same;
    get      a count, then that many keys: the chunks that it has reserved slots for. It sends the
             next gets without waiting for answers, so that the source can read ahead;

and closes the connection when it has all it wants. The replica that has the chunks (the source)
answers

    welcome  a status; with `Status.OK` a nonce and a proof of the fleet secret (zeros without
             one), otherwise a text with the reason;
    chunk    for each key, in the order of the gets: status, size, digest, key, then the payload.
             After a chunk with `Status.MISSING` nothing follows, because chunks after a gap in a
             prefix are of no use.

With a secret each side proves that it knows it, for this connection only: both contribute to what
is proven. Each chunk then carries a keyed digest that nobody else can compute. Without a secret a
checksum detects damage, but not a forgery.
"""

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
from warmroute_common.addresses import resolve
from warmroute_common.fleet_secret import HOW_TO_SET, FleetSecret

VERSION: Final = 2
MAX_GET_KEYS: Final = 256
"""Most keys of one get: a get in transit then fits in any socket's buffer."""
PROOF_BYTES: Final = 32
NONCE_BYTES: Final = 32
NO_NONCE: Final = bytes(NONCE_BYTES)
"""Sent by a side that has no secret."""

_MAGIC: Final = b"WRKV"
_MAX_KEY_BYTES: Final = 64
_HELLO: Final = struct.Struct(">4sHH32s")
_WELCOME: Final = struct.Struct(">4sHH")
_COUNT: Final = struct.Struct(">I")
_CHUNK: Final = struct.Struct(">HQ")
_MAX_REASON_CHARS: Final = 500
_NO_PAYLOAD: Final = memoryview(b"")


class PeerGoneError(Exception):
    """The connection was closed before the end of a message or of a transfer."""


class ProtocolError(Exception):
    """The other side is not a replica, refused, or broke the protocol."""


class TransferRefusedError(ProtocolError):
    """The other side refused; the message gives its reason."""


class DamagedError(ProtocolError):
    """A chunk's bytes do not match their digest: they were damaged or forged."""


class Status(IntEnum):
    """The first field of a welcome and of a chunk."""

    OK = 0
    MISSING = 1
    REFUSED = 2


# --- connection ---


class Channel:
    """A connected socket on which each message must complete within ``timeout_s``.

    Chunks are sent from the pool and received into it without copies. Calls block in the kernel,
    not in Python: a chunk is one system call, and the process's other threads run meanwhile. They
    raise TimeoutError, `PeerGoneError` or another OSError. Any thread may call `shut`, which wakes
    a waiting thread; all other methods belong to one thread.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket = connected
        self._timeout_s = timeout_s
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Kernel timeouts, because Python's would make the socket non-blocking: each chunk would
        # then need many calls.
        limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @classmethod
    def connect(cls, address: tuple[str, int], *, timeout_s: float, connect_s: float) -> "Channel":
        """Connect within ``connect_s``."""
        deadline_s = time.monotonic() + connect_s
        resolve(*address, connect_s)  # what follows asks again, and gets an answer as soon
        connected = socket.create_connection(
            address, timeout=max(0.001, deadline_s - time.monotonic())
        )
        try:
            return cls(connected, timeout_s)
        except BaseException:
            connected.close()
            raise

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all parts in order, without copying them."""
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        deadline_s = time.monotonic() + self._timeout_s
        while left:
            try:
                sent = self._socket.sendmsg(left)
            except BlockingIOError:
                sent = 0
            left = _after(left, sent)
            if left:
                # The kernel's timeout can also cut a call short. Without this check a peer that
                # receives one byte at a time could block this thread for ever.
                self._check(deadline_s, "did not receive the data sent")

    def receive_parts(self, *parts: memoryview) -> int:
        """Fill buffers in order; return the bytes received, fewer only at the connection's end."""
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
        """Return the next bytes; None if the other side closed the connection before them."""
        buffer = bytearray(num_bytes)
        received = self.receive_parts(memoryview(buffer))
        if 0 < received < num_bytes:
            raise PeerGoneError("the connection was closed in the middle of a message")
        return bytes(buffer) if received == num_bytes else None

    def has_input(self) -> bool:
        """Whether a receive would return at once, with data or with the connection's end."""
        poll = select.poll()  # select() itself fails for descriptors over 1024
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _check(self, deadline_s: float, what: str) -> None:
        # The kernel counts in ticks and may wake the thread slightly early.
        if time.monotonic() > deadline_s - 0.01:
            raise TimeoutError(f"the other side {what} within {self._timeout_s:g} s")

    def end_sending(self) -> None:
        """Close the sending direction only; this side can still receive."""
        self._socket.shutdown(socket.SHUT_WR)

    def shut(self) -> None:
        """Close both directions, which wakes a thread that waits on the socket."""
        with contextlib.suppress(OSError):  # the connection has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()


def _after(parts: list[memoryview], done_bytes: int) -> list[memoryview]:
    """Return the rest of ``parts`` after their first ``done_bytes`` bytes."""
    for position, part in enumerate(parts):
        if done_bytes < len(part):
            return [part[done_bytes:], *parts[position + 1 :]]
        done_bytes -= len(part)
    return []


# --- digests of chunks and proofs of the secret ---


class ChunkDigests(Protocol):
    """Computes the digests of one connection's chunks."""

    def of(self, head: bytes, payload: memoryview) -> bytes:
        """Return the digest of a chunk's header and payload, `PROOF_BYTES` long."""


class Checksums:
    """Digests without a secret: they detect damage, but not a forgery."""

    def of(self, head: bytes, payload: memoryview) -> bytes:
        """Return the payload's checksum; the receiver compares the header's fields itself."""
        return checksum(payload).ljust(PROOF_BYTES, b"\0")


class KeyedDigests:
    """Digests with the key of one authenticated connection.

    One pass over the bytes; the key does not make the digest slower.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of(self, head: bytes, payload: memoryview) -> bytes:
        """Return the digest of header and payload under the connection's key."""
        return blake3(head, key=self._key).update(payload).digest()


@dataclass(frozen=True)
class Handshake:
    """Derives the proofs and the digest key of one connection from the fleet secret."""

    secret: FleetSecret
    transcript: bytes
    """The peer's hello and the source's nonce."""

    def source_proof(self) -> bytes:
        """Return the proof that the source sends."""
        return self._key(b"source")

    def peer_proof(self) -> bytes:
        """Return the proof that the peer sends."""
        return self._key(b"peer")

    def chunk_digests(self) -> ChunkDigests:
        """Return the connection's chunk digests."""
        return KeyedDigests(self._key(b"chunks"))

    def _key(self, use: bytes) -> bytes:
        return hmac.digest(self.secret.key("transfer"), use + b"\0" + self.transcript, "sha256")


def nonce(secret: FleetSecret | None) -> bytes:
    """Return a new random number, or `NO_NONCE` without a secret."""
    return NO_NONCE if secret is None else os.urandom(NONCE_BYTES)


def is_equal(received: bytes, expected: bytes) -> bool:
    """Whether a received proof or digest is correct, in constant time."""
    return hmac.compare_digest(received, expected)


# --- the peer, which wants chunks ---


def greet(
    channel: Channel, layout: str, key_bytes: int, secret: FleetSecret | None
) -> ChunkDigests:
    """Send the hello and receive the welcome; return the digests of the chunks to come.

    Raises `TransferRefusedError` if the source refuses or does not prove the secret, and
    `ProtocolError` if the other side is not a replica.
    """
    hello = _HELLO.pack(_MAGIC, VERSION, key_bytes, layout.encode()) + nonce(secret)
    channel.send(hello)
    magic, status, text_bytes = _WELCOME.unpack(channel.receive(_WELCOME.size))
    if magic != _MAGIC:
        raise ProtocolError("that address is not a replica's distributed_url")
    text = channel.receive(text_bytes).decode(errors="replace")[:_MAX_REASON_CHARS]
    if status != Status.OK:
        raise TransferRefusedError(text or f"refused with status {status}")
    source_nonce, proof = channel.receive(NONCE_BYTES), channel.receive(PROOF_BYTES)
    if secret is None:
        return Checksums()
    handshake = Handshake(secret, hello + source_nonce)
    if not is_equal(proof, handshake.source_proof()):
        raise TransferRefusedError(f"the source does not know the fleet secret: {HOW_TO_SET}")
    channel.send(handshake.peer_proof())
    return handshake.chunk_digests()


def send_get(channel: Channel, keys: Sequence[bytes]) -> None:
    """Request 1 to `MAX_GET_KEYS` chunks; their keys have the length given to `greet`."""
    channel.send(_COUNT.pack(len(keys)) + b"".join(keys))


def receive_chunk(channel: Channel, key: bytes, into: memoryview, digests: ChunkDigests) -> bool:
    """Receive the next requested chunk; return False if the source does not have it.

    ``into`` holds the chunk only after True. Raises `DamagedError` or another `ProtocolError` if
    anything else than the whole chunk arrives.
    """
    head = bytearray(_CHUNK.size + PROOF_BYTES + len(key))
    # Header and payload in one call: waking up for each separately costs 10% of the speed.
    received = channel.receive_parts(memoryview(head), into)
    if received < len(head):
        raise PeerGoneError("the connection was closed between two chunks")
    status, num_bytes = _CHUNK.unpack_from(head)
    if status not in (Status.OK, Status.MISSING):
        raise ProtocolError(f"the source sent a chunk with unknown status {status}")
    if head[_CHUNK.size + PROOF_BYTES :] != key:
        raise ProtocolError("the source sent another chunk than the one requested")
    if status == Status.OK and num_bytes != len(into):
        raise ProtocolError(f"the source sent a chunk of {num_bytes} bytes instead of {len(into)}")
    if status == Status.OK and received < len(head) + len(into):
        raise PeerGoneError("the connection was closed in the middle of a chunk")
    digest = bytes(head[_CHUNK.size : _CHUNK.size + PROOF_BYTES])
    payload = into if status == Status.OK else _NO_PAYLOAD
    if not is_equal(digest, digests.of(bytes(head[: _CHUNK.size]) + key, payload)):
        raise DamagedError("a chunk was damaged on the way, or forged")
    return bool(status == Status.OK)


# --- the source, which has the chunks ---


@dataclass(frozen=True)
class Hello:
    """The first message of a replica that wants chunks."""

    key_bytes: int
    message: bytes
    """The whole message, which is part of the handshake's transcript."""
    refusal: str | None
    """Why the replica cannot be served; None if it can."""


def receive_hello(channel: Channel, layout: str, secret: FleetSecret | None) -> Hello:
    """Receive the other side's hello; raise `ProtocolError` if it is not a replica."""
    message = channel.receive(_HELLO.size)
    magic, version, key_bytes, fingerprint = _HELLO.unpack(message)
    peer_layout = fingerprint.decode("ascii", errors="replace")
    if magic != _MAGIC:
        raise ProtocolError("the other side did not send a replica's hello")
    if version != VERSION:
        refusal = (
            f"version {version} of the transfer protocol is not supported; "
            f"this replica has version {VERSION}: run the same Warmroute version on both"
        )
        return Hello(key_bytes, message, refusal)
    message += channel.receive(NONCE_BYTES)
    return Hello(key_bytes, message, _refusal(message, key_bytes, peer_layout, layout, secret))


def _refusal(
    message: bytes, key_bytes: int, peer_layout: str, layout: str, secret: FleetSecret | None
) -> str | None:
    has_secret = message[-NONCE_BYTES:] != NO_NONCE
    if has_secret is not (secret is not None):
        problem = "this replica has none" if has_secret else "this replica requires it"
        return f"the fleet secret: {problem}; {HOW_TO_SET}"
    if peer_layout != layout:
        return (
            f"the peer's chunks have layout {peer_layout}, those here {layout}: model, weights, "
            "dtype, chunk_size, parallel sizes and hash seed must be equal"
        )
    if not 0 < key_bytes <= _MAX_KEY_BYTES:
        return f"keys of {key_bytes} bytes are not supported; the limit is {_MAX_KEY_BYTES} bytes"
    return None


def refuse(channel: Channel, reason: str) -> None:
    """Answer a hello with a refusal."""
    text = reason.encode()
    channel.send(_WELCOME.pack(_MAGIC, Status.REFUSED, len(text)), text)


def welcome(channel: Channel, hello: Hello, secret: FleetSecret | None) -> ChunkDigests:
    """Answer a hello with a welcome; return the digests of the chunks to be sent.

    Raises `ProtocolError` if the peer does not prove that it knows the secret.
    """
    own, head = nonce(secret), _WELCOME.pack(_MAGIC, Status.OK, 0)
    if secret is None:
        channel.send(head + own + bytes(PROOF_BYTES))
        return Checksums()
    handshake = Handshake(secret, hello.message + own)
    channel.send(head + own + handshake.source_proof())
    if not is_equal(channel.receive(PROOF_BYTES), handshake.peer_proof()):
        raise ProtocolError("the peer does not know the fleet secret")
    return handshake.chunk_digests()


def receive_get(channel: Channel, key_bytes: int) -> list[bytes] | None:
    """Return the keys of the next get; None if the peer has closed the connection."""
    head = channel.receive_or_end(_COUNT.size)
    if head is None:
        return None
    (count,) = _COUNT.unpack(head)
    if not 0 < count <= MAX_GET_KEYS:
        raise ProtocolError(f"a get of {count} chunks; 1 to {MAX_GET_KEYS} are allowed")
    joined = channel.receive(key_bytes * count)
    return [joined[start : start + key_bytes] for start in range(0, len(joined), key_bytes)]


def send_chunk(channel: Channel, key: bytes, payload: memoryview, digests: ChunkDigests) -> None:
    """Send a chunk's header and its payload."""
    channel.send(_head(Status.OK, key, payload, digests), payload)


def send_missing(channel: Channel, key: bytes, key_bytes: int, digests: ChunkDigests) -> None:
    """Report that a chunk is missing, and end the transfer.

    Returns when the peer has closed the connection. To close it with unread input would discard the
    data that was sent.
    """
    channel.send(_head(Status.MISSING, key, _NO_PAYLOAD, digests))
    channel.end_sending()
    while receive_get(channel, key_bytes) is not None:
        pass


def _head(status: Status, key: bytes, payload: memoryview, digests: ChunkDigests) -> bytes:
    numbers = _CHUNK.pack(status, len(payload))
    return numbers + digests.of(numbers + key, payload) + key
