"""A stock LMCache coordinator that a fleet has already: asked, where the router is none itself.

It knows what every server holds. Before a prompt is placed it is asked where that prompt's
chunks are; the servers' addresses come from its list of members.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import aiohttp

from router.agent_client import AgentError
from router.fleet import Fleet
from router.index import PromptKeyCache, PromptKeys
from router.lmcache.coordinator import Coordinator
from router.lmcache.coordinator.records import Held, Place, shared_owner
from router.lmcache.server import LmcacheServer, prompt_fields
from router.lmcache.wire import LookedUp, MemberList
from warmroute_common.api_errors import OverloadedError
from warmroute_common.tasks import end_all

log = logging.getLogger("warmroute.lmcache")

_WAIT_S: Final = 0.5
"""A prompt waits for an answer for so long at most."""
_MEMBERS_EVERY_S: Final = 5.0
_REST_S: Final = 5.0
"""A coordinator that fails is asked again after so long."""


class StockCoordinator:
    """The coordinator at a URL."""

    def __init__(
        self,
        url: str,
        fleet: Fleet,
        coordinator: Coordinator,
        session: aiohttp.ClientSession,
        *,
        members_changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``coordinator`` is the router's own state, which learns what this one tells."""
        self._server = LmcacheServer(session, url)
        self._fleet = fleet
        self._coordinator = coordinator
        self._members_changed = members_changed
        self._clock = clock
        self._rests_until_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Learn of its members, and go on doing so."""
        await self._take_members()
        self._task = asyncio.create_task(self._run(), name="lmcache-coordinator")

    async def stop(self) -> None:
        """End that."""
        if self._task is not None:
            await end_all([self._task])
            self._task = None

    async def ask(self, keyring: PromptKeyCache) -> None:
        """Learn where a prompt's chunks are; raises nothing."""
        if self._clock() < self._rests_until_s:
            return
        kinds: dict[tuple[str, int], PromptKeys] = {}
        for replica in self._fleet.replicas.values():
            found = self._coordinator.ties.model_of(replica.id)
            keys = keyring.of(replica.key_shape, replica.adapters)
            if found is not None and keys.chunk_chain:
                kinds[found] = keys
        try:
            async with asyncio.timeout(_WAIT_S):
                await asyncio.gather(*(self._look_up(*kind, kinds[kind]) for kind in kinds))
        except TimeoutError:
            self._failed("no answer in time")
        except AgentError as error:
            self._failed(str(error))

    async def _look_up(self, model: str, world_size: int, keys: PromptKeys) -> None:
        body = prompt_fields(keys, len(keys.chunk_chain), model, world_size)
        answer = await self._server.ask("POST", "/directory/lookup", LookedUp, body)
        self._coordinator.counts["looked_up"] += 1
        for each in answer.results:
            told = {}
            for at in each.placements:
                owner = shared_owner(at.backend) if at.shared else at.instance_id
                place = Place(owner, at.tier, at.backend)
                told[place] = Held(at.instance_id, at.incarnation, at.size_bytes)
            self._coordinator.told(each.key.key(), told)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_MEMBERS_EVERY_S)
            try:
                await self._take_members()
            except Exception:  # else the following would end unnoticed
                log.exception("asking LMCache's coordinator for its members failed")

    async def _take_members(self) -> None:
        members, now_s = self._coordinator.members, self._clock()
        known = {each.instance_id for each in members.all()}
        try:
            listed = await self._server.ask("GET", "/instances", MemberList)
        except AgentError as error:
            self._failed(str(error))
            return
        for each in listed.instances:
            try:
                members.register(each.instance_id, each, now_s, time.time())
            except OverloadedError:
                self._coordinator.counts["refused"] += 1
        if known != {each.instance_id for each in members.all()}:
            self._members_changed()

    def _failed(self, why: str) -> None:
        if self._clock() >= self._rests_until_s:
            log.warning("LMCache's coordinator at %s fails: %s", self._server.base_url, why)
        self._coordinator.counts["coordinator_failed"] += 1
        self._rests_until_s = self._clock() + _REST_S
