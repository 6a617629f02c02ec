"""Settings of replicas that the file does not name."""

from dataclasses import dataclass, field
from typing import Literal

from router.config.schema import setting

Scheme = Literal["http", "https"]


@dataclass(frozen=True, kw_only=True)
class DnsConfig:
    """A name whose addresses are replicas, like that of a headless service of Kubernetes."""

    name: str
    """Its A and AAAA records, as this machine resolves them."""
    port: int = setting(8000, at_least=1, at_most=65535)
    """Of the replicas."""
    scheme: Scheme = "http"
    """How replicas are spoken to."""
    interval_s: float = setting(10.0, at_least=0.1)
    """Between two look-ups; one that fails changes nothing."""


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """Pods behind a service, as the Kubernetes API tells of them: it is watched.

    Ready pods join the fleet; those that are to end are drained. The router's service account
    must be allowed to ``list`` and ``watch`` ``endpointslices`` of ``discovery.k8s.io`` there.
    """

    service: str | None = None
    """The service's name; or give ``selector``."""
    selector: str | None = None
    """Labels of services, like ``app=vllm,tier=gpu``, instead of one service's name."""
    namespace: str | None = None
    """Where they are; by default where the router's pod is."""
    port: int | None = setting(None, at_least=1, at_most=65535)
    """Of the replicas; by default the service's only one, or the one that is named ``http``."""
    scheme: Scheme = "http"
    """How replicas are spoken to."""
    api_url: str | None = None
    """Base URL of the API; by default as pods are told."""
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    """With the token of the service account; without such a file none is sent."""
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    """PEM file of the authorities that the API's certificate is checked by; without such a file
    the system's."""


@dataclass(frozen=True, kw_only=True)
class DiscoveredConfig:
    """What is the same for all replicas that are found, and that no source tells."""

    api_key: str | None = field(default=None, repr=False)
    """Sent to each instead of the client's own Authorization."""
    agent_port: int | None = setting(None, at_least=1, at_most=65535)
    """Where the cache engines' agents listen; without it only agents that register are known."""
    kv_events_port: int | None = setting(None, at_least=1, at_most=65535)
    """Of vLLM's event publisher; by default the agent or vLLM says."""
    kv_replay_port: int | None = setting(None, at_least=1, at_most=65535)
    """Of vLLM's replay endpoint; by default the agent or vLLM says."""
    hash_seed: str | None = None
    """PYTHONHASHSEED of replicas without an agent; by default found out from their events."""


@dataclass(frozen=True, kw_only=True)
class DiscoveryConfig:
    """Where replicas come from, beside ``replicas``; one that several sources name is one."""

    registration: bool = False
    """Whether agents that register with the controller (``controller.monitor_port``) and tell
    their ``openai_url`` bring their replicas into the fleet, for as long as they send heartbeats.
    Where ``controller.secret`` or an admin key is set, that port then asks for it."""
    dns: tuple[DnsConfig, ...] = ()
    """Names that are looked up."""
    kubernetes: KubernetesConfig | None = None
    """Off without the section."""
    each: DiscoveredConfig = field(default_factory=DiscoveredConfig)
    """Of the replicas that DNS, Kubernetes or a registration tells of."""

    @property
    def is_on(self) -> bool:
        """Whether any replica may come from it."""
        return self.registration or bool(self.dns) or self.kubernetes is not None
