"""One config file per replica, with LMCache's own keys.

`load_engine_config` reads YAML and ``LMCACHE_`` variables into an `EngineConfig`; a key that
is not served is named with its reason (`lmcache_keys`), anything wrong is a `ConfigError`
that says what, where and how to mend it.

Called by launch, connector, engine, agent and simulator. Imports memory, tiers and residency,
for what they accept.
"""

from cacheengine.settings.loading import load_engine_config
from cacheengine.settings.settings import ConfigError, EngineConfig

__all__ = ["ConfigError", "EngineConfig", "load_engine_config"]
