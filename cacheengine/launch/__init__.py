"""Starting vLLM with the cache engine inside: ``warmroute replica``."""

from cacheengine.launch.vllm_launch import ReplicaSettings, config_of_rank

__all__ = ["ReplicaSettings", "config_of_rank"]
