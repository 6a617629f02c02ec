"""All sources of replicas that the configuration asks for, put together."""

import asyncio
from collections.abc import Callable, Iterable

from router.config import DiscoveryConfig
from router.membership.discovery.dns import DnsWatch
from router.membership.discovery.kubernetes import KubernetesWatch
from router.membership.discovery.registration import RegistrationWatch
from router.membership.members import Members
from warmroute_common.agent_protocol import Registration
from warmroute_common.tasks import end_all


class Discovery:
    """Names replicas between `start` and `stop`."""

    def __init__(
        self,
        config: DiscoveryConfig,
        members: Members,
        registrations: Callable[[], Iterable[Registration]] | None,
    ) -> None:
        """``registrations`` returns those of the agents that live now."""
        name, each = members.name, config.each
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
        """What is asked for replicas, for a person."""
        return [str(each) for each in self._watches]

    def start(self) -> None:
        """Begin to find replicas."""
        self._tasks = [asyncio.create_task(each.run(), name=str(each)) for each in self._watches]

    async def stop(self) -> None:
        """Look for none any more; those that were found stay."""
        await end_all(self._tasks)
