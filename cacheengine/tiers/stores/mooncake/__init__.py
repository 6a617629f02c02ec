"""Mooncake Store as a remote store; its client runs in a process of its own."""

from cacheengine.tiers.stores.mooncake.settings import mooncake_settings

__all__ = ["mooncake_settings"]
