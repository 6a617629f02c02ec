"""Reading a replica's configuration: LMCache's file, environment variables and keys.

A YAML file, named by ``LMCACHE_CONFIG_FILE``, is read first; ``LMCACHE_*`` variables override it.
Sizes are in GB (1024**3 bytes). No key is ignored silently: an unknown key is an error, and a key
that LMCache knows and this engine does not serve is an error or a warning. The key tables follow
LMCache's documentation ("Configuring LMCache") and its ``v1/config.py``.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Final

from cacheengine.settings.engine_config import EngineConfig
from warmroute_common.config_reader import (
    BadValueError,
    ConfigError,
    ConfigLocation,
    check_kind,
    is_null,
    parse_bool,
    parse_setting,
    read_yaml,
    suggestion,
)
from warmroute_common.fleet_secret import FILE_KEY, VARIABLE, read_fleet_secret

logger = logging.getLogger("vllm.warmroute")

CONFIG_FILE_VARIABLE: Final = "LMCACHE_CONFIG_FILE"
_PREFIX: Final = "LMCACHE_"
_ENVIRONMENT: Final = "environment"
_WITH_EXTRA_CONFIG: Final = ("mooncakestore://", "infinistore://")
_SERVICE_VARIABLE: Final = re.compile(
    r"LMCACHE_\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Kubernetes gives every pod variables like these for each service in its namespace; a service
called lmcache-server must not stop a replica."""

ALIASES: Final[dict[str, str]] = {
    "controller_pull_url": "controller_url",
    "lmcache_worker_ports": "lmcache_worker_port",
    "plugin_locations": "runtime_plugin_locations",
    "external_backends": "storage_plugins",
    "enable_xpyd": "enable_pd",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "nixl_role": "pd_role",
    "p2p_init_ports": "peer_init_ports",
    "p2p_lookup_ports": "peer_lookup_ports",
}
"""Other names of a key in earlier and later versions of LMCache."""

REFUSED: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "use_layerwise": ((False,), "chunks are moved whole, not layer by layer"),
    "enable_blending": ((False,), "only prefixes are reused, so that answers stay exact"),
    "enable_p2p": ((False,), "replicas do not share chunks over LMCache's peer protocol"),
    "enable_pd": ((False,), "disaggregated prefill is not supported"),
    "enable_hidden_state_cache": ((False,), "hidden states are not cached"),
    "external_lookup_client": ((), "lookups are answered by the engine itself"),
    "audit_actual_remote_url": ((), "remote tiers are not audited"),
    "gds_path": ((), "there is no GPU Direct Storage tier; use local_disk"),
    "maru_path": ((), "there is no CXL tier; use local_disk"),
    "storage_plugins": (([],), "LMCache's storage plugins cannot be loaded"),
    "remote_storage_plugins": (([],), "LMCache's storage plugins cannot be loaded"),
    "runtime_plugin_locations": (([],), "LMCache's runtime plugins cannot be loaded"),
    "retrieve_locations": ((), "chunks are read from every tier there is"),
    "store_location": ((), "chunks are stored in every tier there is"),
    "priority_limit": ((), "every request is cached, whatever its priority"),
    "remote_config_url": ((), "configuration comes from the file and the environment only"),
    "hit_miss_ratio": ((), "lookups tell the truth"),
}
"""Keys for features that the engine does not have: an error, unless the value is one of these."""

