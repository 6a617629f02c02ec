"""What LMCache's coordinator is and answers: `state` takes registrations and events in order,
`directory` keeps what they tell, `usage` and `pins` what clients ask of it, `api` speaks HTTP.

Called by `router.lmcache`.
"""

from router.lmcache.coordinator.api import CoordinatorApi
from router.lmcache.coordinator.state import Coordinator

__all__ = ["Coordinator", "CoordinatorApi"]
