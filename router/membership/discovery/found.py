"""What is known of a replica that was found."""

from collections.abc import Iterable
from typing import Protocol

from router.config import DiscoveredConfig, ReplicaConfig, join_host_port
from router.membership.members import Source


class Name(Protocol):
    """Tells of all replicas that a source knows now: `Members.name`."""

    def __call__(
        self, source: Source, replicas: Iterable[ReplicaConfig], *, part: str = ""
    ) -> None:
        """``part`` tells sources of one kind apart."""


def found(
    each: DiscoveredConfig, scheme: str, host: str, port: int, *, name: str | None = None
) -> ReplicaConfig:
    """Return a replica at an address, with what ``each`` of them has in common."""

    def at(scheme: str, port: int | None) -> str | None:
        return None if port is None else f"{scheme}://{join_host_port(host, port)}"

    return ReplicaConfig(
        url=f"{scheme}://{join_host_port(host, port)}",
        instance_id=name,
        agent_url=at("http", each.agent_port),
        kv_events=at("tcp", each.kv_events_port),
        kv_replay=at("tcp", each.kv_replay_port),
        api_key=each.api_key,
        hash_seed=each.hash_seed,
    )
