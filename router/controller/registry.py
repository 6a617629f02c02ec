"""Which instances the controller knows: configured ones, and ones that have registered.

Pure state: no I/O, no clock, times are passed in. One agent counts once, even
if it is configured and registers too, possibly under another name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

from router.config import is_same_url, join_host_port
from warmroute_common.agent_protocol import Heartbeat, Registration
from warmroute_common.api_errors import ConflictError, OverloadedError

MISSED_HEARTBEATS: Final = 3
"""After so many a registered instance is forgotten."""
MAX_REGISTERED: Final = 1024
_RETRY_REGISTRATION_S: Final = 60


@dataclass(frozen=True, kw_only=True)
class Configured:
    """An instance that the router's configuration names."""

    id: str
    agent_url: str
    incarnation: str | None
    """Its agent's; None while that has not answered."""

    def has_agent(self, registration: Registration) -> bool:
        """Whether a registration is that of its agent.

        An agent that has started anew has another incarnation at the same URL, and
        one URL may be written in several ways for the same incarnation.
        """
        return self.incarnation == registration.incarnation or is_same_url(
            self.agent_url, registration.agent_url
        )


@dataclass(frozen=True, kw_only=True)
class Registered:
    """An instance that has registered, and when."""

    registration: Registration
    since_s: float
    seen_s: float

    def is_expired(self, now_s: float) -> bool:
        """Whether too many heartbeats have been missed."""
        return now_s - self.seen_s > MISSED_HEARTBEATS * self.registration.heartbeat_s


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One instance as the controller's callers see it."""

    id: str
    agent_url: str
    is_configured: bool
    registered: Registered | None
    """Its registration, if there is one; a configured instance may have another name there."""

    def answers_to(self, name: str) -> bool:
        """Whether ``name`` is one of its names."""
        registered = self.registered
        return name == self.id or (
            registered is not None and name == registered.registration.instance_id
        )

    def listing(self, now_s: float) -> dict[str, Any]:
        """Return what ``GET /instances`` says of it."""
        listing: dict[str, Any] = {
            "instance_id": self.id,
            "agent_url": self.agent_url,
            "configured": self.is_configured,
            "registered": self.registered is not None,
        }
        if self.registered is not None:
            registration = self.registered.registration
            listing |= {
                "registered_as": registration.instance_id,
                "incarnation": registration.incarnation,
                "transfer_port": registration.transfer_port,
                "heartbeat_s": registration.heartbeat_s,
                "heartbeat_age_s": round(now_s - self.registered.seen_s, 3),
            }
        return listing

    def worker_info(self, since_wall_s: float) -> dict[str, Any]:
        """Return what LMCache's ``/query_worker_info`` says of it, in seconds since 1970."""
        agent, registered = urlsplit(self.agent_url), self.registered
        port = registered and registered.registration.transfer_port
        return {
            "instance_id": self.id,
            "worker_id": 0,
            "ip": agent.hostname,
            "port": agent.port,
            "peer_init_url": port and join_host_port(agent.hostname or "", port),
            "registration_time": registered and since_wall_s + registered.since_s,
            "last_heartbeat_time": registered and since_wall_s + registered.seen_s,
        }


class Registry:
    """The instances; ``configured`` tells those of the configuration, as they are now."""

    def __init__(self, configured: Callable[[], Sequence[Configured]]) -> None:
        self._configured = configured
        self._registered: dict[str, Registered] = {}

    def register(self, registration: Registration, now_s: float) -> Registered | None:
        """Take in an instance; return what was registered under its name before.

        The latest wins. Raises `ConflictError` for the name of a configured instance whose agent
        is another, `OverloadedError` when there is no place for a new name; call `expire` first.
        """
        name = registration.instance_id
        for each in self._configured():
            if each.id == name and not each.has_agent(registration):
                raise ConflictError(
                    f"'{name}' is configured with the agent at {each.agent_url}, and "
                    f"{registration.agent_url} claims that name: change lmcache_instance_id "
                    "there, or the replica's agent_url here",
                    param="instance_id",
                    code="name_taken",
                )
        before = self._registered.get(name)
        if before is None and len(self._registered) >= MAX_REGISTERED:
            raise OverloadedError(
                f"{MAX_REGISTERED} instances have registered, no more may",
                retry_after_s=_RETRY_REGISTRATION_S,
            )
        self._registered[name] = Registered(registration=registration, since_s=now_s, seen_s=now_s)
        return before

    def heartbeat(self, beat: Heartbeat, now_s: float) -> bool:
        """Note that an instance lives; return False if it must register (anew) first."""
        known = self._known(beat)
        if known is None or known.is_expired(now_s):
            return False
        self._registered[beat.instance_id] = replace(known, seen_s=now_s)
        return True

    def deregister(self, gone: Heartbeat) -> bool:
        """Forget an instance; return whether it was registered."""
        if self._known(gone) is None:
            return False
        del self._registered[gone.instance_id]
        return True

    def expire(self, now_s: float) -> list[Registered]:
        """Forget the instances that have missed their heartbeats; return them."""
        gone = [each for each in self._registered.values() if each.is_expired(now_s)]
        for each in gone:
            del self._registered[each.registration.instance_id]
        return gone

    def registrations(self) -> list[Registration]:
        """Return the registrations as they stand."""
        return [each.registration for each in self._registered.values()]

    def instances(self) -> list[Instance]:
        """Return every instance once: the configured ones first, each in a stable order."""
        left = dict(self._registered)
        found = []
        for each in self._configured():
            twin = next((one for one in left.values() if each.has_agent(one.registration)), None)
            if twin is not None:
                del left[twin.registration.instance_id]
            # Another agent's claim to the name, from before the configured one had it.
            left.pop(each.id, None)
            found.append(
                Instance(id=each.id, agent_url=each.agent_url, is_configured=True, registered=twin)
            )
        return found + [
            Instance(
                id=name, agent_url=each.registration.agent_url, is_configured=False, registered=each
            )
            for name, each in left.items()
        ]

    def find(self, name: str) -> Instance | None:
        """Return the instance of that name."""
        instances = self.instances()
        by_id = next((each for each in instances if each.id == name), None)
        return by_id or next((each for each in instances if each.answers_to(name)), None)

    def _known(self, beat: Heartbeat) -> Registered | None:
        """Return the instance of a heartbeat, if it has registered in this incarnation."""
        known = self._registered.get(beat.instance_id)
        if known is None or known.registration.incarnation != beat.incarnation:
            return None
        return known
