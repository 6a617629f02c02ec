"""Starting vLLM with the cache engine inside: ``warmroute replica``.

`ReplicaSettings` is what the command line and the config file say together; it becomes
vLLM's arguments.

Called by the command line and by the connector, which reads what was passed. Imports
settings.
"""

from cacheengine.launch.launch import ReplicaSettings

__all__ = ["ReplicaSettings"]
