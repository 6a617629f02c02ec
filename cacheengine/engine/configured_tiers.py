"""Which tiers lie below the pool, by configuration."""

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from cacheengine.identity import ChunkLayout
from cacheengine.settings import ConfigError, EngineConfig
from cacheengine.tiers import LocalTier, NullTier, SharedTier
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.remote import RemoteTier
from cacheengine.tiers.serde import SERDE_NAMES, Serde, make_serde
from cacheengine.tiers.stores import BlobStore, RemoteUrl, StoreError, parse_remote_url
from cacheengine.tiers.stores.infinistore import InfiniStore
from cacheengine.tiers.stores.mooncake import MooncakeStore
from cacheengine.tiers.stores.redis import REDIS_SCHEMES, RedisServer, RedisStore
from cacheengine.values import BadValue

logger = logging.getLogger("vllm.warmroute")


def make_tier(config: EngineConfig, layout: ChunkLayout) -> LocalTier:
    """Return the tier that the configuration asks for.

    Raises `ConfigError` for a limit below one chunk, OSError for a directory
    that cannot be used or is another process's.
    """
    if not config.local_disk:
        return NullTier()
    tier = DiskTier(
        config.local_disk,
        layout.fingerprint(),
        payload_bytes=layout.chunk_bytes,
        capacity_bytes=config.max_local_disk_bytes,
        direct=config.disk_direct_reads,
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


def make_remote(config: EngineConfig, layout: ChunkLayout) -> SharedTier | None:
    """Return the remote tier that the configuration asks for, if any.

    A server that cannot be reached now is a warning: its chunks are missed
    until it can. Raises `ConfigError` for what only a person can mend.
    """
    if not config.remote_url:
        return None
    config.check_remote_ready()
    url = parse_remote_url(config.remote_url)
    try:
        store = _connect(url, config.remote_url, config.extra_config)
    except BadValue as error:
        raise ConfigError(config.source, "remote_url", error.problem, error.fix) from None
    except StoreError as error:
        fix = "correct it, or remove remote_url"
        raise ConfigError(config.source, "remote_url", f"{url} {error}", fix) from None
    try:
        serde = make_serde(config.remote_serde, layout.dtype)
    except ValueError as error:
        fix = "choose another remote_serde"
        raise ConfigError(config.source, "remote_serde", str(error), fix) from None
    tier = RemoteTier(
        store,
        layout.fingerprint(),
        layout.chunk_bytes,
        serde,
        readers=_exact_serdes(layout.dtype),
        server=str(url),
    )
    # Asked for nothing in particular, so that a server that is down, or a
    # wrong password, is said now and not at the first request.
    if tier.find([hashlib.sha256(b"").digest()]) is not None:
        logger.info("remote tier: %s answers, %s", url, serde.name)
    return tier


def _connect(url: RemoteUrl, text: str, extra: Mapping[str, Any]) -> BlobStore:
    if url.scheme in REDIS_SCHEMES:
        return RedisStore(RedisServer.from_url(url))
    store = MooncakeStore if url.scheme == "mooncakestore" else InfiniStore
    return store.connect(text, extra)


def _exact_serdes(dtype: str) -> list[Serde]:
    """Return what can read the chunks that other settings of the fleet have stored."""
    made = []
    for name in SERDE_NAMES:
        try:
            made.append(make_serde(name, dtype))
        except ValueError:
            continue  # it cannot encode this type, so nothing was encoded by it
    return [serde for serde in made if serde.is_exact]
