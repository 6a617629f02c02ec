"""What LMCache's coordinator is, answers and does: `state` takes registrations and events in order,
`directory` keeps what they tell, `usage`, `pins` and `quotas` what clients ask of it; `api` and
`cache_api` speak HTTP, in the words of `calls`; `eviction` has servers delete what is over quota.

Called by `router.lmcache`.
"""

from router.lmcache.coordinator.api import CoordinatorApi
from router.lmcache.coordinator.eviction import L2Eviction
from router.lmcache.coordinator.state import Coordinator

__all__ = ["Coordinator", "CoordinatorApi", "L2Eviction"]
