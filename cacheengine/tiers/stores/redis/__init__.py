"""Redis and Valkey as a remote store, one server or a cluster's endpoint."""

from cacheengine.tiers.stores.redis.redis import RedisStore
from cacheengine.tiers.stores.redis.redis_server import REDIS_SCHEMES, RedisServer

__all__ = ["REDIS_SCHEMES", "RedisServer", "RedisStore"]
