"""Evicting from L2 by quota: every few seconds servers are told to delete what is too much.

The least recently used keys go, but for pinned ones. A key counts as gone when the server has
answered: of keys from before its own start it sends no event of their deletion (lmcache 0.5.6).
A key that was stored anew meanwhile is unknown until the next event of its use.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

import aiohttp

from router.agent_client import AgentError
from router.lmcache.coordinator.records import Held, Place
from router.lmcache.coordinator.state import Coordinator
from router.lmcache.coordinator.usage import bytes_by_salt
from router.lmcache.server import LmcacheServer
from router.lmcache.wire import ObjectKey
from warmroute_common.tasks import end_all, in_slices

log = logging.getLogger("warmroute.lmcache")

_EVERY_S: Final = 5.0
_MAX_DELETED: Final = 10_000
"""Keys that a server takes in one call."""


class L2Eviction:
    """Evicts between `start` and `stop`."""

    def __init__(self, coordinator: Coordinator, session: aiohttp.ClientSession) -> None:
        self._coordinator = coordinator
        self._session = session
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for salts over their quotas, again and again."""
        self._task = asyncio.create_task(self._run(), name="lmcache-eviction")

    async def stop(self) -> None:
        """End that."""
        if self._task is not None:
            await end_all([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.sweep()
            except Exception:  # else quotas would be ignored from then on
                log.exception("evicting from LMCache's L2 failed")

    async def sweep(self) -> None:
        """Have servers delete what is over quota now."""
        used_bytes = bytes_by_salt(self._coordinator.directory.totals, "l2")
        shares = self._coordinator.quotas.evicted_shares(used_bytes)
        if shares:
            calls = self._by_server(await self._victims(shares))
            await asyncio.gather(*(self._delete(*to, keys) for to, keys in calls.items()))

    async def _victims(self, shares: Mapping[str, float]) -> list[ObjectKey]:
        """Return the keys to evict; at least one of every salt, unless all are pinned."""
        directory, pins = self._coordinator.directory, self._coordinator.pins
        held: dict[str, list[ObjectKey]] = {salt: [] for salt in shares}
        async for keys in in_slices(directory.keys()):
            for key in keys:
                if key.cache_salt in held and _l2(directory.get(key).places):
                    held[key.cache_salt].append(key)
        found: list[ObjectKey] = []
        for salt, keys in held.items():
            count = max(1, int(len(keys) * shares[salt]))
            found += islice(pins.unpinned(keys), count)
        return found

    def _by_server(self, keys: Iterable[ObjectKey]) -> dict[tuple[str, Place], list[ObjectKey]]:
        """Return the keys by their place, and the URL of a server that reaches it.

        That is the server that has told of them; of a shared backend any other, if it has ended.
        """
        members = self._coordinator.members
        found: dict[tuple[str, Place], list[ObjectKey]] = defaultdict(list)
        for key in keys:
            for place, held in _l2(self._coordinator.directory.get(key).places).items():
                member = members.get(held.instance_id)
                if member is None and place.shared:
                    member = next(iter(members.all()), None)
                if member is not None:
                    found[member.url, place].append(key)
        return found

    async def _delete(self, url: str, place: Place, keys: list[ObjectKey]) -> None:
        server = LmcacheServer(self._session, url)
        for at in range(0, len(keys), _MAX_DELETED):
            some = keys[at : at + _MAX_DELETED]
            try:
                told = await server.delete(some, tier="l2", adapter=place.backend)
                if told.error:
                    raise AgentError(f"{url}: {told.error}")
            except AgentError as error:
                self._coordinator.counts["eviction_failed"] += 1
                log.warning("evicting %s keys of L2 failed: %s", len(keys) - at, error)
                return
            self._coordinator.evicted(place, some)


def _l2(places: Mapping[Place, Held]) -> dict[Place, Held]:
    return {place: held for place, held in places.items() if place.tier == "l2"}
