"""The bootstrap of an Envoy at the router's address, which asks the router's picker."""

import shutil
import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from router.config import PickerConfig, RouterConfig, reachable
from router.envoy.answers import answers_log, notes_answers
from router.envoy.asking import asks, held_s
from router.envoy.names import DESTINATION, LB_METADATA, SERVED, STATUS
from warmroute_common.config_error import Place

_TYPES: Final = "type.googleapis.com/envoy.extensions."
_HTTP_FILTERS: Final = f"{_TYPES}filters.http."
_PICKER: Final = "picker"
_ASKED: Final = "asked"
_CONNECTION_BYTES: Final = 1 << 20
_LONGEST_SILENCE_S: Final = 3600.0
"""After which an answer is given up whose first byte may take as long as it wants."""


def _protocol(options: dict[str, Any], version: str) -> dict[str, Any]:
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    explicit: dict[str, Any] = {"explicit_http_config": {version: {}}}
    typed = {"@type": f"type.googleapis.com/{name}", **explicit, **options}
    return {"typed_extension_protocol_options": {name: typed}}


_GRPC: Final = _protocol({}, "http2_protocol_options")
# Shorter than the 5 s after which vLLM's server closes an idle connection.
_HTTP: Final = _protocol(
    {"common_http_protocol_options": {"idle_timeout": "3s"}}, "http_protocol_options"
)


def program() -> str | None:
    """Return the path of Envoy: the machine's, or that of the wheel beside Python."""
    return shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))


def configuration(config: RouterConfig, at: Place) -> dict[str, Any]:
    """Return the bootstrap of an Envoy at the router's host and port, which asks its picker.

    Raises `ConfigError` for replicas that it cannot reach as they stand; ``at`` is where those
    are configured.
    """
    picker = config.picker or PickerConfig()
    if not config.replicas:
        fix = "name them there, or let a gateway that knows Kubernetes ask the picker"
        raise at.error("names no replica, and this Envoy finds none by itself", fix)
    if not picker.envoy_port:
        raise Place(at.path, "picker.envoy_port").error("0 is no port to ask at", "name one")
    for index, each in enumerate(config.replicas):
        parts = urlsplit(each.url)
        if parts.scheme != "http" or parts.path:
            fix = "write it like http://host:8000, and add the rest in Envoy's own configuration"
            raise at.item(index).at("url").error(f"'{each.url}' is more than a host", fix)
    return {
        "node": {"id": "warmroute", "cluster": "warmroute"},
        "static_resources": {
            "listeners": [_listener(config)],
            "clusters": [
                _replicas(config),
                {**_picker(picker, _PICKER, picker.port), **_GRPC},
                {**_picker(picker, _ASKED, picker.envoy_port), **_HTTP},
            ],
        },
    }


def _listener(config: RouterConfig) -> dict[str, Any]:
    http = {
        "@type": f"{_TYPES}filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "use_remote_address": True,
        "preserve_external_request_id": True,
        "stream_idle_timeout": f"{_idle_s(config):g}s",
        # While the picker holds a request Envoy still counts it as coming.
        "request_timeout": f"{config.timeouts.body_s + held_s(config):g}s",
        **answers_log(_PICKER),
        "route_config": {
            "name": "replicas",
            "virtual_hosts": [
                {
                    "name": "replicas",
                    "domains": ["*"],
                    "request_body_buffer_limit": config.max_body_bytes,
                    "routes": [_route(config)],
                    # What the picker says is added to the answer's headers, beside a replica's own.
                    "response_headers_to_remove": ["x-request-id", "x-warmroute-replica", STATUS],
                }
            ],
        },
        "http_filters": [
            notes_answers(),  # the first: of answers it sees what the second has set
            asks(config, _ASKED),
            {"name": "router", "typed_config": {"@type": f"{_HTTP_FILTERS}router.v3.Router"}},
        ],
    }
    chain = {"name": "clients", "filters": [{"name": "http", "typed_config": http}]}
    return {
        "name": "clients",
        "address": _address(config.host, config.port),
        # Of an answer, for a client that reads slowly.
        "per_connection_buffer_limit_bytes": min(_CONNECTION_BYTES, config.max_body_bytes),
        "filter_chains": [chain],
    }


def _route(config: RouterConfig) -> dict[str, Any]:
    to: dict[str, Any] = {"cluster": "replicas", "timeout": "0s"}
    if config.retries:
        retry_on = "connect-failure,refused-stream,reset,gateway-error"
        to["retry_policy"] = {"retry_on": retry_on, "num_retries": config.retries}
        if config.timeouts.first_byte_s is not None:
            to["retry_policy"]["per_try_timeout"] = f"{config.timeouts.first_byte_s:g}s"
    return {"name": "all", "match": {"prefix": "/"}, "route": to}


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
        **_HTTP,
    }


def _picker(picker: PickerConfig, name: str, port: int) -> dict[str, Any]:
    found = _cluster(name, [(reachable(picker.host), port)])
    if picker.certificate is not None:
        tls = {"@type": f"{_TYPES}transport_sockets.tls.v3.UpstreamTlsContext"}
        found["transport_socket"] = {"name": "tls", "typed_config": tls}
    return found


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


def _policy(name: str, typed: dict[str, Any]) -> dict[str, Any]:
    return {"policies": [{"typed_extension_config": {"name": name, "typed_config": typed}}]}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _idle_s(config: RouterConfig) -> float:
    """Return how long a request may rest; Envoy does not tell its time before the first byte."""
    timeouts = config.timeouts
    if timeouts.first_byte_s is None:
        return 0.0 if timeouts.stream_idle_s is None else _LONGEST_SILENCE_S
    tries = config.retries + 1
    return max(tries * timeouts.first_byte_s + held_s(config), timeouts.stream_idle_s or 0.0)