_INERT_BY_REASON: Final[dict[str, str]] = {
    "keys are vLLM's own: see --prefix-caching-hash-algo": "pre_caching_hash_algorithm",
    "only whole chunks are stored": "save_unfull_chunk",
    "every whole chunk that is found is used": "min_retrieve_tokens",
    "no request waits for the tiers": "blocking_timeout_secs",
    "lookups read a dictionary and do not wait": "lookup_timeout_ms",
    "lookups read a dictionary and need no server": "lookup_server_worker_ids",
    "lookups always happen in the scheduler": "enable_scheduler_bypass_lookup",
    "loading never blocks the scheduler": "enable_async_loading",
    "Python's garbage collector is left as it is": "py_enable_gc",
    "memory is placed by vLLM": "numa_mode",
    "events are always on": "enable_kv_events",
    "vLLM copies between GPU and pool": "use_gpu_connector_v3",
    "there is no cost-aware policy": "cost_aware_half_life_seconds cost_aware_ewma_alpha",
    "chunks are spread over all directories": "local_disk_path_sharding",
    "the agent runs no scripts": "script_allowed_imports",
    "there is no remote configuration": "app_id",
    "there is no separate cache server": "mp_host mp_port",
    "the controller needs no reply channel": "controller_reply_url",
    "a replica has one agent": "lmcache_worker_ids",
    "heartbeats begin when the agent has registered": "lmcache_worker_heartbeat_delay_time",
    "the whole pool is reserved at start": (
        "reserve_local_cpu_size enable_lazy_memory_allocator lazy_memory_initial_ratio "
        "lazy_memory_expand_trigger_ratio lazy_memory_step_ratio lazy_memory_safe_size"
    ),
    "the caller of /prefetch says how long to pin": "pin_timeout_sec pin_check_interval_sec",
    "the agent answers on lmcache_worker_port": (
        "internal_api_server_enabled internal_api_server_host internal_api_server_port_start "
        "internal_api_server_include_index_list internal_api_server_socket_path_prefix"
    ),
    "the agent's /metrics has the statistics": (
        "enable_chunk_statistics chunk_statistics_auto_start_statistics "
        "chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_exit_target_unique_chunks "
        "chunk_statistics_strategy"
    ),
    "there is no blending": (
        "blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens "
        "blend_special_str"
    ),
    "there is no peer-to-peer sharing": (
        "p2p_host peer_init_ports peer_lookup_ports transfer_channel"
    ),
    "there is no disaggregated prefill": (
        "pd_role pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port "
        "pd_peer_alloc_port pd_peer_query_port pd_proxy_host pd_proxy_port "
        "pd_allocation_timeout_sec pd_shutdown_timeout_sec pd_condition_poll_interval_sec "
        "pd_max_prefill_len pd_backend_mode pd_skip_proxy_notification pd_bidirectional "
        "nixl_peer_port nixl_receiver_port nixl_backends nixl_buffer_size nixl_buffer_device"
    ),
    "there is no GPU Direct Storage tier": (
        "gds_path_sharding gds_buffer_size use_gds gds_backend cufile_buffer_size"
    ),
    "there is no CXL tier": "maru_pool_size",
    "hidden states are not cached": (
        "max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode"
    ),
}

INERT: Final[dict[str, str]] = {
    key: reason for reason, names in _INERT_BY_REASON.items() for key in names.split()
}
"""Keys without effect here: a warning, with the reason."""

OTHER_VARIABLES: Final = frozenset(
    {
        "LMCACHE_CONFIG_FILE",
        "LMCACHE_USE_EXPERIMENTAL",
        "LMCACHE_LOG_LEVEL",
        "LMCACHE_LOG_FORMAT",
        "LMCACHE_TRACK_USAGE",
        "LMCACHE_DEBUG",
    }
)
"""Variables of LMCache that are not configuration keys; accepted."""

OTHER_PREFIXES: Final = ("LMCACHE_EC_", "LMCACHE_MP_")
"""Variables for other programs of LMCache; a warning."""

_SETTINGS: Final[Mapping[str, Field[Any]]] = {
    each.name: each for each in fields(EngineConfig) if each.metadata.get("parse")
}


@dataclass(frozen=True)
class _Given:
    """One value as a person wrote it, and where."""

    at: ConfigLocation
    value: object


def load_engine_config(
    path: str | Path | None = None, environment: Mapping[str, str] | None = None
) -> EngineConfig:
    """Read the configuration file, if any, and the variables that override it.

    ``path`` defaults to the file that ``LMCACHE_CONFIG_FILE`` names. Raises `ConfigError`; logs a
    warning for each key without effect. What the machine must provide is checked by
    `EngineConfig.check_ready`.
    """
    environment = os.environ if environment is None else environment
    path = path or environment.get(CONFIG_FILE_VARIABLE) or None
    given: dict[str, _Given] = {}
    if path is not None:
        given.update(_by_key(_from_file(Path(path))))
    given.update(_by_key(_from_environment(environment)))
    values = {
        key: parse_setting(_SETTINGS[key], each.value, each.at)
        for key, each in given.items()
        if _is_setting(key, each)
    }
    known: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    try:
        known["fleet_secret"] = read_fleet_secret(known.get(FILE_KEY), environment)
    except BadValueError as error:
        variable = ConfigLocation(_ENVIRONMENT, VARIABLE)
        at = given[FILE_KEY].at if FILE_KEY in given else variable
        raise at.error(error.problem, error.fix) from None
    try:
        config = EngineConfig(source=str(path or _ENVIRONMENT), **known)
    except ConfigError as error:
        if error.key not in given:
            raise
        raise given[error.key].at.error(error.problem, error.fix) from None
    _warn_of_unused(config, given)
    return config


