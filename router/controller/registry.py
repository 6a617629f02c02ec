"""Which instances the controller knows: those of its configuration, and those that registered.

Pure state: no I/O, no clock, times are passed in. One agent counts once, even
if it is configured and registers too, possibly under another name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cacheengine.wire import Heartbeat, Registration
from router.config import is_same_url

MISSED_HEARTBEATS: Final = 3
"""After so many a registered instance is forgotten."""


class NameTaken(Exception):  # noqa: N818  (what happened)
    """An agent claims the name of a configured instance whose agent is another."""


class RegistryFull(Exception):  # noqa: N818  (what happened)
    """As many instances have registered as may."""


@dataclass(frozen=True, kw_only=True)
class Configured:
    """An instance that the router's configuration names."""

    id: str
    agent_url: str
    incarnation: str | None
    """Its agent's; None while that has not answered."""


@dataclass(frozen=True, kw_only=True)
class Registered:
    """An instance that has registered, and when (in the clock of who passes times in)."""

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


class Registry:
    """The instances; ``configured`` tells those of the configuration, as they are now."""

    def __init__(
        self, configured: Callable[[], Sequence[Configured]], *, max_registered: int = 1024
    ) -> None:
        self._configured = configured
        self._max_registered = max_registered
        self._registered: dict[str, Registered] = {}

    def register(self, registration: Registration, now_s: float) -> Registered | None:
        """Take in an instance; return what was registered under its name before.

        The latest wins. Raises `NameTaken`, or `RegistryFull` when there is no
        place for a new name; call `expire` first.
        """
        name = registration.instance_id
        for each in self._configured():
            if each.id == name and not _is_same_agent(each, registration):
                raise NameTaken(
                    f"'{name}' is configured with the agent at {each.agent_url}, and "
                    f"{registration.agent_url} claims that name: change lmcache_instance_id "
                    "there, or the replica's agent_url here"
                )
        before = self._registered.get(name)
        if before is None and len(self._registered) >= self._max_registered:
            raise RegistryFull(f"{self._max_registered} instances have registered, no more may")
        self._registered[name] = Registered(registration=registration, since_s=now_s, seen_s=now_s)
        return before

    def heartbeat(self, beat: Heartbeat, now_s: float) -> bool:
        """Note that an instance lives; return False if it must register (anew) first."""
        known = self._known(beat)
        if known is None or known.is_expired(now_s):
            return False
        self._registered[beat.instance_id] = Registered(
            registration=known.registration, since_s=known.since_s, seen_s=now_s
        )
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

    def instances(self) -> list[Instance]:
        """Return every instance once: the configured ones first, each in a stable order."""
        left = dict(self._registered)
        found = []
        for each in self._configured():
            twin = next((one for one in left.values() if _is_same_agent(each, one)), None)
            if twin is not None:
                del left[twin.registration.instance_id]
            # Another agent's claim to the name, from before the configured one had it.
            left.pop(each.id, None)
            found.append(
                Instance(id=each.id, agent_url=each.agent_url, is_configured=True, registered=twin)
            )
        return found + [
            Instance(
                id=name,
                agent_url=each.registration.agent_url,
                is_configured=False,
                registered=each,
            )
            for name, each in left.items()
        ]

    def find(self, name: str) -> Instance | None:
        """Return the instance of that name."""
        instances = self.instances()
        by_id = next((each for each in instances if each.id == name), None)
        return by_id or next((each for each in instances if each.answers_to(name)), None)

    def _known(self, who: Heartbeat) -> Registered | None:
        """Return who speaks, if what is registered under that name is the same incarnation."""
        known = self._registered.get(who.instance_id)
        if known is None or known.registration.incarnation != who.incarnation:
            return None
        return known


def _is_same_agent(configured: Configured, other: Registration | Registered) -> bool:
    """Whether a registration is that of a configured agent.

    An agent that has started anew has another incarnation at the same URL, and
    one URL may be written in several ways for the same incarnation.
    """
    registration = other.registration if isinstance(other, Registered) else other
    return configured.incarnation == registration.incarnation or is_same_url(
        configured.agent_url, registration.agent_url
    )
