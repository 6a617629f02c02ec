"""Sources of replicas other than the file: DNS names, registered agents, Kubernetes services."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from router.config.settings import DiscoveredConfig, DiscoveryConfig, DnsConfig, ReplicaConfig
from router.membership.kubernetes import KubernetesWatch
from router.membership.membership import Membership, NameReplicas, Source, discovered
from warmroute_common.addresses import join_host_port
from warmroute_common.agent_protocol import Registration
from warmroute_common.config_reader import describe
from warmroute_common.tasks import end_all

log = logging.getLogger("warmroute.membership")

_REGISTRATIONS_EVERY_S: Final = 0.5

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a name; raises OSError if they are unknown."""


class Discovery:
    """Runs all configured sources between `start` and `stop`."""

    def __init__(
        self,
        config: DiscoveryConfig,
        membership: Membership,
        registrations: Callable[[], Iterable[Registration]] | None,
    ) -> None:
        """``registrations`` returns the registrations of the agents that are alive."""
        name, each = membership.name, config.each
        self._watches: list[DnsWatch | KubernetesWatch | RegistrationWatch] = [
            DnsWatch(one, each, name) for one in config.dns
        ]
        if config.kubernetes is not None:
            self._watches.append(KubernetesWatch(config.kubernetes, each, name))
        if config.registration and registrations is not None:
            self._watches.append(RegistrationWatch(registrations, each, name))
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def sources(self) -> list[str]:
        """The names of the sources."""
        return [str(each) for each in self._watches]

    def start(self) -> None:
        """Begin to look for replicas."""
        self._tasks = [asyncio.create_task(each.run(), name=str(each)) for each in self._watches]

    async def stop(self) -> None:
        """Stop looking. Replicas that were found stay in the fleet."""
        await end_all(self._tasks)


async def addresses(name: str, port: int) -> list[str]:
    """Return the addresses of a name as this machine resolves it."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


class DnsWatch:
    """Resolves a name at intervals."""

    def __init__(
        self,
        config: DnsConfig,
        each: DiscoveredConfig,
        name: NameReplicas,
        *,
        resolve: Resolve = addresses,
    ) -> None:
        self._config = config
        self._each = each
        self._name = name
        self._resolve = resolve
        self._fails = False

    def __str__(self) -> str:
        return f"DNS ({self._config.name})"

    async def run(self) -> None:
        """Name the replicas at the name's addresses, forever.

        If a look-up fails, the replicas of the last answer stay: they may well be healthy while
        the name server is not.
        """
        while True:
            try:
                await self._look_up()
            except (OSError, UnicodeError) as error:  # UnicodeError: not a valid name
                if not self._fails:
                    where = join_host_port(self._config.name, self._config.port)
                    log.warning("%s cannot be resolved: %s", where, describe(error))
                self._fails = True
            except Exception:  # otherwise no replica would join or leave any longer
                log.exception("resolving %s failed", self._config.name)
            await asyncio.sleep(self._config.interval_s)

    async def _look_up(self) -> None:
        config = self._config
        hosts = sorted(set(await self._resolve(config.name, config.port)))
        if not hosts:
            raise OSError("it has no address")
        self._fails = False
        self._name(
            Source.DNS,
            [discovered(self._each, config.scheme, host, config.port) for host in hosts],
            part=join_host_port(config.name, config.port),
        )


class RegistrationWatch:
    """Follows the agents that register with the controller and report their OpenAI servers.

    An agent that stops, or sends no heartbeats, disappears from the registrations.
    """

    def __init__(
        self,
        registrations: Callable[[], Iterable[Registration]],
        each: DiscoveredConfig,
        name: NameReplicas,
    ) -> None:
        self._registrations = registrations
        self._each = each
        self._name = name

    def __str__(self) -> str:
        return "registration"

    async def run(self) -> None:
        """Name the replicas of registered agents, forever."""
        last: list[ReplicaConfig] = []
        while True:
            try:
                known = [self._replica(each) for each in self._registrations() if each.openai_url]
                if known != last:
                    self._name(Source.REGISTRATION, known)
                last = known
            except Exception:  # otherwise no replica would join or leave any longer
                log.exception("reading the registrations failed")
            await asyncio.sleep(_REGISTRATIONS_EVERY_S)

    def _replica(self, registration: Registration) -> ReplicaConfig:
        """Return a replica's settings; its agent reports the others, its name included."""
        parts = urlsplit(registration.openai_url or "")
        assert parts.port is not None  # the controller's monitor checks it
        replica = discovered(self._each, parts.scheme, parts.hostname or "", parts.port)
        return replace(replica, agent_url=registration.agent_url)
