"""LMCache's keys that this engine does not serve, each with the reason.

From LMCache's documentation ("Configuring LMCache") and the key table of its
``v1/config.py``. What is served is in `settings`. A key must be in exactly one
of these places, or it is an error: so nothing is ignored in silence.
"""

from typing import Final

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
"""Other names of a key, in LMCache's earlier and later versions."""

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
"""Keys that ask for what the engine does not do: an error, with the values that ask for nothing."""

_POOL = "the whole pool is reserved at start"
_AGENT = "the agent answers on lmcache_worker_port"
_PD = "there is no disaggregated prefill"
_P2P = "there is no peer-to-peer sharing"
_BLEND = "there is no blending"
_GDS = "there is no GPU Direct Storage tier"
_STATISTICS = "the agent's /metrics has the statistics"
_PINS = "the caller of /prefetch says how long to pin"

INERT: Final[dict[str, str]] = {
    "pre_caching_hash_algorithm": "keys are vLLM's own: see --prefix-caching-hash-algo",
    "save_unfull_chunk": "only whole chunks are stored",
    "min_retrieve_tokens": "every whole chunk that is found is used",
    "blocking_timeout_secs": "no request waits for the tiers",
    "lookup_timeout_ms": "lookups read a dictionary and do not wait",
    "lookup_server_worker_ids": "lookups read a dictionary and need no server",
    "enable_scheduler_bypass_lookup": "lookups always happen in the scheduler",
    "enable_async_loading": "loading never blocks the scheduler",
    "py_enable_gc": "Python's garbage collector is left as it is",
    "numa_mode": "memory is placed by vLLM",
    "enable_kv_events": "events are always on",
    "use_gpu_connector_v3": "vLLM copies between GPU and pool",
    "cost_aware_half_life_seconds": "there is no cost-aware policy",
    "cost_aware_ewma_alpha": "there is no cost-aware policy",
    "local_disk_path_sharding": "there is one directory",
    "script_allowed_imports": "the agent runs no scripts",
    "app_id": "there is no remote configuration",
    "mp_host": "there is no separate cache server",
    "mp_port": "there is no separate cache server",
    "controller_reply_url": "the controller needs no reply channel",
    "lmcache_worker_ids": "a replica has one agent",
    "lmcache_worker_heartbeat_delay_time": "heartbeats begin when the agent has registered",
    "reserve_local_cpu_size": _POOL,
    "enable_lazy_memory_allocator": _POOL,
    "lazy_memory_initial_ratio": _POOL,
    "lazy_memory_expand_trigger_ratio": _POOL,
    "lazy_memory_step_ratio": _POOL,
    "lazy_memory_safe_size": _POOL,
    "pin_timeout_sec": _PINS,
    "pin_check_interval_sec": _PINS,
    "internal_api_server_enabled": _AGENT,
    "internal_api_server_host": _AGENT,
    "internal_api_server_port_start": _AGENT,
    "internal_api_server_include_index_list": _AGENT,
    "internal_api_server_socket_path_prefix": _AGENT,
    "enable_chunk_statistics": _STATISTICS,
    "chunk_statistics_auto_start_statistics": _STATISTICS,
    "chunk_statistics_auto_exit_timeout_hours": _STATISTICS,
    "chunk_statistics_auto_exit_target_unique_chunks": _STATISTICS,
    "chunk_statistics_strategy": _STATISTICS,
    "blend_recompute_ratios": _BLEND,
    "blend_thresholds": _BLEND,
    "blend_check_layers": _BLEND,
    "blend_min_tokens": _BLEND,
    "blend_special_str": _BLEND,
    "p2p_host": _P2P,
    "peer_init_ports": _P2P,
    "peer_lookup_ports": _P2P,
    "transfer_channel": _P2P,
    "pd_role": _PD,
    "pd_buffer_size": _PD,
    "pd_buffer_device": _PD,
    "pd_peer_host": _PD,
    "pd_peer_init_port": _PD,
    "pd_peer_alloc_port": _PD,
    "pd_peer_query_port": _PD,
    "pd_proxy_host": _PD,
    "pd_proxy_port": _PD,
    "pd_allocation_timeout_sec": _PD,
    "pd_shutdown_timeout_sec": _PD,
    "pd_condition_poll_interval_sec": _PD,
    "pd_max_prefill_len": _PD,
    "pd_backend_mode": _PD,
    "pd_skip_proxy_notification": _PD,
    "pd_bidirectional": _PD,
    "nixl_peer_port": _PD,
    "nixl_receiver_port": _PD,
    "nixl_backends": _PD,
    "nixl_buffer_size": _PD,
    "nixl_buffer_device": _PD,
    "gds_path_sharding": _GDS,
    "gds_buffer_size": _GDS,
    "use_gds": _GDS,
    "gds_backend": _GDS,
    "cufile_buffer_size": _GDS,
    "maru_pool_size": "there is no CXL tier",
    "max_hidden_state_cpu_size": "hidden states are not cached",
    "hidden_state_layers": "hidden states are not cached",
    "hidden_states_retrieve_mode": "hidden states are not cached",
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
"""Variables of LMCache that are no configuration keys; accepted."""

OTHER_PREFIXES: Final = ("LMCACHE_EC_", "LMCACHE_MP_")
"""Variables for other programs of LMCache; a warning."""
