"""Stock LMCache servers (``lmcache server``): the router stands in as their coordinator.

They register and report their events on the controller's port; `coordinator` keeps their
streams in order, knows what they hold, and tells the fleet what that means for the replicas
they serve (`members`, `ties`). `watch` sees that they live, `prefetch` has them bring chunks
to CPU RAM, `ask` finds out what they hold where events were missed; `server` speaks to one, in
the words of `wire`.

LMCache inside vLLM speaks another protocol, to a controller: `workers` stands in for that.

Put together by the application. Imports config, http, residency, fleet, staging and tasks.
"""

from router.lmcache.lmcache import Lmcache
from router.lmcache.server import LmcacheServer

__all__ = ["Lmcache", "LmcacheServer"]
