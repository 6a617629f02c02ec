"""Proofs: that a peer knows the fleet's secret, and that a chunk is the one it has sent.

With a secret each side proves to the other that it knows it, for this connection alone (both
have chosen part of what is proven), and each chunk carries a keyed digest that nobody else can
make. Without one, a checksum finds damage and no malice.
"""

import hmac
import os
from dataclasses import dataclass
from typing import Final, Protocol

from blake3 import blake3

from cacheengine.bulk import checksum
from warmroute_common.fleet_secret import FleetSecret

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
