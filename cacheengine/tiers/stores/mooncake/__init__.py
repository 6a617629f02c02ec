"""Mooncake Store as a remote store; its client runs in a process of its own."""

from cacheengine.tiers.stores.mooncake.mooncake import MooncakeStore
from cacheengine.tiers.stores.mooncake.settings import mooncake_settings

__all__ = ["MooncakeStore", "mooncake_settings"]
