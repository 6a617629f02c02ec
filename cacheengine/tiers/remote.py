"""The remote tier: chunks on a server that replicas share."""

import hmac
import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import xxhash
from blake3 import blake3

from cacheengine.bulk import let_go, private_copy
from cacheengine.tiers.serde import NaiveSerde, Serde, SerdeError
from cacheengine.tiers.store import (
    Blob,
    BlobStore,
    ReadTarget,
    StoreError,
    StoreFullError,
    StorePausedError,
)
from cacheengine.tiers.tier import Chunk, GetOutcome, PutOutcome, SharedTier
from warmroute_common.fleet_secret import FleetSecret

logger = logging.getLogger("vllm.warmroute")

_BATCH_CHUNKS: Final = 16
_BATCH_BYTES: Final = 64 * 1024 * 1024
"""The most that a server may have to buffer for one connection."""
_QUIET_S: Final = 60.0
"""Time between two warnings about outages: a server may fail every second call."""

SERDE_NAMES: Final = ("naive", "lossless", "cachegen")
"""The names, the default first."""
_ELEMENT_BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Other types (fp8, and types that pack numbers with their scales) have one-byte elements."""

_MAGIC: Final = b"WARMBLOB"
_VERSION: Final = 1
_FIELDS: Final = struct.Struct("<8sHHIQQ")
"""Magic, version, serde code, header bytes, payload bytes, encoded bytes."""
_CHECKSUM_BYTES: Final = 16
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM_BYTES


class Envelope:
    """The name of a chunk's blob, and the header before its bytes.

    A blob is named ``warmroute:<layout fingerprint>:<key in hex>``, so that caches of different
    models, types, block layouts or parallel layouts never meet. Names of blobs that a lossy
    serde wrote have its name after the fingerprint: an engine that wants exact bytes must not
    find them.

    With ``secret``, the fleet's, the checksum is a keyed digest: a program that can write to the
    store and does not know the secret cannot make a blob that is read. Names then have a
    fingerprint of the secret: fleets with another one must not take the blobs for damaged.

    The checksum covers the other fields of the header, the fingerprint, the key and the encoded
    bytes. So it finds any changed byte, the blob of another key and the blob of another layout.
    A later version of this format must use another prefix than ``warmroute:``, or engines of the
    two versions would remove each other's blobs.

    ``payload_bytes`` is the size of a chunk. ``lossy_serde`` is the serde's name if it is lossy.
    """

    def __init__(
        self,
        fingerprint: str,
        payload_bytes: int,
        *,
        lossy_serde: str = "",
        secret: FleetSecret | None = None,
    ) -> None:
        suffix = f"-{lossy_serde}" if lossy_serde else ""
        self._key = secret and secret.key("remote store")
        if self._key:
            suffix += f".{blake3(self._key).hexdigest()[:16]}"
        self.prefix = f"warmroute:{fingerprint}{suffix}:"
        self._payload_bytes = payload_bytes

    def name(self, key: bytes) -> str:
        return self.prefix + key.hex()

    def header(self, key: bytes, code: int, parts: Iterable[memoryview | bytes]) -> bytes:
        """Return the header of a chunk that the serde ``code`` encoded as ``parts``."""
        encoded = [memoryview(part) for part in parts]
        encoded_bytes = sum(part.nbytes for part in encoded)
        sizes = (HEADER_BYTES, self._payload_bytes, encoded_bytes)
        fields = _FIELDS.pack(_MAGIC, _VERSION, code, *sizes)
        checksum = blake3(fields, key=self._key) if self._key else xxhash.xxh3_128(fields)
        checksum.update(self.prefix.encode() + len(key).to_bytes(2, "little") + key)
        for part in encoded:
            checksum.update(part)
        return fields + checksum.digest()[:_CHECKSUM_BYTES]

    def serde_code(self, key: bytes, header: memoryview, encoded: memoryview) -> int | None:
        """Return the code of the serde that wrote a blob; None if the blob is damaged."""
        code = int(_FIELDS.unpack_from(header)[2])
        # The header is a pure function of the rest, so one comparison checks everything.
        return code if hmac.compare_digest(header, self.header(key, code, [encoded])) else None


class OutageLog:
    """Logs when a server's outage begins and when it ends, instead of each failed call.

    An outage that begins within a minute of the last warning is logged if it lasts until the
    minute is over. Thread-safe. ``server`` must not contain a password.
    """

    def __init__(self, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._lock = threading.Lock()
        self._failing_since_s: float | None = None
        self._warned_s = -math.inf
        self._has_warned = False
        self._is_full = False

    def failed(self, error: Exception) -> None:
        """Record a failed call."""
        now_s = self._clock()
        with self._lock:
            if self._failing_since_s is None:
                self._failing_since_s = now_s
            warn = not self._has_warned and now_s - self._warned_s >= _QUIET_S
            if warn:
                self._has_warned, self._warned_s = True, now_s
        if warn:
            logger.warning(
                "remote tier: %s fails, and its chunks count as misses: %s", self._server, error
            )

    def refused(self, error: Exception) -> None:
        """Record a put that failed because the server is full."""
        self.answered()
        with self._lock:
            began, self._is_full = not self._is_full, True
        if began:
            logger.warning("remote tier: %s stores nothing more: %s", self._server, error)

    def stored(self) -> None:
        """Record a put that succeeded."""
        self._is_full = False
        self.answered()

    def answered(self) -> None:
        """Record a call that succeeded."""
        if self._failing_since_s is None:
            return  # without the lock, which nearly every call would take; a later call sees it
        with self._lock:
            since_s, self._failing_since_s = self._failing_since_s, None
            had_warned, self._has_warned = self._has_warned, False
        if since_s is not None and had_warned:
            gone_s = self._clock() - since_s
            logger.warning("remote tier: %s answers again after %.1f s", self._server, gone_s)


class RemoteTier(SharedTier):
    """Chunks of one layout in a `BlobStore`, encoded by a serde, in envelopes.

    ``readers`` are further serdes that chunks can be read with, so that chunks stay useful when
    a fleet changes its setting. They must be exact. ``server`` names the store in messages,
    ``secret`` see `Envelope`.

    Puts copy nothing: blobs are sent from the pool. Gets of the identity serde copy nothing
    either: blobs are received into the pool.
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
        secret: FleetSecret | None = None,
    ) -> None:
        self.batch_chunks = max(1, min(_BATCH_CHUNKS, _BATCH_BYTES // payload_bytes))
        self._store = store
        self._payload_bytes = payload_bytes
        self._serde = serde
        self._plain = NaiveSerde()
        known = (self._plain, *readers, serde)
        self._serdes: Mapping[int, Serde] = {each.code: each for each in known}
        lossy = "" if serde.is_exact else serde.name
        self._envelope = Envelope(fingerprint, payload_bytes, lossy_serde=lossy, secret=secret)
        self._outage = OutageLog(server)

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
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
            is_paused = isinstance(error, StorePausedError)
            return [PutOutcome.NOT_TRIED if is_paused else PutOutcome.FAILED] * len(chunks)
        finally:
            for parts in encoded:  # the blobs refer to these lists
                let_go(parts)
        if all(stored):
            self._outage.stored()
        return [PutOutcome.STORED if each else PutOutcome.NO_SPACE for each in stored]

    def _encoded(self, key: bytes, payload: memoryview) -> list[memoryview | bytes]:
        serde = self._serde
        parts = serde.encode(payload)
        if not serde.is_identity and sum(map(len, parts)) >= self._payload_bytes:
            # A chunk that does not shrink is sent as it is. So no blob is larger than a chunk
            # with its header, and every blob can be read into its slot.
            serde, parts = self._plain, (payload,)
        header = self._envelope.header(key, serde.code, parts)
        return [header, *parts]

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        headers = [memoryview(bytearray(HEADER_BYTES)) for _ in chunks]
        targets = [
            ReadTarget(self._envelope.name(key), (header, into))
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
            # Intact, so a later release wrote it. Other engines can use it; it is not removed.
            return GetOutcome.MISSING
        if serde.is_identity and encoded_bytes == self._payload_bytes:
            return GetOutcome.OK
        try:
            # Copied, as the encoded bytes lie where the decoded bytes will be.
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
            logger.warning("remote tier: removed damaged chunks: %s", names)
            self.delete(damaged)

    def find(self, keys: Sequence[bytes]) -> list[bool] | None:
        try:
            found = self._store.exists([self._envelope.name(key) for key in keys])
        except StoreError as error:
            self._outage.failed(error)
            return None
        self._outage.answered()
        return found

    def delete(self, keys: Iterable[bytes]) -> None:
        try:
            self._store.remove([self._envelope.name(key) for key in keys])
        except StoreError as error:
            self._outage.failed(error)

    def purge(self, keys: Sequence[bytes] | None) -> int | None:
        try:
            if keys is None:
                return self._store.remove_all(self._envelope.prefix)
            names = [self._envelope.name(key) for key in keys]
            removed = sum(self._store.exists(names))
            self._store.remove(names)
        except StoreError as error:
            logger.warning("remote tier: not all chunks were cleared: the server %s", error)
            return None
        return removed

    def close(self) -> None:
        self._store.close()


def make_serde(name: str, dtype: str) -> Serde:
    """Return the serde of this name (``remote_serde``) for KV of this type.

    ``dtype`` is vLLM's name of the KV cache's type (`ChunkLayout.dtype`), such as "bfloat16" or
    "fp8_e4m3". Raises ValueError, with a message for the operator, for an unknown name and for KV
    that the serde cannot encode.
    """
    if name not in SERDE_NAMES:
        raise ValueError(f'"{name}" is not one of {", ".join(SERDE_NAMES)}')
    if name == NaiveSerde.name:
        return NaiveSerde()
    # Most engines, and all simulated replicas, do without numpy.
    from cacheengine.tiers.compression import CacheGenSerde, LosslessSerde  # noqa: PLC0415

    if name == CacheGenSerde.name:
        return CacheGenSerde(dtype)
    return LosslessSerde(_ELEMENT_BYTES.get(dtype, 1))


def lossy_name(name: str, dtype: str) -> str:
    """Return the name of a serde that changes KV, "" for an exact one; ValueError as above."""
    return "" if make_serde(name, dtype).is_exact else name
