"""The configuration of one replica's engine, with LMCache's own keys."""

from cacheengine.settings.engine_config import EngineConfig
from cacheengine.settings.lmcache_file import load_engine_config
from warmroute_common.config_reader import ConfigError

__all__ = ["ConfigError", "EngineConfig", "load_engine_config"]
