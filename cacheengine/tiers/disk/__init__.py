"""The local disk tier: one file a chunk, direct I/O, several directories."""

from cacheengine.tiers.disk.chunk_file import SEAL_BYTES
from cacheengine.tiers.disk.disk import DiskTier

__all__ = ["SEAL_BYTES", "DiskTier"]
