"""Replicas whose agents register with the controller and tell where their OpenAI servers are."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from router.config import DiscoveredConfig, ReplicaConfig
from router.membership.discovery.found import Name, found
from router.membership.members import Source
from warmroute_common.agent_protocol import Registration

log = logging.getLogger("warmroute.membership")

_EVERY_S: Final = 0.5


class RegistrationWatch:
    """Looks at the registrations: an agent that ends is in them no more, nor a silent one."""

    def __init__(
        self,
        registrations: Callable[[], Iterable[Registration]],
        each: DiscoveredConfig,
        name: Name,
    ) -> None:
        self._registrations = registrations
        self._each = each
        self._name = name

    def __str__(self) -> str:
        return "registration"

    async def run(self) -> None:
        """Name their replicas, without end."""
        told: list[ReplicaConfig] = []
        while True:
            try:
                known = [self._replica(each) for each in self._registrations() if each.openai_url]
                if known != told:
                    self._name(Source.REGISTRATION, known)
                told = known
            except Exception:  # else no replica would join or leave any more
                log.exception("looking at the registrations failed")
            await asyncio.sleep(_EVERY_S)

    def _replica(self, registration: Registration) -> ReplicaConfig:
        """Return what is known of a replica; its agent tells the rest, its name too."""
        parts = urlsplit(registration.openai_url or "")
        assert parts.port is not None  # see `RegistrationApi`
        replica = found(self._each, parts.scheme, parts.hostname or "", parts.port)
        return replace(replica, agent_url=registration.agent_url)
