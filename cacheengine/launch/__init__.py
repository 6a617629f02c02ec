"""Starting vLLM with the cache engine inside: ``warmroute replica``.

`ReplicaSettings` is what the command line and the config file say together; it becomes
vLLM's arguments. `config_of_rank` is what each data parallel rank is told.

Called by the command line and by the connector, which reads what was passed. Imports
settings.
"""

from cacheengine.launch.vllm_launch import ReplicaSettings, config_of_rank

__all__ = ["ReplicaSettings", "config_of_rank"]
