"""The remote tier: chunks on a server that replicas share."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from cacheengine.bulk import let_go, private_copy
from cacheengine.tiers.base import Chunk, GetOutcome, PutOutcome, SharedTier
from cacheengine.tiers.remote.envelope import HEADER_BYTES, Envelope
from cacheengine.tiers.remote.outage import OutageLog
from cacheengine.tiers.serde.base import NaiveSerde, Serde, SerdeError
from cacheengine.tiers.stores.base import (
    Blob,
    BlobStore,
    StoreError,
    StoreFullError,
    StoreRestingError,
    Target,
)

logger = logging.getLogger("vllm.warmroute")

_BATCH_CHUNKS: Final = 16
_BATCH_BYTES: Final = 64 * 1024 * 1024
"""What a server may have to keep ready at once for one of our connections."""


class RemoteTier(SharedTier):
    """Chunks of one layout in a `BlobStore`, encoded by a serde, in envelopes.

    ``readers`` are further serdes whose chunks are understood, by code, so
    that a fleet's setting can change and what it has stored stays of use;
    exact ones only, or the names would not tell what is exact. ``server`` is
    what messages call the store.

    Nothing is copied on the way out, and with a serde that is the identity
    nothing on the way in: a blob is sent from, and received into, the pool.
    """

    name = "remote"

    def __init__(
        self,
        store: BlobStore,
        fingerprint: str,
        payload_bytes: int,
        serde: Serde,
        *,
        readers: Iterable[Serde] = (),
        server: str = "the server",
    ) -> None:
        self.batch_chunks = max(1, min(_BATCH_CHUNKS, _BATCH_BYTES // payload_bytes))
        self._store = store
        self._payload_bytes = payload_bytes
        self._serde = serde
        self._plain = NaiveSerde()
        known = (self._plain, *readers, serde)
        self._serdes: Mapping[int, Serde] = {each.code: each for each in known}
        lossy = "" if serde.is_exact else serde.name
        self._envelope = Envelope(fingerprint, payload_bytes, lossy_serde=lossy)
        self._outage = OutageLog(server)

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Encode the chunks and send them in one batch."""
        encoded = [self._encoded(key, payload) for key, payload in chunks]
        blobs = [
            Blob(self._envelope.name(key), parts)
            for (key, _), parts in zip(chunks, encoded, strict=True)
        ]
        try:
            stored = self._store.put_many(blobs)
        except StoreFullError as error:
            self._outage.refused(error)
            return [PutOutcome.NO_SPACE] * len(chunks)
        except StoreError as error:
            self._outage.failed(error)
            is_resting = isinstance(error, StoreRestingError)
            return [PutOutcome.NOT_TRIED if is_resting else PutOutcome.FAILED] * len(chunks)
        finally:
            for parts in encoded:  # the blobs have these very lists
                let_go(parts)
        if all(stored):
            self._outage.stored()
        return [PutOutcome.STORED if each else PutOutcome.NO_SPACE for each in stored]

    def _encoded(self, key: bytes, payload: memoryview) -> list[memoryview | bytes]:
        serde = self._serde
        parts = serde.encode(payload)
        if not serde.is_identity and sum(map(len, parts)) >= self._payload_bytes:
            # What does not shrink goes as it is: so no blob is ever larger
            # than a chunk with its header, and all are read into their slots.
            serde, parts = self._plain, (payload,)
        header = self._envelope.header(key, serde.code, parts)
        return [header, *parts]

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Read the chunks in one batch, and check each byte of them."""
        headers = [memoryview(bytearray(HEADER_BYTES)) for _ in chunks]
        targets = [
            Target(self._envelope.name(key), (header, into))
            for (key, into), header in zip(chunks, headers, strict=True)
        ]
        try:
            sizes = self._store.get_many(targets)
        except StoreError as error:
            self._outage.failed(error)
            return [GetOutcome.FAILED] * len(chunks)
        self._outage.answered()
        outcomes = [
            GetOutcome.MISSING if size is None else self._open(key, header, into, size)
            for (key, into), header, size in zip(chunks, headers, sizes, strict=True)
        ]
        self._remove_damaged(chunks, outcomes)
        return outcomes

    def _open(
        self, key: bytes, header: memoryview, into: memoryview, blob_bytes: int
    ) -> GetOutcome:
        """Check and decode a blob whose header and encoded bytes have been read."""
        encoded_bytes = blob_bytes - HEADER_BYTES
        if not 0 <= encoded_bytes <= self._payload_bytes:
            return GetOutcome.DAMAGED
        encoded = into[:encoded_bytes]
        code = self._envelope.serde_code(key, header, encoded)
        if code is None:
            return GetOutcome.DAMAGED
        serde = self._serdes.get(code)
        if serde is None:
            # Intact, so a later release wrote it: of no use here, but to others.
            return GetOutcome.MISSING
        if serde.is_identity and encoded_bytes == self._payload_bytes:
            return GetOutcome.OK
        try:
            # A copy: they lie where the decoded bytes are to be.
            serde.decode(private_copy(encoded), into)
        except SerdeError:
            return GetOutcome.DAMAGED
        return GetOutcome.OK

    def _remove_damaged(self, chunks: Sequence[Chunk], outcomes: Sequence[GetOutcome]) -> None:
        damaged = [
            key
            for (key, _), outcome in zip(chunks, outcomes, strict=True)
            if outcome is GetOutcome.DAMAGED
        ]
        if damaged:
            names = ", ".join(self._envelope.name(key) for key in damaged)
            logger.warning("remote tier: damaged, and removed: %s", names)
            self.delete(damaged)

    def find(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Ask the server which chunks it has; nothing is read."""
        try:
            found = self._store.exists([self._envelope.name(key) for key in keys])
        except StoreError as error:
            self._outage.failed(error)
            return None
        self._outage.answered()
        return found

    def delete(self, keys: Iterable[bytes]) -> None:
        """Remove chunks; a server that cannot be reached keeps them, which is logged."""
        try:
            self._store.remove([self._envelope.name(key) for key in keys])
        except StoreError as error:
            self._outage.failed(error)

    def close(self) -> None:
        """Close the connections."""
        self._store.close()
