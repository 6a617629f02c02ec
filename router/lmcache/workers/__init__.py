"""LMCache inside vLLM (``LMCacheConnectorV1``): the router stands in as its controller.

Its workers come to three ZeroMQ `ports`, in the words of `words`. `registry` knows which there
are (`worker`) and which replicas they are inside of (`binding`), `holdings` takes what they tell
of their chunks; `agreement` sees that these have the keys of prompts. `control` is the
controller's API for them, by `calls` to their own ports.

Put together by `room`, for `router.lmcache`.
"""

from router.lmcache.workers.control import WorkerControl
from router.lmcache.workers.room import LmcacheWorkers

__all__ = ["LmcacheWorkers", "WorkerControl"]
