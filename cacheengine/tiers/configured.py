"""Which tier lies below the pool, by configuration."""

from cacheengine.chunk import ChunkLayout
from cacheengine.config import ConfigError, EngineConfig
from cacheengine.tiers.base import LocalTier
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.null import NullTier


def make_tier(config: EngineConfig, layout: ChunkLayout) -> LocalTier:
    """Return the tier that the configuration asks for.

    Raises `ConfigError` for a limit below one chunk, OSError for a directory
    that cannot be used or is another process's.
    """
    if not config.local_disk:
        return NullTier()
    tier = DiskTier(
        config.local_disk[0],
        layout.fingerprint(),
        payload_bytes=layout.chunk_bytes,
        capacity_bytes=config.max_local_disk_bytes,
    )
    if tier.capacity_bytes < tier.item_bytes:
        tier.close()
        raise ConfigError(
            config.source,
            "max_local_disk_size",
            f"{config.max_local_disk_size} GB holds not one chunk of {tier.item_bytes} bytes",
            f"set at least {2 * tier.item_bytes / 1024**3:.3f}",
        )
    return tier
