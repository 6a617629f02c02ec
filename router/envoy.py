"""The configuration of an Envoy that carries the requests, and asks the picker where they go.

`configuration` makes it, and an operator's own file is merged into it: TLS, limits, retries and
access logs are Envoy's to do, in Envoy's own words. The names in it that the picker reads are here.

Called by launch, picker and the command line. Imports config.
"""

import shutil
import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from router.config import PickerConfig, Place, RouterConfig, reachable

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Of a header, and in `LB_METADATA`: where the request goes (endpoint picker protocol)."""
SERVED: Final = "x-gateway-destination-endpoint-served"
"""In `LB_METADATA`: the endpoint that answered."""
LB_METADATA: Final = "envoy.lb"
OWN_METADATA: Final = "warmroute"
FIRST_BYTE_OF: Final = "exchange"
"""In `OWN_METADATA`: which exchange a call for the first byte belongs to."""
MAX_RETRIES: Final = "x-envoy-max-retries"
"""A header that Envoy takes from the picker: no more retries than there are destinations."""
MARK: Final = ("x-warmroute-gateway", "generated")
"""Metadata of each call by an Envoy with this configuration."""

_TYPES: Final = "type.googleapis.com/envoy.extensions."
_HTTP_FILTERS: Final = f"{_TYPES}filters.http."
_NO_ANSWER_SLACK_S: Final = 30.0
"""The picker may take so much longer than it holds requests, to read their prompts."""


def program() -> str | None:
    """Return the path of Envoy: the machine's, or that of the wheel beside Python."""
    return shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))


def configuration(config: RouterConfig, at: Place) -> dict[str, Any]:
    """Return the bootstrap of an Envoy at the router's host and port, which asks its picker.

    Raises `ConfigError` for replicas that it cannot reach as they stand; ``at`` is where those
    are configured.
    """
    picker = config.picker or PickerConfig()
    for index, each in enumerate(config.replicas):
        parts = urlsplit(each.url)
        if parts.scheme != "http" or parts.path:
            fix = "write it like http://host:8000, and add the rest in Envoy's own configuration"
            raise at.item(index).at("url").error(f"'{each.url}' is more than a host", fix)
    return {
        "node": {"id": "warmroute", "cluster": "warmroute"},
        "static_resources": {
            "listeners": [_listener(config)],
            "clusters": [_replicas(config), _picker(picker)],
        },
    }


def merge(base: Any, own: Any) -> Any:
    """Return ``base`` with an operator's own settings over it.

    Mappings are merged key by key and lists of things with a ``name`` thing by thing; one that is
    not there is added at the end, except filters of HTTP, which go before the first: the last
    one there must be the router. All else is replaced.
    """
    if isinstance(base, dict) and isinstance(own, dict):
        return {
            **base,
            **{key: merge(base[key], own[key]) if key in base else own[key] for key in own},
        }
    if _are_named(base) and _are_named(own):
        mine = {each["name"]: each for each in base}
        theirs = {each["name"]: each for each in own}
        merged = [
            merge(each, theirs[name]) if name in theirs else each for name, each in mine.items()
        ]
        added = [each for name, each in theirs.items() if name not in mine]
        is_chain = bool(merged) and merged[-1]["name"] == "router"
        return [*added, *merged] if is_chain else [*merged, *added]
    return own


def _are_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(e, dict) and "name" in e for e in value)


def _listener(config: RouterConfig) -> dict[str, Any]:
    timeouts = config.timeouts
    # A prompt may rightly wait and compute for minutes before the first byte of its answer.
    idle_s = 0.0 if timeouts.first_byte_s is None else timeouts.first_byte_s + _held_s(config)
    http = {
        "@type": f"{_TYPES}filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "use_remote_address": True,
        "preserve_external_request_id": True,
        "stream_idle_timeout": f"{idle_s:g}s",
        "route_config": {
            "name": "replicas",
            "virtual_hosts": [{"name": "replicas", "domains": ["*"], "routes": _routes(config)}],
        },
        "http_filters": [
            {"name": "picker", "typed_config": _ask(config)},
            {"name": "first-byte", "typed_config": _tell_first_byte()},
            {"name": "router", "typed_config": {"@type": f"{_HTTP_FILTERS}router.v3.Router"}},
        ],
    }
    chain = {"name": "clients", "filters": [{"name": "http", "typed_config": http}]}
    return {
        "name": "clients",
        "address": _address(config.host, config.port),
        "per_connection_buffer_limit_bytes": config.max_body_bytes,
        "filter_chains": [chain],
    }


