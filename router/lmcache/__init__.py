"""LMCache for routing: the router is the coordinator of stock LMCache servers, and the controller
of LMCache inside vLLM and of our own engine's agents.
"""

from router.lmcache.controller import Controller
from router.lmcache.instance_registry import ConfiguredInstance
from router.lmcache.lmcache import Lmcache
from router.lmcache.server_client import LmcacheServerClient, LmcacheServerError

__all__ = [
    "ConfiguredInstance",
    "Controller",
    "Lmcache",
    "LmcacheServerClient",
    "LmcacheServerError",
]
