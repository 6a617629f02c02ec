"""How a chunk's bytes are written for the remote tier."""

from cacheengine.tiers.serde.base import Serde
from cacheengine.tiers.serde.configured import SERDE_NAMES, lossy_name, make_serde

__all__ = ["SERDE_NAMES", "Serde", "lossy_name", "make_serde"]
