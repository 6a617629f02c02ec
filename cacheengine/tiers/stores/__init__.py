"""Remote servers, each behind the same few calls, and how their URLs are written."""

from cacheengine.tiers.stores.base import BlobStore, StoreError
from cacheengine.tiers.stores.url import RemoteUrl, parse_remote_url

__all__ = ["BlobStore", "RemoteUrl", "StoreError", "parse_remote_url"]
