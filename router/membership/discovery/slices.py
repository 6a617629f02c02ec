"""EndpointSlices of Kubernetes: which replicas they tell of. Pure."""

from collections.abc import Iterable
from typing import Any

import msgspec

from router.config import DiscoveredConfig, KubernetesConfig, ReplicaConfig
from router.membership.discovery.found import found


class Metadata(msgspec.Struct, rename="camel"):
    """Of an object, or of a list of them."""

    name: str = ""
    resource_version: str = ""


class Conditions(msgspec.Struct):
    """Of an endpoint; None counts as ready, and as not terminating."""

    ready: bool | None = None
    terminating: bool | None = None


class Target(msgspec.Struct):
    """The pod behind an endpoint."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class Endpoint(msgspec.Struct, rename="camel"):
    """Of its addresses the first one counts: they are all the same pod's."""

    addresses: list[str]
    conditions: Conditions = msgspec.field(default_factory=Conditions)
    target_ref: Target | None = None


class Port(msgspec.Struct):
    """One of a service's ports."""

    name: str | None = None
    port: int | None = None


class Slice(msgspec.Struct, rename="camel"):
    """Some of the endpoints of a service."""

    metadata: Metadata
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class SliceList(msgspec.Struct):
    """The answer to a list."""

    metadata: Metadata
    items: list[Slice]


class WatchEvent(msgspec.Struct):
    """A line of the answer to a watch; ``object`` is a slice, or a status."""

    type: str
    object: dict[str, Any]


_HTTP = "http"


class Slices:
    """The slices of a service as they stand, and the replicas in them."""

    def __init__(self, config: KubernetesConfig, each: DiscoveredConfig) -> None:
        self._config = config
        self._each = each
        self._slices: dict[str, Slice] = {}
        self._known: set[str] = set()
        """URLs of the replicas that were ready when they were looked at last, or before."""

    def replace(self, slices: Iterable[Slice]) -> None:
        """Begin anew with what a list has told."""
        self._slices = {each.metadata.name: each for each in slices}

    def apply(self, event: WatchEvent) -> None:
        """Take over a change."""
        changed = msgspec.convert(event.object, Slice)
        if event.type == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        else:
            self._slices[changed.metadata.name] = changed

    def replicas(self) -> list[ReplicaConfig]:
        """Return the replicas that are ready, or were before and are not to end.

        A replica that has fallen unready is the health checks' matter: it may be busy. A pod with
        addresses of both families is in slices of both, and is one replica.
        """
        told: dict[str, tuple[ReplicaConfig, bool]] = {}
        for each in sorted(self._slices.values(), key=lambda one: one.address_type):
            port = self._port(each)
            for endpoint in each.endpoints or ():
                if port is None or not endpoint.addresses or endpoint.conditions.terminating:
                    continue
                is_ready = endpoint.conditions.ready is not False
                replica = self._replica(endpoint, port)
                who = replica.url if endpoint.target_ref is None else endpoint.target_ref.uid
                # While endpoints move from one slice to another they are in both.
                before = told.get(who or replica.url, (replica, False))
                told[who or replica.url] = before[0], before[1] or is_ready
        stay = [one for one, is_ready in told.values() if is_ready or one.url in self._known]
        self._known = {each.url for each in stay}
        return stay

    def _port(self, told: Slice) -> int | None:
        """Return the replicas' port; None where a slice does not tell which one it is."""
        if self._config.port is not None:
            return self._config.port
        ports = told.ports or []
        named = [each for each in ports if each.name == _HTTP]
        found_ports = ports if len(ports) == 1 else named
        return found_ports[0].port if found_ports else None

    def _replica(self, endpoint: Endpoint, port: int) -> ReplicaConfig:
        target = endpoint.target_ref
        name = target.name if target is not None and target.kind == "Pod" else None
        host = endpoint.addresses[0]
        return found(self._each, self._config.scheme, host, port, name=name or None)
