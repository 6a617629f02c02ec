"""The addresses at which a gateway knows replicas: ``ip:port``, where the router has URLs."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from warmroute_common.addresses import join_host_port
from warmroute_common.config_reader import describe
from warmroute_common.tasks import all_set, end_all

log = logging.getLogger("warmroute.picker")

_LOOK_UP_EVERY_S: Final = 5.0
_PORTS: Final = {"http": 80, "https": 443}


class Endpoints:
    """Which endpoint each replica has; host names are resolved again every few seconds."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._of: dict[Replica, str] = {}
        self._at: dict[str, Replica] = {}
        """By each address of a replica's host name."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Resolve all names, then repeat it in the background."""
        await self._look_up()
        self._task = asyncio.create_task(self._keep_looking(), name="endpoints")

    async def stop(self) -> None:
        """Stop resolving."""
        if self._task is not None:
            await end_all([self._task])

    def known(self, replica: Replica) -> str | None:
        """Return the endpoint of a replica; None while its host name is not resolved."""
        return self._of.get(replica)

    def at(self, endpoint: str) -> Replica | None:
        """Return the replica at an endpoint."""
        replica = self._at.get(endpoint)
        return None if replica is None or replica.is_removed else replica

    def fleet_changed(self) -> None:
        """Resolve now: a replica has joined or left."""
        self._changed.set()

    def eligible(self, subset: Iterable[str] | None) -> list[str] | None:
        """Return the ids of the replicas that may be picked; None for all.

        ``subset`` are the endpoints that the gateway allows, None for all.
        """
        if subset is not None:
            found = map(self.at, subset)
            return [each.id for each in found if each is not None]
        replicas = self._fleet.replicas.values()
        known = [each.id for each in replicas if each in self._of]
        return None if len(known) == len(replicas) else known

    async def _keep_looking(self) -> None:
        while True:
            await all_set([self._changed], _LOOK_UP_EVERY_S)
            self._changed.clear()
            try:
                await self._look_up()
            except Exception:  # without this, a replica that moves would never be found again
                log.exception("resolving the replicas' addresses failed")

    async def _look_up(self) -> None:
        replicas = list(self._fleet.replicas.values())
        found = await asyncio.gather(*(_addresses(each.config.url) for each in replicas))
        at: dict[str, Replica] = {}
        # A removed replica keeps its endpoint for the requests that were just picked for it.
        of = {each: where for each, where in self._of.items() if each.is_removed and each.in_flight}
        for replica, addresses in zip(replicas, found, strict=True):
            former = self._of.get(replica)
            # The former address is kept while the name cannot be resolved.
            known = addresses or ([former] if former else [])
            at.update(dict.fromkeys(known, replica))
            if known:
                of[replica] = former if former in known else known[0]
        self._of, self._at = of, at


async def _addresses(url: str) -> list[str]:
    """Return the endpoints of a URL, IPv4 first; none where its host name does not resolve."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    try:
        return [join_host_port(str(ipaddress.ip_address(host)), port)]
    except ValueError:
        pass  # a name
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("cannot resolve the host name %s: %s", host, describe(error))
        return []
    found.sort(key=lambda each: each[0] is not socket.AF_INET)
    return [join_host_port(str(each[4][0]), port) for each in found]
