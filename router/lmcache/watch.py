"""Seeing that the replicas' LMCache servers live: a connection is held to each, and it is asked.

A server that has ended is forgotten at once: no prefetch is tried there and none of its KV
counted on. Its vLLM does not notice for up to two heartbeats of LMCache's (10 s each), and
requests there hang meanwhile (22.7 s were seen): the replica gets nothing new for so long,
where another can answer. So the end must be known before the next request: a process that is
killed closes the connection that is held to it, which tells within milliseconds.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from router.fleet import Fleet, State
from router.lmcache.coordinator import Coordinator
from router.lmcache.members import server_urls
from router.lmcache.server import LmcacheServer
from router.lmcache.ties import Server
from router.residency import LMCACHE_HASH
from router.staging import AgentError, AgentTimeout
from router.tasks import all_set, end_all

log = logging.getLogger("warmroute.lmcache")

_EVERY_S: Final = 1.0
_ANSWER_S: Final = 2.0
_MAX_MISSES: Final = 5
"""So many answers in a row may come too late before a server counts as ended."""
UNNOTICED_S: Final = 22.0
"""So long may vLLM take a server for alive that has ended."""


class ServerWatch:
    """The servers that answer, between `start` and `stop`."""

    def __init__(
        self,
        fleet: Fleet,
        coordinator: Coordinator,
        session: aiohttp.ClientSession,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._coordinator = coordinator
        self._session = session
        self._clock = clock
        self._answering: dict[str, Server] = {}
        """By URL."""
        self._resting: dict[str, float] = {}
        """Replicas that get nothing new, with until when."""
        self._urls: dict[str, str] = {}
        self._misses: dict[str, int] = {}
        """By URL how often in a row a server was too slow to answer."""
        self._lost_s: dict[str, float] = {}
        """By URL when a server ended."""
        self._said: set[str] = set()
        """What is wrong now, and was logged."""
        self._changed = asyncio.Event()
        self._hanging: dict[str, asyncio.Future[None]] = {}
        """By replica what its requests that wait for an answer wait for too."""
        self._lines: dict[str, asyncio.Task[None]] = {}
        """By URL the connections that are held."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ask every server once, then begin to ask them again and again."""
        await self._ask_all()
        self._task = asyncio.create_task(self._run(), name="lmcache-watch")

    async def stop(self) -> None:
        """End that."""
        await end_all([*self._lines.values(), *([] if self._task is None else [self._task])])
        self._lines, self._task = {}, None

    def hung(self, replica_id: str) -> asyncio.Future[None] | None:
        """Return what is done when a replica begins to hang while another is up.

        None where it has no server.
        """
        name = self._fleet.replicas[replica_id].id
        if name not in self._urls:
            return None
        return self._hanging.setdefault(name, asyncio.get_running_loop().create_future())

    def members_changed(self) -> None:
        """Ask now: a server has come or gone."""
        self._changed.set()

    async def _run(self) -> None:
        while True:
            await all_set([self._changed], _EVERY_S)
            self._changed.clear()
            try:
                self._coordinator.expire(self._clock())
                await self._ask_all()
            except Exception:  # else the watching would end unnoticed
                log.exception("asking the LMCache servers failed")

    async def _ask_all(self) -> None:
        """Find out which servers answer, and tie the replicas to theirs."""
        configs = {name: each.config for name, each in self._fleet.replicas.items()}
        members = self._coordinator.members.all()
        urls, problems = server_urls(configs, members)
        self._urls = urls
        distinct = list(dict.fromkeys(urls.values()))
        found = dict(zip(distinct, await asyncio.gather(*map(self._ask, distinct)), strict=True))
        answering = {url: each for url, each in found.items() if isinstance(each, Server)}
        self._say({*problems, *(each for each in found.values() if isinstance(each, str))})
        gone = self._answering.keys() - answering.keys()
        for url in gone:
            self._coordinator.lost(self._answering[url].instance_id)
            self._lost_s[url] = self._clock()
        self._answering = answering
        self._hold_lines()
        for name in configs:
            self._tie(name, answering.get(urls.get(name, "")), ended=urls.get(name) in gone)
        self._end_rests()

    def _say(self, problems: set[str]) -> None:
        """Log what is wrong, once for as long as it is."""
        for problem in problems - self._said:
            log.warning("%s", problem)
        self._said = problems

    async def _ask(self, url: str) -> Server | str:
        """Return the server at a URL, or why there is none that is of use."""
        server, known = LmcacheServer(self._session, url), self._answering.get(url)
        try:
            async with asyncio.timeout(_ANSWER_S):
                if known is None:
                    found = await self._learn(server)
                else:
                    await server.health()
                    found = known
        except (AgentTimeout, TimeoutError):
            # Under load it may be slow: a process that has ended refuses at once.
            misses = self._misses[url] = self._misses.get(url, 0) + 1
            if known is not None and misses < _MAX_MISSES:
                return known
            return f"LMCache server {url} does not answer within {_ANSWER_S:g} s"
        except AgentError:
            return f"LMCache server {url} does not answer"
        self._misses.pop(url, None)
        return found

    async def _learn(self, server: LmcacheServer) -> Server | str:
        instance_id, status = await asyncio.gather(server.instance_id(), server.status())
        url = server.base_url
        if status.hash_algorithm != LMCACHE_HASH:
            return (
                f"LMCache server {url} hashes chunks by {status.hash_algorithm}: what it holds is "
                f"not known here; start it with --hash-algorithm {LMCACHE_HASH}"
            )
        log.info("LMCache server %s answers at %s", instance_id, url)
        if self._clock() - self._lost_s.pop(url, -UNNOTICED_S) < UNNOTICED_S:
            log.warning(
                "LMCache server %s is back before its vLLM may have noticed that it had ended: it "
                "would store and find nothing there (LMCache 0.5); leave the server off for %g s, "
                "or restart that vLLM",
                instance_id,
                UNNOTICED_S,
            )
        self._coordinator.expect(instance_id, self._clock())
        self._coordinator.chunk_tokens = status.chunk_size
        contexts = filter(None, status.cache_context_meta.values())
        return Server(
            url=url,
            instance_id=instance_id,
            chunk_tokens=status.chunk_size,
            worlds={each.model_name: each.world_size for each in contexts},
        )

    def _hold_lines(self) -> None:
        for url in self._lines.keys() - self._answering.keys():
            self._lines.pop(url).cancel()
        for url in self._answering:
            if url not in self._lines or self._lines[url].done():
                self._lines[url] = asyncio.create_task(self._hold_line(url))

    async def _hold_line(self, url: str) -> None:
        """Hold a connection until it is closed, and have the server be asked then."""
        began_s, parts = self._clock(), urlsplit(url)
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
            try:
                await reader.read(1)
            finally:
                writer.close()
        # What closes every connection soon is no sign of an end, and must not be asked on and on.
        if self._clock() - began_s > _EVERY_S:
            self._changed.set()

    def _tie(self, name: str, server: Server | None, *, ended: bool) -> None:
        self._coordinator.ties.tie(name, server)
        if ended:
            self._rest(name)

    def _rest(self, name: str) -> None:
        """Give a replica nothing new for a while, if there is another to give it to."""
        log.warning("%s rests for %g s, since its LMCache has ended", name, UNNOTICED_S)
        self._resting[name] = self._clock() + UNNOTICED_S
        self._fleet.rest(name, True)
        others = [each for each in self._fleet.replicas.values() if each.id != name]
        if any(each.state is State.UP and not each.rests for each in others):
            hanging = self._hanging.pop(name, None)
            if hanging is not None and not hanging.done():
                hanging.set_result(None)

    def _end_rests(self) -> None:
        now_s = self._clock()
        for name in [name for name, until_s in self._resting.items() if until_s <= now_s]:
            del self._resting[name]
            self._fleet.rest(name, False)
        lost = self._lost_s.items()
        self._lost_s = {url: at_s for url, at_s in lost if now_s - at_s < UNNOTICED_S}
        self._misses = {url: n for url, n in self._misses.items() if url in self._urls.values()}
