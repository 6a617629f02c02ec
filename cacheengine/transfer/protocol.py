"""What two replicas say on a transfer connection.

All numbers are big-endian. The replica that wants chunks connects and sends

    hello    magic, version, bytes of a key, layout fingerprint;
    get      a count and so many keys, whole digests: what it has room for;
             the next ones without waiting for the answers, so that the source
             can read ahead from its lower tiers;

and closes the connection when it has enough. The replica that has them answers

    welcome  a status, and a text that says why not, unless it is `Status.OK`;
    chunk    for each key, in the order asked: status, key, size, checksum
             (xxh3_128), then the payload. After one that is `Status.MISSING`
             nothing more comes: what follows a gap in a prefix is of no use.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import xxhash

from cacheengine.transfer.channel import Channel, PeerGone

VERSION: Final = 1
MAX_GET_KEYS: Final = 256
"""Most keys of one get: few enough that those under way fit in any socket's buffer."""

_MAGIC: Final = b"WRKV"
_MAX_KEY_BYTES: Final = 64
_HELLO: Final = struct.Struct(">4sHH32s")
_WELCOME: Final = struct.Struct(">4sHH")
_COUNT: Final = struct.Struct(">I")
_CHUNK: Final = struct.Struct(">HQ16s")


class ProtocolError(Exception):
    """The other side is none of ours, refused, or spoke nonsense."""


class TransferRefusedError(ProtocolError):
    """The other side said no, and why."""


class DamagedError(ProtocolError):
    """The bytes of a chunk do not fit their checksum."""


class Status(IntEnum):
    """How an answer begins."""

    OK = 0
    MISSING = 1
    REFUSED = 2


def checksum(payload: memoryview) -> bytes:
    """Return what a payload's header says of its bytes."""
    return xxhash.xxh3_128_digest(payload)


# --- the side that wants chunks ---


def greet(channel: Channel, layout: str, key_bytes: int) -> None:
    """Introduce oneself; return when welcome.

    Raises `TransferRefusedError` with the other side's reason, `ProtocolError` if it is
    no replica.
    """
    channel.send(_HELLO.pack(_MAGIC, VERSION, key_bytes, layout.encode()))
    magic, status, text_bytes = _WELCOME.unpack(channel.receive(_WELCOME.size))
    if magic != _MAGIC:
        raise ProtocolError("what listens there is no replica's distributed_url")
    text = channel.receive(text_bytes).decode(errors="replace")
    if status != Status.OK:
        raise TransferRefusedError(text or f"refused with status {status}")


def send_get(channel: Channel, keys: Sequence[bytes]) -> None:
    """Ask for chunks: 1 to `MAX_GET_KEYS`, their keys as long as `greet` said."""
    channel.send(_COUNT.pack(len(keys)) + b"".join(keys))


def receive_chunk(channel: Channel, key: bytes, into: memoryview) -> bool:
    """Receive the chunk that was asked for next; False if the source does not have it.

    What ``into`` holds is the chunk only after True. Raises `DamagedError` or
    another `ProtocolError` for anything but that chunk whole.
    """
    head = bytearray(_CHUNK.size + len(key))
    # Both at once: to be woken for the header alone, and again for the
    # payload, costs a tenth of the speed.
    received = channel.receive_parts(memoryview(head), into)
    if received < len(head):
        raise PeerGone("the connection was closed between two chunks")
    status, num_bytes, digest = _CHUNK.unpack_from(head)
    if status not in (Status.OK, Status.MISSING):
        raise ProtocolError(f"a chunk of unknown status {status}")
    if head[_CHUNK.size :] != key:
        raise ProtocolError("the source answered for another chunk")
    if status == Status.MISSING:
        return False
    if num_bytes != len(into):
        raise ProtocolError(f"a chunk of {num_bytes} bytes instead of {len(into)}")
    if received < len(head) + len(into):
        raise PeerGone("the connection was closed in the middle of a chunk")
    if checksum(into) != digest:
        raise DamagedError("a chunk was damaged on the way")
    return True


# --- the side that has them ---


def receive_hello(channel: Channel, layout: str) -> tuple[int, str | None]:
    """Return the bytes of the other side's keys, and why it cannot be served or None if it can.

    Raises `ProtocolError` if it is no replica.
    """
    magic, version, key_bytes, greeted = _HELLO.unpack(channel.receive(_HELLO.size))
    theirs = greeted.decode("ascii", errors="replace")
    refusal = None
    if magic != _MAGIC:
        raise ProtocolError("not the greeting of a replica")
    if version != VERSION:
        refusal = f"version {version} of the transfer protocol; this replica speaks {VERSION}"
    elif theirs != layout:
        refusal = (
            f"its chunks have layout {theirs}, those here {layout}: model, weights, dtype, "
            "chunk_size, parallel sizes and hash seed must be equal"
        )
    elif not 0 < key_bytes <= _MAX_KEY_BYTES:
        refusal = f"keys of {key_bytes} bytes; at most {_MAX_KEY_BYTES} are possible"
    return key_bytes, refusal


def send_welcome(channel: Channel, reason: str | None = None) -> None:
    """Welcome the other side, or refuse it for a reason."""
    status = Status.OK if reason is None else Status.REFUSED
    text = (reason or "").encode()
    channel.send(_WELCOME.pack(_MAGIC, status, len(text)), text)


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


def send_chunk(channel: Channel, key: bytes, payload: memoryview) -> None:
    """Send a chunk's header and its bytes, straight from the pool."""
    head = _CHUNK.pack(Status.OK, len(payload), checksum(payload)) + key
    channel.send(head, payload)


def send_missing(channel: Channel, key: bytes, key_bytes: int) -> None:
    """Say that a chunk is not there, and end the conversation.

    Returns when the other side has heard it and left: closing with something
    unread would take back what was sent.
    """
    channel.send(_CHUNK.pack(Status.MISSING, 0, bytes(16)) + key)
    channel.end_sending()
    while receive_get(channel, key_bytes) is not None:
        pass
