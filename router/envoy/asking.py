"""How Envoy asks the picker where a request goes: by HTTP, with its external authorization.

Headers and body go to the picker, whose answer's headers are
set on the request, and on the client's answer. Gateways ask by external processing, with gRPC:
that costs a picker in Python three times as much, and Envoy half as much again.
"""

from typing import Any, Final

from router.config import MAX_WAIT_HEADER, RouterConfig
from router.envoy.names import (
    DESTINATION,
    EXCHANGE,
    HINT,
    MAX_RETRIES,
    REPLICAS,
    STATUS,
    SUBSET,
    SUBSET_METADATA,
    TOLD_HEADERS,
)

_NO_ANSWER_SLACK_S: Final = 30.0
"""The picker may take so much longer than it holds requests, to read their prompts."""


def held_s(config: RouterConfig) -> float:
    """Return how long the picker may hold a request."""
    return config.admission.max_wait_s + config.prefetch.wait_cap_s


def asks(config: RouterConfig, cluster: str) -> dict[str, Any]:
    """Return the filter that asks the picker, which is the ``cluster``."""
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_authz.v3.ExtAuthz"
    session = config.sessions.header.lower()
    hint = f"%DYNAMIC_METADATA({SUBSET_METADATA}:{SUBSET})%"
    typed = {
        "@type": kind,
        # Without a picker replicas take turns, and answers that have begun go on.
        "failure_mode_allow": True,
        "with_request_body": {"max_request_bytes": config.max_body_bytes, "pack_as_bytes": True},
        "allowed_headers": _named(
            *("content-type", "x-request-id", "traceparent"),
            *(MAX_WAIT_HEADER.lower(), SUBSET, session),
        ),
        # A client's key is no business of the picker's.
        "disallowed_headers": _named("authorization"),
        "http_service": {
            "server_uri": {
                "uri": f"http://{cluster}",
                "cluster": cluster,
                "timeout": f"{held_s(config) + _NO_ANSWER_SLACK_S:g}s",
            },
            "authorization_request": {"headers_to_add": [{"key": HINT, "value": hint}]},
            "authorization_response": {
                "allowed_upstream_headers": _named(DESTINATION, MAX_RETRIES, "authorization"),
                "allowed_client_headers_on_success": {
                    "patterns": [{"exact": "x-request-id"}, {"prefix": TOLD_HEADERS}]
                },
                "allowed_client_headers": _named("content-type", "retry-after", STATUS),
                "dynamic_metadata_from_headers": _named(EXCHANGE, DESTINATION, REPLICAS),
            },
        },
    }
    return {"name": "picker", "typed_config": typed}


def _named(*names: str) -> dict[str, Any]:
    return {"patterns": [{"exact": each} for each in names]}
