"""Replicas that are all the addresses of a name."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from router.config import DiscoveredConfig, DnsConfig, join_host_port
from router.membership.discovery.found import Name, found
from router.membership.members import Source
from warmroute_common.config_reader import describe

log = logging.getLogger("warmroute.membership")

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a name; raises OSError where they are not known."""


async def addresses(name: str, port: int) -> list[str]:
    """Return the addresses of a name as this machine resolves it."""
    told = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in told]


class DnsWatch:
    """Looks a name up at intervals."""

    def __init__(
        self,
        config: DnsConfig,
        each: DiscoveredConfig,
        name: Name,
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
        """Name the replicas at the name's addresses, without end.

        Those of the last answer stay while it cannot be looked up: a name server that is away,
        or knows nothing for a moment, is no reason to send nothing to replicas that are well.
        """
        while True:
            try:
                await self._look_up()
            except (OSError, UnicodeError) as error:  # UnicodeError: it can be no name
                if not self._fails:
                    where = join_host_port(self._config.name, self._config.port)
                    log.warning("%s cannot be looked up: %s", where, describe(error))
                self._fails = True
            except Exception:  # else no replica would join or leave any more
                log.exception("looking up %s failed", self._config.name)
            await asyncio.sleep(self._config.interval_s)

    async def _look_up(self) -> None:
        config = self._config
        hosts = sorted(set(await self._resolve(config.name, config.port)))
        if not hosts:
            raise OSError("it has no address")
        self._fails = False
        self._name(
            Source.DNS,
            [found(self._each, config.scheme, host, config.port) for host in hosts],
            part=join_host_port(config.name, config.port),
        )
