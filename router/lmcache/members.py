"""LMCache's registered servers, and the replicas that each server serves. Pure.

A replica's server is the one that its ``lmcache`` names. Without that it is the one on the
replica's host, if there is one server and one such replica on that host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

from router.config import ReplicaConfig, join_host_port, server_key
from router.lmcache.wire import RegisterCall
from warmroute_common.api_errors import OverloadedError

SILENCE_S: Final = 30.0
"""After so long without a heartbeat a server is forgotten; it sends one every 5 s."""
MAX_MEMBERS: Final = 1024


@dataclass(frozen=True, kw_only=True)
class Member:
    """A server that has registered."""

    instance_id: str
    call: RegisterCall
    registered_wall_s: float
    """Since 1970."""
    seen_s: float

    @property
    def url(self) -> str:
        """Where its HTTP API is."""
        return f"http://{join_host_port(self.call.ip, self.call.http_port)}"

    def listing(self) -> dict[str, Any]:
        """Return what LMCache's ``GET /instances`` says of it."""
        return {
            "instance_id": self.instance_id,
            "ip": self.call.ip,
            "http_port": self.call.http_port,
            "registration_time": self.registered_wall_s,
            "metadata": self.call.metadata,
            "p2p_advertised_url": self.call.p2p_advertised_url,
            "mq_port": self.call.mq_port,
        }


class Members:
    """The servers that have registered, at most `MAX_MEMBERS`."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def register(self, instance_id: str, call: RegisterCall, now_s: float, wall_s: float) -> bool:
        """Take in a server; return whether it was here before. Raises `OverloadedError`."""
        known = instance_id in self._members
        if not known and len(self._members) >= MAX_MEMBERS:
            raise OverloadedError(f"{MAX_MEMBERS} servers have registered, no more may")
        self._members[instance_id] = Member(
            instance_id=instance_id, call=call, registered_wall_s=wall_s, seen_s=now_s
        )
        return known

    def heartbeat(self, instance_id: str, now_s: float) -> bool:
        """Note that a server lives; return False if it has to register first."""
        known = self._members.get(instance_id)
        if known is not None:
            self._members[instance_id] = replace(known, seen_s=now_s)
        return known is not None

    def forget(self, instance_id: str) -> None:
        """Forget a server, if it is known."""
        self._members.pop(instance_id, None)

    def silent(self, now_s: float) -> list[str]:
        """Return the servers that have not been heard of for `SILENCE_S`."""
        all_members = self._members.values()
        return [each.instance_id for each in all_members if now_s - each.seen_s > SILENCE_S]

    def get(self, instance_id: str) -> Member | None:
        """Return a server."""
        return self._members.get(instance_id)

    def all(self) -> list[Member]:
        """Return every server."""
        return list(self._members.values())


def server_urls(
    replicas: Mapping[str, ReplicaConfig], members: Sequence[Member]
) -> tuple[dict[str, str], list[str]]:
    """Return the URL of each replica's LMCache server, and problems for the log.

    Replicas by id; those without a server are left out.
    """
    urls = {name: each.lmcache for name, each in replicas.items() if each.lmcache is not None}
    named = {server_key(url) for url in urls.values()}
    problems: list[str] = []
    # By host: every second all members are compared with all replicas.
    plain: dict[str, list[str]] = {}
    for name, each in replicas.items():
        if each.lmcache is None and each.agent_url is None:
            plain.setdefault(_host(each.url), []).append(name)
    at_host: dict[str, list[str]] = {}
    for member in members:
        at_host.setdefault(_host(member.url), []).append(member.instance_id)
    for member in members:
        if server_key(member.url) in named:
            continue
        here = plain.get(_host(member.url), [])
        beside = [each for each in at_host[_host(member.url)] if each != member.instance_id]
        if len(here) == 1 and not beside:
            urls[here[0]] = member.url
        elif plain:
            problems.append(_unclear(member, here, beside))
    return urls, problems


def _host(url: str) -> str:
    return server_key(url)[1]


def _unclear(member: Member, here: Sequence[str], beside: Sequence[str]) -> str:
    host = urlsplit(member.url).hostname
    if not here:
        why = f"no replica's url names its host {host}"
    elif beside:
        why = f"{', '.join(beside)} is at {host} too"
    else:
        why = f"{', '.join(here)} are all at {host}"
    return (
        f"which replica the LMCache server '{member.instance_id}' serves is not clear: {why}; "
        f"write 'lmcache: {member.url}' at its replica"
    )
