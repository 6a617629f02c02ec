"""A disk tier over directories of a test, and the chunks put into it and read back."""

from pathlib import Path

from cacheengine.tiers.chunk_file import SEAL_BYTES
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import CHUNK_BYTES, payload

FINGERPRINT = "0123456789abcdef" * 2
ITEM_BYTES = CHUNK_BYTES + SEAL_BYTES


def open_disk(*roots: Path, fingerprint: str = FINGERPRINT, chunks: int = 1000) -> DiskTier:
    """A tier with room for N chunks, which waits for no other owner of its directories."""
    return DiskTier(roots, fingerprint, CHUNK_BYTES, chunks * ITEM_BYTES, lock_wait_s=0.0)


def put(tier: DiskTier, chunk: bytes) -> PutOutcome:
    """Put the bytes that belong to a key."""
    return tier.put(chunk, memoryview(payload(chunk)))


def get(tier: DiskTier, chunk: bytes) -> GetOutcome:
    """Get a chunk; AssertionError when its bytes do not belong to the key."""
    buffer = bytearray(CHUNK_BYTES)
    outcome = tier.get(chunk, memoryview(buffer))
    assert outcome is not GetOutcome.OK or buffer == payload(chunk)
    return outcome


def bytes_under(*roots: Path) -> int:
    """What all files below these directories have together."""
    files = (file for root in roots for file in root.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())
