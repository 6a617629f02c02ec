"""What the tiers below the pool hold, as far as is known.

`LowerIndex` says what the decisions ask of such a tier; `TierIndex` knows all that a local tier
holds, `RemoteIndex` some of what a shared store does.

Called by residency. Imports tiers (outcomes, pauses) and wire; no I/O, no clock, no threads.
"""

from cacheengine.residency.lower.local_index import TierIndex
from cacheengine.residency.lower.lower_index import LowerIndex
from cacheengine.residency.lower.shared_index import RemoteIndex

__all__ = ["LowerIndex", "RemoteIndex", "TierIndex"]
