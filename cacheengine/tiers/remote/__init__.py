"""The remote tier: any store of blobs behind it, checked envelopes, outages waited out."""

from cacheengine.tiers.remote.remote import RemoteTier

__all__ = ["RemoteTier"]