def _warn_of_unused(config: EngineConfig, given: Mapping[str, _Given]) -> None:
    """Log a warning for each setting that another one makes useless."""
    if config.max_local_disk_size > 0 and not config.local_disk:
        _warn(given["max_local_disk_size"], "has no effect without local_disk")
    if config.controller_url and not config.enable_controller:
        _warn(given["controller_url"], "has no effect without enable_controller: true")
    if config.remote_serde != EngineConfig.remote_serde and not config.remote_url:
        _warn(given["remote_serde"], "has no effect without remote_url")
    reads_extra = (config.remote_url or "").lower().startswith(_WITH_EXTRA_CONFIG)
    if config.extra_config and not reads_extra:
        _warn(given["extra_config"], f"is only used with {' and '.join(_WITH_EXTRA_CONFIG)}")


def _from_file(path: Path) -> Iterator[_Given]:
    content, at = read_yaml(path, may_be_empty=True), ConfigLocation(str(path))
    check_kind(content, "replica", at)
    for key, value in content.items():
        yield _Given(at.at(key), value)


def _from_environment(environment: Mapping[str, str]) -> Iterator[_Given]:
    for name, text in sorted(environment.items()):
        if not name.startswith(_PREFIX) or name in OTHER_VARIABLES:
            continue
        if name.startswith(OTHER_PREFIXES):
            logger.warning("%s has no effect: it is for another program of LMCache", name)
            continue
        key = name.removeprefix(_PREFIX).lower()
        if not _is_known(key) and _SERVICE_VARIABLE.fullmatch(name):
            continue
        yield _Given(ConfigLocation(_ENVIRONMENT, name), text)


def _by_key(all_given: Iterator[_Given]) -> dict[str, _Given]:
    result: dict[str, _Given] = {}
    for given in all_given:
        key = given.at.key.removeprefix(_PREFIX).lower()
        if not _is_known(key):
            raise given.at.error("unknown key", _nearest(given.at.key, key))
        key = ALIASES.get(key, key)
        if key in result:
            found = f"sets the same as {result[key].at.key}"
            raise given.at.error(found, "remove one of the two")
        result[key] = given
    return result


def _is_known(key: str) -> bool:
    return any(key in known for known in (_SETTINGS, ALIASES, REFUSED, INERT))


def _nearest(written: str, key: str) -> str:
    known = [*_SETTINGS, *REFUSED, *INERT]
    if written.startswith(_PREFIX):
        return suggestion(written, [_PREFIX + each.upper() for each in known], _SETTINGS)
    return suggestion(key, known, _SETTINGS)


def _is_setting(key: str, given: _Given) -> bool:
    """Whether the engine serves the key. If not: log a warning, or raise `ConfigError`."""
    if key in _SETTINGS:
        return True
    if is_null(given.value):
        return False
    if key in INERT:
        _warn(given, f"has no effect here: {INERT[key]}")
        return False
    harmless, reason = REFUSED[key]
    if not any(_means(given.value, value) for value in harmless):
        allowed = f"remove it or set it to {str(harmless[0]).lower()}" if harmless else "remove it"
        raise given.at.error(f"{given.value!r} is not supported: {reason}", allowed)
    return False


def _warn(given: _Given, text: str) -> None:
    logger.warning("%s: %s: %s", given.at.path, given.at.key, text)


def _means(value: object, harmless: object) -> bool:
    if isinstance(harmless, bool):
        try:
            return parse_bool(value) is harmless
        except BadValueError:
            return False
    return value == harmless or str(value).strip().lower() == str(harmless)
