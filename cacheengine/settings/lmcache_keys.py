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
"""Variables of LMCache that are no configuration keys; accepted."""

OTHER_PREFIXES: Final = ("LMCACHE_EC_", "LMCACHE_MP_")
"""Variables for other programs of LMCache; a warning."""
