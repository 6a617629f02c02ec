"""What an operator sets, what the decision weighs by, and what can go wrong.

`RouterConfig` is read from YAML by `load_router_config` (`loading`); every key is checked
against the dataclasses in `settings` by `schema`. `Judgment` is the one table of the decision's
constants. `errors` holds each error that a client can get, with its status and code;
`observability` has what is told of requests, `addresses` compares hosts, ports and URLs;
`credentials` makes TLS contexts from files, and reads the fleet's secret.

Imported by every room; imports none.
"""

from router.config.addresses import host_port, is_loopback, is_same_url, reachable, server_key
from router.config.breaker import BreakerConfig
from router.config.clients import (
    AccessConfig,
    CorsConfig,
    KeyConfig,
    ReplicaTlsConfig,
    TlsConfig,
)
from router.config.credentials import (
    client_context,
    load_certificate,
    load_fleet_secret,
    server_context,
)
from router.config.discovery import (
    DiscoveredConfig,
    DiscoveryConfig,
    DnsConfig,
    KubernetesConfig,
)
from router.config.judgment import DEFAULT, Judgment, Learning
from router.config.loading import check_unique, load_router_config, router_config
from router.config.observability import RequestLogConfig, TracingConfig
from router.config.requests import MAX_WAIT_HEADER, PROMPTED
from router.config.schema import build, read_yaml, setting
from router.config.settings import (
    LmcacheWorkersConfig,
    PickerConfig,
    PolicyName,
    PrefetchConfig,
    RatesConfig,
    ReplicaConfig,
    RouterConfig,
    TimeoutsConfig,
    TokenizerConfig,
)

__all__ = [
    "DEFAULT",
    "MAX_WAIT_HEADER",
    "PROMPTED",
    "AccessConfig",
    "BreakerConfig",
    "CorsConfig",
    "DiscoveredConfig",
    "DiscoveryConfig",
    "DnsConfig",
    "Judgment",
    "KeyConfig",
    "KubernetesConfig",
    "Learning",
    "LmcacheWorkersConfig",
    "PickerConfig",
    "PolicyName",
    "PrefetchConfig",
    "RatesConfig",
    "ReplicaConfig",
    "ReplicaTlsConfig",
    "RequestLogConfig",
    "RouterConfig",
    "TimeoutsConfig",
    "TlsConfig",
    "TokenizerConfig",
    "TracingConfig",
    "build",
    "check_unique",
    "client_context",
    "host_port",
    "is_loopback",
    "is_same_url",
    "load_certificate",
    "load_fleet_secret",
    "load_router_config",
    "reachable",
    "read_yaml",
    "router_config",
    "server_context",
    "server_key",
    "setting",
]