def _routes(config: RouterConfig) -> list[dict[str, Any]]:
    """Return one route for answers whose first byte is to be told, and one for all others."""
    to: dict[str, Any] = {"cluster": "replicas", "timeout": "0s"}
    if config.retries:
        retry_on = "connect-failure,refused-stream,reset,gateway-error"
        to["retry_policy"] = {"retry_on": retry_on, "num_retries": config.retries}
    told = {
        "filter": OWN_METADATA,
        "path": [{"key": FIRST_BYTE_OF}],
        "value": {"present_match": True},
    }
    off = {"@type": f"{_HTTP_FILTERS}ext_proc.v3.ExtProcPerRoute", "disabled": True}
    return [
        {"name": "streamed", "match": {"prefix": "/", "dynamic_metadata": [told]}, "route": to},
        {
            "name": "whole",
            "match": {"prefix": "/"},
            "route": to,
            "typed_per_filter_config": {"first-byte": off},
        },
    ]


def _ask(config: RouterConfig) -> dict[str, Any]:
    """Return the filter that asks where a request goes, and tells how it is answered.

    Of the answer's body it tells nothing unless the picker asks for it. Since trailers might
    come, the call stays open to the end of the answer: that is how the picker learns of it.
    """
    return {
        "@type": f"{_HTTP_FILTERS}ext_proc.v3.ExternalProcessor",
        "grpc_service": _call(),
        # Without a picker replicas take turns, and answers that have begun go on.
        "failure_mode_allow": True,
        "message_timeout": f"{_held_s(config) + _NO_ANSWER_SLACK_S:g}s",
        "allow_mode_override": True,
        "mutation_rules": {"allow_envoy": True},
        "metadata_options": {
            "forwarding_namespaces": {"untyped": [LB_METADATA, "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": [LB_METADATA, OWN_METADATA]},
        },
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "response_header_mode": "SEND",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SEND",
        },
    }


def _tell_first_byte() -> dict[str, Any]:
    """Return the filter that tells of a streamed answer's first bytes, and waits for no reply."""
    return {
        "@type": f"{_HTTP_FILTERS}ext_proc.v3.ExternalProcessor",
        "grpc_service": _call(),
        "failure_mode_allow": True,
        "observability_mode": True,
        "metadata_options": {"forwarding_namespaces": {"untyped": [OWN_METADATA]}},
        "processing_mode": {
            "request_header_mode": "SKIP",
            "response_header_mode": "SKIP",
            "response_body_mode": "STREAMED",
        },
    }


def _call() -> dict[str, Any]:
    key, value = MARK
    return {
        "envoy_grpc": {"cluster_name": "picker"},
        "initial_metadata": [{"key": key, "value": value}],
    }


def _replicas(config: RouterConfig) -> dict[str, Any]:
    """Return the cluster of the replicas: the picker says which, in what order."""
    policies = f"{_TYPES}load_balancing_policies"
    turns = {"@type": f"{policies}.round_robin.v3.RoundRobin"}
    by_picker = {
        "@type": f"{policies}.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": DESTINATION}],
        "selected_host_key": {"key": LB_METADATA, "path": [{"key": SERVED}]},
        "fallback_policy": _policy("turns", turns),
    }
    parts = [urlsplit(each.url) for each in config.replicas]
    return {
        **_cluster("replicas", [(each.hostname or "", each.port or 80) for each in parts]),
        "connect_timeout": f"{config.timeouts.connect_s:g}s",
        "load_balancing_policy": _policy("picker", by_picker),
        # Shorter than the 5 s after which vLLM's server closes an idle connection.
        **_protocol(
            {"common_http_protocol_options": {"idle_timeout": "3s"}}, "http_protocol_options"
        ),
    }


def _picker(picker: PickerConfig) -> dict[str, Any]:
    host = reachable(picker.host)
    found = _cluster("picker", [(host, picker.port)])
    if picker.certificate is not None:
        tls = {"@type": f"{_TYPES}transport_sockets.tls.v3.UpstreamTlsContext"}
        found["transport_socket"] = {"name": "tls", "typed_config": tls}
    return {**found, **_protocol({}, "http2_protocol_options")}


def _cluster(name: str, hosts: list[tuple[str, int]]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(host, port)}} for host, port in hosts]
    # Whether more may be sent is the picker's to say.
    unlimited = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), 1 << 20)
    return {
        "name": name,
        "type": "STRICT_DNS",
        "dns_lookup_family": "V4_PREFERRED",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "circuit_breakers": {"thresholds": [{**unlimited, "max_retries": 1 << 20}]},
    }


def _protocol(options: dict[str, Any], version: str) -> dict[str, Any]:
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    explicit: dict[str, Any] = {"explicit_http_config": {version: {}}}
    typed = {"@type": f"type.googleapis.com/{name}", **explicit, **options}
    return {"typed_extension_protocol_options": {name: typed}}


def _policy(name: str, typed: dict[str, Any]) -> dict[str, Any]:
    return {"policies": [{"typed_extension_config": {"name": name, "typed_config": typed}}]}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _held_s(config: RouterConfig) -> float:
    """Return how long the picker may hold a request."""
    return config.admission.max_wait_s + config.prefetch.wait_cap_s
