"""Following one replica's KV events: where they come from, and what they tell the fleet."""

import asyncio
import logging
import time
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec
import zmq.asyncio

from router.feeds.kv_subscriber import KvEndpoints, KvSubscriber, until_first
from router.feeds.pause import Pause
from router.feeds.questions import fetch
from router.fleet import Fleet, Replica
from router.residency import BadEventsError, KvBatch, KvEventReader
from warmroute_common.agent_protocol import UNREADABLE, InstanceInfo
from warmroute_common.tasks import all_set

log = logging.getLogger("warmroute.feeds")

_NO_EVENTS_PAUSE_S: Final = 30.0
_SOURCES_S: Final = 5.0


class _Source(msgspec.Struct):
    """One entry of vLLM's ``/kv_event_sources``."""

    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""


class KvFeed:
    """One replica's KV events; a `KvSink` of its subscribers."""

    def __init__(
        self,
        fleet: Fleet,
        replica: Replica,
        session: aiohttp.ClientSession,
        context: zmq.asyncio.Context,
    ) -> None:
        self._fleet = fleet
        self._replica = replica
        self._session = session
        self._context = context
        self._reader = KvEventReader()
        self._pause = Pause()
        self._agent_events: str | None = None
        self._agent_replay: str | None = None
        self._restarted = asyncio.Event()

    def agent_told(self, info: InstanceInfo, restarted: bool) -> None:
        """Take over from an agent where its vLLM publishes: most likely elsewhere if restarted."""
        self._agent_events = self._endpoint(info.kv_events_port)
        self._agent_replay = self._endpoint(info.kv_replay_port)
        if restarted:
            self._restarted.set()

    async def run(self) -> None:
        """Follow the events, and begin anew whenever that breaks off; without end."""
        while True:
            self._restarted.clear()
            pause_s = _NO_EVENTS_PAUSE_S
            try:
                if (endpoints := await self.endpoints()) is not None:
                    await self._follow(endpoints)
                    pause_s = self._pause.next_s()
            except Exception:  # else the following would end unnoticed
                log.exception("%s: following its KV events failed", self._replica.id)
                pause_s = self._pause.next_s()
            await all_set([self._restarted], pause_s)

    async def _follow(self, endpoints: KvEndpoints) -> None:
        """Follow until the connection is lost or the replica has started anew."""
        self._reader = KvEventReader()
        subscriber = KvSubscriber(self._context, endpoints, self._reader, self)
        try:
            await until_first(subscriber.run(), self._restarted.wait())
            if not self._restarted.is_set():
                log.warning("%s: its KV events have ended", self._replica.id)
        except BadEventsError as error:
            if self._pause.is_first:
                log.warning("%s: its KV events are not vLLM's: %s", self._replica.id, error)
        except zmq.ZMQError as error:
            if self._pause.is_first:
                log.warning("%s: no KV events from %s: %s", self._replica.id, endpoints, error)

    # --- what subscribers tell

    def following(self) -> None:
        """Note that everything that can be known is known; what comes now is new."""
        self._fleet.following_kv(self._replica.id)
        self._pause.reset()
        log.info("%s: following its KV events", self._replica.id)

    def apply(self, batch: KvBatch) -> None:
        """Take a message, in order, each once."""
        problem = self._replica.shape_problem
        self._fleet.apply_kv(self._replica.id, batch, time.monotonic())
        self._reader.shows_first = not self._replica.shape_checked
        if self._replica.shape_problem not in (None, problem):
            log.error("%s: %s", self._replica.id, self._replica.shape_problem)

    def forget(self) -> None:
        """Drop all that earlier messages told."""
        if self._replica.is_removed:
            return  # with all of it; another replica may have its name now
        self._fleet.lost_kv(self._replica.id)
        self._reader.shows_first = True

    # --- where they come from

    async def endpoints(self) -> KvEndpoints | None:
        """Return where KV events come from, None if nothing says; asks vLLM itself, too."""
        config = self._replica.config
        replay = config.kv_replay or self._agent_replay
        if config.kv_events is not None:
            return KvEndpoints(config.kv_events, replay)
        if config.agent_url is None:
            return await self._published_endpoints()
        return KvEndpoints(self._agent_events, replay) if self._agent_events else None

    def _endpoint(self, port: int | None) -> str | None:
        return None if port is None else f"tcp://{self._host}:{port}"

    @property
    def _host(self) -> str:
        host = urlsplit(self._replica.config.url).hostname or "127.0.0.1"
        return f"[{host}]" if ":" in host else host

    async def _published_endpoints(self) -> KvEndpoints | None:
        """Ask a vLLM itself, which tells since 0.32."""
        told = await fetch(
            self._session, self._replica.config, "/kv_event_sources", timeout_s=_SOURCES_S
        )
        try:
            sources = msgspec.json.decode(told or b"{}", type=dict[str, _Source])
        except UNREADABLE:
            return None
        if len(sources) > 1:
            log.warning(
                "%s: has %d data-parallel ranks behind one URL; only the first one's KV is known",
                self._replica.id,
                len(sources),
            )
        first = sources.get("0", _Source())
        if first.endpoint is None:
            return None
        replay = first.replay_endpoint and self._reachable(first.replay_endpoint)
        return KvEndpoints(self._reachable(first.endpoint), replay, first.topic)

    def _reachable(self, endpoint: str) -> str:
        """Turn an address that a server listens on into one to connect to."""
        for anywhere in ("*", "0.0.0.0", "[::]"):
            endpoint = endpoint.replace(f"tcp://{anywhere}:", f"tcp://{self._host}:")
        return endpoint
