"""What makes KV of two replicas the same: layout, weights, adapters, and what changed them.

`ChunkLayout` says what a chunk's bytes mean; engines exchange chunks where its fingerprint is
equal. `WeightFiles` tells weights apart by their files. `KvVersions` knows which adapter, and
which weights put in place of those loaded at the start, a request's KV is of: a chunk's key
(`KvVersion.stored_key`) says so in every tier.

Called by connector, agent, engine and simulator. Imports nothing of the engine.
"""

from cacheengine.identity.files import WeightFiles
from cacheengine.identity.layout import ChunkLayout
from cacheengine.identity.versions import UNCACHED, Adapter, KvVersion, KvVersions

__all__ = ["UNCACHED", "Adapter", "ChunkLayout", "KvVersion", "KvVersions", "WeightFiles"]
