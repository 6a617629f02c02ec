"""The tiers below the pool, each behind the same few calls (`base`).

`DiskTier` writes one file a chunk; `RemoteTier` keeps chunks in a store (`stores`: Redis,
Mooncake, InfiniStore), encoded by a `Serde`. A tier that fails rests (`Rest`), and the
engine goes on without it.

Called by engine, residency and settings. Imports keys and values.
"""

from cacheengine.tiers.base import GetOutcome, LocalTier, PutOutcome, SharedTier, Tier
from cacheengine.tiers.disk.disk import DiskTier
from cacheengine.tiers.null import NullTier
from cacheengine.tiers.remote.remote import RemoteTier
from cacheengine.tiers.remote.remote_check import (
    check_remote_ready,
    check_remote_url,
    check_serde_name,
    reads_extra_config,
)
from cacheengine.tiers.remote.remote_url import RemoteUrl, parse_remote_url
from cacheengine.tiers.rest import LONGEST_REST_S, Rest
from cacheengine.tiers.serde.base import Serde
from cacheengine.tiers.serde.configured import SERDE_NAMES, lossy_name, make_serde
from cacheengine.tiers.stores.base import BlobStore, StoreError
from cacheengine.tiers.stores.redis.redis import RedisStore
from cacheengine.tiers.stores.redis.redis_server import REDIS_SCHEMES, RedisServer

__all__ = [
    "LONGEST_REST_S",
    "REDIS_SCHEMES",
    "SERDE_NAMES",
    "BlobStore",
    "DiskTier",
    "GetOutcome",
    "LocalTier",
    "NullTier",
    "PutOutcome",
    "RedisServer",
    "RedisStore",
    "RemoteTier",
    "RemoteUrl",
    "Rest",
    "Serde",
    "SharedTier",
    "StoreError",
    "Tier",
    "check_remote_ready",
    "check_remote_url",
    "check_serde_name",
    "lossy_name",
    "make_serde",
    "parse_remote_url",
    "reads_extra_config",
]
