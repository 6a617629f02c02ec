"""The instances that the controller knows: configured ones, and ones whose agents registered.

Pure state; times are passed in. One agent counts once, even if it is configured and registers too,
possibly under another name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from warmroute_common.addresses import is_same_url
from warmroute_common.agent_protocol import Heartbeat, Registration
from warmroute_common.api_errors import ConflictError, OverloadedError

MISSED_HEARTBEATS: Final = 3
"""A registered instance that misses this many heartbeats is forgotten."""
MAX_REGISTERED: Final = 1024
_RETRY_REGISTRATION_S: Final = 60


@dataclass(frozen=True, kw_only=True)
class ConfiguredInstance:
    """An instance in the router's configuration."""

    id: str
    agent_url: str
    incarnation: str | None
    """Its agent's; None until the agent has answered."""

    def has_agent(self, registration: Registration) -> bool:
        """Whether a registration comes from its agent.

        A restarted agent has another incarnation at the same URL, and the same incarnation may
        write its URL in another way.
        """
        return self.incarnation == registration.incarnation or is_same_url(
            self.agent_url, registration.agent_url
        )


@dataclass(frozen=True, kw_only=True)
class RegisteredInstance:
    """An instance whose agent has registered."""

    registration: Registration
    seen_s: float

    def is_expired(self, now_s: float) -> bool:
        """Whether it has missed too many heartbeats."""
        return now_s - self.seen_s > MISSED_HEARTBEATS * self.registration.heartbeat_s


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One instance as the controller's callers see it."""

    id: str
    agent_url: str
    is_configured: bool
    registered: RegisteredInstance | None
    """Its registration, if any; a configured instance may have registered under another name."""

    def answers_to(self, name: str) -> bool:
        """Whether ``name`` is one of its names."""
        registered = self.registered
        return name == self.id or (
            registered is not None and name == registered.registration.instance_id
        )

    def listing(self, now_s: float) -> dict[str, Any]:
        """Return its entry of ``GET /instances``."""
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


class InstanceRegistry:
    """``configured`` returns the instances of the configuration as it is now."""

    def __init__(self, configured: Callable[[], Sequence[ConfiguredInstance]]) -> None:
        self._configured = configured
        self._registered: dict[str, RegisteredInstance] = {}

    def register(self, registration: Registration, now_s: float) -> RegisteredInstance | None:
        """Register an instance; return what was registered under its name before.

        The latest registration wins. Raises `ConflictError` for the name of a configured instance
        with another agent, `OverloadedError` for a new name above the limit; call `expire` first.
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
                f"the limit of {MAX_REGISTERED} registered instances is reached",
                retry_after_s=_RETRY_REGISTRATION_S,
            )
        self._registered[name] = RegisteredInstance(registration=registration, seen_s=now_s)
        return before

    def heartbeat(self, beat: Heartbeat, now_s: float) -> bool:
        """Record a heartbeat; return False if the instance must register first."""
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

    def expire(self, now_s: float) -> list[RegisteredInstance]:
        """Forget and return the instances that have missed their heartbeats."""
        gone = [each for each in self._registered.values() if each.is_expired(now_s)]
        for each in gone:
            del self._registered[each.registration.instance_id]
        return gone

    def registrations(self) -> list[Registration]:
        return [each.registration for each in self._registered.values()]

    def instances(self) -> list[Instance]:
        """Return every instance once: configured ones first, each group in a stable order."""
        left = dict(self._registered)
        found = []
        for each in self._configured():
            twin = next((one for one in left.values() if each.has_agent(one.registration)), None)
            if twin is not None:
                del left[twin.registration.instance_id]
            # Another agent may have registered the name before it was configured.
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
        """Return the instance with a name."""
        instances = self.instances()
        by_id = next((each for each in instances if each.id == name), None)
        return by_id or next((each for each in instances if each.answers_to(name)), None)

    def _known(self, beat: Heartbeat) -> RegisteredInstance | None:
        """Return a heartbeat's instance, if it has registered in this incarnation."""
        known = self._registered.get(beat.instance_id)
        if known is None or known.registration.incarnation != beat.incarnation:
            return None
        return known
