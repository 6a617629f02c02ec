"""Keeping the fleet informed: agents and KV events of every replica, for as long as it runs.

Each replica has two tasks that never end by themselves. One follows its agent:
``/info``, a snapshot, then every change by long polling; the other its vLLM's
KV events. Whatever fails is logged once, and tried again with growing pauses.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec
import zmq.asyncio

from cacheengine.wire import InstanceInfo
from router.feeds.kv_subscriber import KvEndpoints, KvSubscriber
from router.fleet import Fleet, Replica
from router.residency import BadEvents, KvBatch, KvEventReader
from router.staging import AgentClient, AgentError, HistoryGone

log = logging.getLogger("warmroute.feeds")

_POLL_S: Final = 20.0
_POLL_GAP_S: Final = 0.05
"""From news of an agent to the next question: the first is told at once, and what follows it
comes together. Asking for every change costs both ends more than all else that they do."""
_INFO_EVERY_S: Final = 30.0
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 2.0
_NO_EVENTS_PAUSE_S: Final = 30.0
_START_WAIT_S: Final = 3.0


class Feeds:
    """All feeds of a fleet, between `start` and `stop`."""

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._clock = clock
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin, and wait a little so that the first request finds the agents' snapshots."""
        self._context = zmq.asyncio.Context()
        feeds = [
            ReplicaFeed(self._fleet, each, self._session, self._context, self._clock)
            for each in self._fleet.replicas.values()
        ]
        self._tasks = [asyncio.create_task(run) for feed in feeds for run in feed.runs()]
        first = [asyncio.create_task(feed.tried.wait()) for feed in feeds]
        await asyncio.wait(first, timeout=_START_WAIT_S)
        for task in first:
            task.cancel()

    async def stop(self) -> None:
        """End all feeds; what they told stays in the fleet, but for the KV events."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None


class ReplicaFeed:
    """What one replica tells: its agent and its KV events."""

    def __init__(
        self,
        fleet: Fleet,
        replica: Replica,
        session: aiohttp.ClientSession,
        context: zmq.asyncio.Context,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._replica = replica
        self._session = session
        self._context = context
        self._clock = clock
        self._info: InstanceInfo | None = None
        self._restarted = asyncio.Event()
        self.tried = asyncio.Event()
        """Set when the agent was asked once, with or without success."""

    def runs(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the coroutines to be run as tasks."""
        agent_url = self._replica.config.agent_url
        if agent_url is None:
            self.tried.set()
            return [self._run_events()]
        return [self._run_agent(AgentClient(self._session, agent_url)), self._run_events()]

    # --- agent

    async def _run_agent(self, client: AgentClient) -> None:
        pause = Pause()
        while True:
            try:
                await self._follow_agent(client, pause)
            except HistoryGone:
                log.info("%s: events were lost; taking a new snapshot", self._replica.id)
            except (AgentError, ValueError) as error:  # ValueError: keys that are not whole
                if pause.is_first:
                    log.warning("%s: its agent does not answer: %s", self._replica.id, error)
            except Exception:  # nobody else would notice that the following ended
                log.exception("%s: following its agent failed", self._replica.id)
            finally:
                self.tried.set()
            await pause.wait()

    async def _follow_agent(self, client: AgentClient, pause: "Pause") -> None:
        """Take a snapshot and then every change; raise `AgentError` when that breaks off."""
        self._take_info(await client.info())
        snapshot = await client.snapshot()
        incarnation, after = snapshot.incarnation, snapshot.seq
        if self._replica.incarnation != incarnation:
            raise HistoryGone("the replica started anew between /info and /snapshot")
        self._fleet.apply_snapshot(self._replica.id, snapshot)
        self.tried.set()
        pause.reset()
        log.info("%s: following its agent at %s", self._replica.id, client.base_url)
        told_s = self._clock()
        while True:
            batch = await client.events(after, incarnation, _POLL_S)
            if batch.incarnation != incarnation:
                raise HistoryGone("the replica started anew")
            self._fleet.apply_events(self._replica.id, batch)
            after = batch.seq
            if self._clock() - told_s >= _INFO_EVERY_S:
                self._take_info(await client.info())
                told_s = self._clock()
            # After an empty answer too: an agent that answers at once would be asked without end.
            await asyncio.sleep(_POLL_GAP_S)

    def _take_info(self, info: InstanceInfo) -> None:
        restarted = self._fleet.apply_info(self._replica.id, info)
        self._info = info
        if restarted:
            # Its KV events begin anew, most likely on another port.
            self._restarted.set()

    # --- KV events

    async def _run_events(self) -> None:
        pause = Pause()
        while True:
            self._restarted.clear()
            try:
                endpoints = await self._endpoints()
                restarted = endpoints is not None and await self._follow_events(endpoints, pause)
            except Exception:  # nobody else would notice that the following ended
                log.exception("%s: following its KV events failed", self._replica.id)
                await pause.wait()
                continue
            if endpoints is None:
                await self._until_restart(_NO_EVENTS_PAUSE_S)
            elif restarted:
                pause.reset()
            else:
                await pause.wait()

    async def _follow_events(self, endpoints: KvEndpoints, pause: "Pause") -> bool:
        """Follow until the connection is lost or the replica started anew (then True)."""
        reader = KvEventReader()
        sink = _Sink(self._fleet, self._replica, reader, pause)
        subscriber = KvSubscriber(self._context, endpoints, reader, sink)
        following = asyncio.create_task(subscriber.run())
        restart = asyncio.create_task(self._restarted.wait())
        try:
            await asyncio.wait({following, restart}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
                log.warning("%s: its KV events have ended", self._replica.id)
        except BadEvents as error:
            if pause.is_first:
                log.warning("%s: its KV events are not vLLM's: %s", self._replica.id, error)
        except zmq.ZMQError as error:
            if pause.is_first:
                log.warning("%s: no KV events from %s: %s", self._replica.id, endpoints, error)
        finally:
            for task in (following, restart):
                task.cancel()
            await asyncio.gather(following, restart, return_exceptions=True)
        return self._restarted.is_set()

    async def _endpoints(self) -> KvEndpoints | None:
        """Return where KV events come from, None if nobody says."""
        config, info = self._replica.config, self._info
        if config.kv_events is not None:
            replay = config.kv_replay
            if replay is None and info is not None:
                replay = self._endpoint(info.kv_replay_port)
            return KvEndpoints(config.kv_events, replay)
        if config.agent_url is not None:
            events = None if info is None else self._endpoint(info.kv_events_port)
            if info is None or events is None:
                return None
            return KvEndpoints(events, config.kv_replay or self._endpoint(info.kv_replay_port))
        return await self._published_endpoints()

    def _endpoint(self, port: int | None) -> str | None:
        return None if port is None else f"tcp://{_host(self._replica.config.url)}:{port}"

    async def _published_endpoints(self) -> KvEndpoints | None:
        """Ask a vLLM itself, which tells since 0.32."""
        config = self._replica.config
        headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
        try:
            async with self._session.get(
                f"{config.url}/kv_event_sources",
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=5.0),
            ) as response:
                body = await response.read() if response.status == 200 else b"{}"
            sources = msgspec.json.decode(body, type=dict[str, _Source])
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError):
            return None
        if len(sources) > 1:
            log.warning(
                "%s: has %d data-parallel ranks behind one URL; only the first one's KV is known",
                self._replica.id,
                len(sources),
            )
        first = sources.get("0")
        if first is None or first.endpoint is None:
            return None
        host = _host(config.url)
        replay = None if first.replay_endpoint is None else _reachable(first.replay_endpoint, host)
        return KvEndpoints(_reachable(first.endpoint, host), replay, first.topic)

    async def _until_restart(self, wait_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._restarted.wait()


class _Source(msgspec.Struct):
    """One entry of ``/kv_event_sources``."""

    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""


class _Sink:
    """Passes one replica's KV events to the fleet."""

    def __init__(
        self, fleet: Fleet, replica: Replica, reader: KvEventReader, pause: "Pause"
    ) -> None:
        self._fleet = fleet
        self._replica = replica
        self._reader = reader
        self._pause = pause

    def following(self) -> None:
        self._fleet.following_kv(self._replica.id)
        self._pause.reset()
        log.info("%s: following its KV events", self._replica.id)

    def apply(self, batch: KvBatch) -> None:
        problem = self._replica.shape_problem
        self._fleet.apply_kv(self._replica.id, batch)
        self._reader.shows_first = not self._replica.shape_checked
        if self._replica.shape_problem != problem and self._replica.shape_problem is not None:
            log.error("%s: %s", self._replica.id, self._replica.shape_problem)

    def forget(self) -> None:
        self._fleet.lost_kv(self._replica.id)
        self._reader.shows_first = True


class Pause:
    """Pauses between tries, growing until something works."""

    def __init__(self) -> None:
        self._next_s = _FIRST_PAUSE_S

    @property
    def is_first(self) -> bool:
        """Whether this is the first failure in a row."""
        return self._next_s == _FIRST_PAUSE_S

    async def wait(self) -> None:
        """Pause, longer than last time."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, _LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s)

    def reset(self) -> None:
        """Begin with short pauses again."""
        self._next_s = _FIRST_PAUSE_S


def _host(url: str) -> str:
    host = urlsplit(url).hostname or "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _reachable(endpoint: str, host: str) -> str:
    """Turn an address that a server listens on into one to connect to."""
    for anywhere in ("*", "0.0.0.0", "[::]"):
        endpoint = endpoint.replace(f"tcp://{anywhere}:", f"tcp://{host}:")
    return endpoint
