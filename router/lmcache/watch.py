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
from dataclasses import dataclass
from math import inf
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from router.agent_client import AgentError, AgentTimeoutError
from router.fleet import Fleet, State
from router.index import LMCACHE_HASH
from router.lmcache.coordinator import Coordinator
from router.lmcache.members import server_urls
from router.lmcache.server import LmcacheServer
from router.lmcache.ties import Server
from warmroute_common.tasks import all_set, end_all

log = logging.getLogger("warmroute.lmcache")

_EVERY_S: Final = 1.0
_ANSWER_S: Final = 2.0
_MAX_MISSES: Final = 5
"""So many answers in a row may come too late before a server counts as ended."""
UNNOTICED_S: Final = 22.0
"""So long may vLLM take a server for alive that has ended."""


@dataclass(eq=False)
class _Watched:
    """The URL of a replica's server, kept for a while after that has ended."""

    url: str
    server: Server | None = None
    """None where none answers that is of use."""
    misses: int = 0
    """How often in a row it was too slow to answer."""
    lost_s: float = -inf
    """When a server ended here last, until it is back."""
    line: asyncio.Task[None] | None = None
    """The connection that is held."""


@dataclass(eq=False)
class _Replica:
    """A replica that has a server, or had one."""

    rests_until_s: float | None = None
    hangs: asyncio.Future[None] | None = None
    """Done when it begins to hang: requests that wait there for an answer wait for this too."""


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
        self._urls: dict[str, str] = {}
        """By replica that of its server."""
        self._watched: dict[str, _Watched] = {}
        """By URL."""
        self._replicas: dict[str, _Replica] = {}
        self._said: set[str] = set()
        """The problems that were logged and last."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ask every server once, then begin to ask them again and again."""
        await self._ask_all()
        self._task = asyncio.create_task(self._run(), name="lmcache-watch")

    async def stop(self) -> None:
        """End that."""
        held = [self._task, *(each.line for each in self._watched.values())]
        await end_all([each for each in held if each is not None])

    def hung(self, replica_id: str) -> asyncio.Future[None] | None:
        """Return a future that is done when a replica begins to hang while another is up.

        None where it has no server.
        """
        name = self._fleet.replicas[replica_id].id
        if name not in self._urls:
            return None
        replica = self._replicas.setdefault(name, _Replica())
        if replica.hangs is None:
            replica.hangs = asyncio.get_running_loop().create_future()
        return replica.hangs

    def members_changed(self) -> None:
        """Ask now: a server has come or gone."""
        self._changed.set()

    def left(self, replica_id: str) -> None:
        """Forget a replica of the fleet, which is about to leave it."""
        self._urls.pop(replica_id, None)
        self._replicas.pop(replica_id, None)
        self._coordinator.ties.left(replica_id)

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
        urls, problems = server_urls(configs, self._coordinator.members.all())
        self._urls = urls
        asked = {url: self._watched.setdefault(url, _Watched(url)) for url in urls.values()}
        answers = await asyncio.gather(*map(self._ask, asked.values()))
        found = dict(zip(asked, answers, strict=True))
        self._say({*problems, *(each for each in answers if isinstance(each, str))})
        lost = {url for url in list(self._watched) if self._is_lost(url, found.get(url))}
        for name, config in configs.items():
            replica = self._fleet.replicas.get(name)
            if replica is None or replica.config is not config:
                continue  # it has left meanwhile; another may have its name
            server = found.get(urls.get(name, ""))
            self._coordinator.ties.tie(name, server if isinstance(server, Server) else None)
            if urls.get(name) in lost:
                self._rest(name)
        self._end_rests()

    def _is_lost(self, url: str, answer: Server | str | None) -> bool:
        """Take over an answer; return whether a server that answered before does not now."""
        watched, now_s = self._watched[url], self._clock()
        before, watched.server = watched.server, answer if isinstance(answer, Server) else None
        lost = before is not None and watched.server is None
        if before is not None and lost:
            self._coordinator.lost(before.instance_id)
            watched.lost_s = now_s
        self._keep_line(watched)
        if answer is None and now_s - watched.lost_s >= UNNOTICED_S:
            del self._watched[url]
        return lost

    def _say(self, problems: set[str]) -> None:
        """Log each problem, once for as long as it lasts."""
        for problem in problems - self._said:
            log.warning("%s", problem)
        self._said = problems

    async def _ask(self, watched: _Watched) -> Server | str:
        """Return the server at a URL, or why there is none that is of use."""
        asked, known = LmcacheServer(self._session, watched.url), watched.server
        try:
            async with asyncio.timeout(_ANSWER_S):
                if known is None:
                    found = await self._learn(asked, watched)
                elif self._lacks_model(watched.url):
                    # Its vLLM may register after the router has found the server.
                    found = known
                    found.worlds.update((await asked.status()).worlds())
                else:
                    await asked.health()
                    found = known
        except (AgentTimeoutError, TimeoutError):
            # Under load it may be slow: a process that has ended refuses at once.
            watched.misses += 1
            if known is not None and watched.misses < _MAX_MISSES:
                return known
            return f"LMCache server {watched.url} does not answer within {_ANSWER_S:g} s"
        except AgentError:
            return f"LMCache server {watched.url} does not answer"
        watched.misses = 0
        return found

    def _lacks_model(self, url: str) -> bool:
        """Whether the server at a URL is not known to have the model of a replica of its."""
        ties = self._coordinator.ties
        return any(ties.model_of(name) is None for name, at in self._urls.items() if at == url)

    async def _learn(self, asked: LmcacheServer, watched: _Watched) -> Server | str:
        instance_id, status = await asyncio.gather(asked.instance_id(), asked.status())
        url = asked.base_url
        if status.hash_algorithm != LMCACHE_HASH:
            return (
                f"LMCache server {url} hashes chunks by {status.hash_algorithm}: what it holds is "
                f"not known here; start it with --hash-algorithm {LMCACHE_HASH}"
            )
        log.info("LMCache server %s answers at %s", instance_id, url)
        if self._clock() - watched.lost_s < UNNOTICED_S:
            log.warning(
                "LMCache server %s is back before its vLLM may have noticed that it had ended: it "
                "would store and find nothing there (LMCache 0.5); leave the server off for %g s, "
                "or restart that vLLM",
                instance_id,
                UNNOTICED_S,
            )
        watched.lost_s = -inf
        self._coordinator.expect(instance_id, self._clock())
        self._coordinator.chunk_tokens = status.chunk_size
        return Server(
            url=url,
            instance_id=instance_id,
            chunk_tokens=status.chunk_size,
            worlds=status.worlds(),
        )

    def _keep_line(self, watched: _Watched) -> None:
        if watched.server is None:
            if watched.line is not None:
                watched.line.cancel()
        elif watched.line is None or watched.line.done():
            watched.line = asyncio.create_task(self._hold_line(watched.url))

    async def _hold_line(self, url: str) -> None:
        """Hold a connection until it is closed, and have the server be asked then."""
        began_s, parts = self._clock(), urlsplit(url)
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
            try:
                await reader.read(1)
            finally:
                writer.close()
        # A server that closes every connection soon has not ended, and is not asked at each.
        if self._clock() - began_s > _EVERY_S:
            self._changed.set()

    def _rest(self, name: str) -> None:
        """Give a replica nothing new for a while, if there is another to give it to."""
        log.warning("%s rests for %g s, since its LMCache has ended", name, UNNOTICED_S)
        replica = self._replicas.setdefault(name, _Replica())
        replica.rests_until_s = self._clock() + UNNOTICED_S
        self._fleet.rest(name, True)
        others = [each for each in self._fleet.replicas.values() if each.id != name]
        if any(each.state is State.UP and not each.rests for each in others):
            if replica.hangs is not None:
                replica.hangs.set_result(None)
            replica.hangs = None

    def _end_rests(self) -> None:
        for name, each in self._replicas.items():
            if each.rests_until_s is not None and each.rests_until_s <= self._clock():
                each.rests_until_s = None
                self._fleet.rest(name, False)
