"""LMCache's controller, as far as a router serves it: one address for all instances.

Instances are configured or register themselves; lookups, moves, pins and clears are passed
on to their agents, or to what the application gives as `OtherInstances`.

Started by the application on a port of its own. Imports config, http, access
and staging.
"""

from router.controller.controller import Controller
from router.controller.registry import Configured

__all__ = ["Configured", "Controller"]
