"""What two replicas say on a transfer connection.

All numbers are big-endian. The replica that wants chunks connects and sends

    hello    magic, version, bytes of a key, layout fingerprint, nonce;
    proof    with a fleet secret: that it knows it, once the source has proven the same;
    get      a count and so many keys, whole digests: what it has room for;
             the next ones without waiting for the answers, so that the source
             can read ahead from its lower tiers;

and closes the connection when it has enough. The replica that has them answers

    welcome  a status, and a text that says why not, unless it is `Status.OK`: then a nonce
             and a proof of the fleet secret (zeros where there is none);
    chunk    for each key, in the order asked: status, size, proof (`proofs`), key,
             then the payload. After one that is `Status.MISSING`
             nothing more comes: what follows a gap in a prefix is of no use.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from cacheengine.transfer.channel import Channel, PeerGoneError
from cacheengine.transfer.proofs import (
    NO_NONCE,
    NONCE_BYTES,
    PROOF_BYTES,
    Checksums,
    ChunkProofs,
    Handshake,
    is_proof,
    nonce,
)
from warmroute_common.fleet_secret import HOW_TO_SET, FleetSecret

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
