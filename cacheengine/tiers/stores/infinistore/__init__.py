"""InfiniStore as a remote store; its client runs in a process of its own."""

from cacheengine.tiers.stores.infinistore.infinistore import InfiniStore

__all__ = ["InfiniStore"]
