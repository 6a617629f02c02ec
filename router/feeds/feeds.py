"""Follow what replicas report: KV events of vLLM, and the event streams of agents.

Each replica has one task for its KV events and, if it has an agent, one for its agent. A task
ends when the replica leaves the fleet. A failure is logged once and retried with growing pauses.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from enum import Enum, auto
from math import inf
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec
import zmq

from router.agent_client import AgentClient, AgentError, HistoryGoneError
from router.feeds.kv_receiver import KvReceiver
from router.feeds.kv_subscriber import KvEndpoints, KvSubscriber, until_first
from router.feeds.replica_answers import fetch
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.index.kv_events import KvBatch, KvEventFormatError, KvEventReader
from warmroute_common.agent_protocol import UNREADABLE, EventBatch, InstanceInfo, KeyEvent, Snapshot
from warmroute_common.backoff import Backoff
from warmroute_common.decoding import decode_json
from warmroute_common.fleet_secret import FleetSecret
from warmroute_common.tasks import all_set, end_all

_FIRST_S: Final = 0.2
_LONGEST_S: Final = 2.0

log = logging.getLogger("warmroute.feeds")

_NO_EVENTS_PAUSE_S: Final = 30.0
_SOURCES_S: Final = 5.0
_ABSENT_AFTER_S: Final = 10.0
"""A publisher on the same network answers in milliseconds."""
_STEADY_S: Final = 10.0
"""After following for this long the next pause is short again."""
_SAME_LINE_S: Final = 60.0
"""Between two equal log lines about one replica's KV events."""


class _State(Enum):
    """What became of following a replica's KV events."""

    IDLE = auto()
    FOLLOWING = auto()
    ENDED = auto()
    ABSENT = auto()
    UNREADABLE = auto()


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
        receiver: KvReceiver,
    ) -> None:
        self._fleet = fleet
        self._replica = replica
        self._session = session
        self._receiver = receiver
        self._reader = KvEventReader()
        self._pause = Backoff(_FIRST_S, _LONGEST_S)
        self._agent_events: str | None = None
        self._agent_replay: str | None = None
        self._restarted = asyncio.Event()
        self._state = _State.IDLE
        self._has_heard = False
        """Whether a message has come since it connected."""
        self._logged_s: dict[_State, float] = {}

    def note_agent_info(self, info: InstanceInfo, restarted: bool) -> None:
        """Take over from an agent where its vLLM publishes: most likely elsewhere if restarted."""
        self._agent_events = self._endpoint(info.kv_events_port)
        self._agent_replay = self._endpoint(info.kv_replay_port)
        if restarted:
            self._restarted.set()

    async def run(self) -> None:
        """Follow the events, and start again whenever that breaks off; never returns."""
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
        """Follow until the connection is lost or the replica has restarted."""
        self._reader, self._has_heard = KvEventReader(), False
        subscriber = KvSubscriber(self._receiver, endpoints, self._reader, self)
        began_s = time.monotonic()
        late = asyncio.get_running_loop().call_later(_ABSENT_AFTER_S, self._note_absent, endpoints)
        try:
            await until_first(subscriber.run(), self._restarted.wait())
            if not self._restarted.is_set():
                self._change(_State.ENDED, "its KV events have ended")
        except KvEventFormatError as error:
            self._change(_State.UNREADABLE, f"its KV events are not vLLM's: {error}")
        except zmq.ZMQError as error:
            self._change(_State.ABSENT, f"no KV events from {endpoints.events}: {error}")
        finally:
            late.cancel()
        if time.monotonic() - began_s > _STEADY_S:
            self._pause.reset()

    def _note_absent(self, endpoints: KvEndpoints) -> None:
        # A long replay comes before the following.
        if not (self._has_heard or self._replica.has_events):
            text = (
                f"no KV events from {endpoints.events}: nothing there answers as vLLM's publisher "
                "does; check the port of --kv-events-config, and that no firewall blocks it"
            )
            self._change(_State.ABSENT, text)

    def _change(self, state: _State, text: str) -> None:
        """Note a change, and log it unless the same was logged in the last minute."""
        if state is self._state:
            return
        self._state, now_s = state, time.monotonic()
        is_well = state is _State.FOLLOWING
        self._replica.events_problem = None if is_well else text
        if now_s - self._logged_s.get(state, -inf) >= _SAME_LINE_S:
            self._logged_s[state] = now_s
            log.log(logging.INFO if is_well else logging.WARNING, "%s: %s", self._replica.id, text)

    # --- what subscribers tell

    def following(self) -> None:
        """Note that everything that can be known is known; what comes now is new.

        A publisher that was not understood still is not, until a message of it is.
        """
        if self._state is not _State.UNREADABLE:
            self._begin()

    def _begin(self) -> None:
        self._fleet.following_kv(self._replica.id)
        self._change(_State.FOLLOWING, "following its KV events")

    def apply(self, batch: KvBatch) -> None:
        """Take a message, in order, each once."""
        if self._replica.is_removed:
            return  # its task is about to end; another replica may have its name now
        self._has_heard = True
        if self._state is _State.UNREADABLE:
            self._begin()
        problem = self._replica.shape_problem
        self._fleet.apply_kv(self._replica.id, batch, time.monotonic())
        self._reader.shows_first = not self._replica.shape_checked
        if self._replica.shape_problem not in (None, problem):
            log.error("%s: %s", self._replica.id, self._replica.shape_problem)

    def forget(self) -> None:
        """Drop all that earlier messages told."""
        if self._replica.is_removed:
            return  # with all of it
        self._fleet.lost_kv(self._replica.id)
        self._reader.restart()

    # --- where they come from

    async def endpoints(self) -> KvEndpoints | None:
        """Return where KV events come from, None if nothing says; asks vLLM itself, too."""
        config = self._replica.config
        replay = config.kv_replay or self._agent_replay
        if config.kv_events is not None:
            return KvEndpoints(config.kv_events, replay)
        if self._agent_events is not None:
            return KvEndpoints(self._agent_events, replay)
        return await self._published_endpoints()

    def _endpoint(self, port: int | None) -> str | None:
        return None if port is None else f"tcp://{self._host}:{port}"

    @property
    def _host(self) -> str:
        host = urlsplit(self._replica.config.url).hostname or "127.0.0.1"
        return f"[{host}]" if ":" in host else host

    async def _published_endpoints(self) -> KvEndpoints | None:
        """Ask a vLLM itself, which tells since 0.32; also if its agent has not answered."""
        body = await fetch(
            self._session, self._replica.config, "/kv_event_sources", timeout_s=_SOURCES_S
        )
        try:
            sources = decode_json(body or b"{}", dict[str, _Source])
        except UNREADABLE:
            return None
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


_POLL_S: Final = 20.0
_POLL_GAP_S: Final = 0.05
"""From news of an agent to the next question: the first is told at once, and what follows it
comes together. Asking for every change costs both ends more than all else that they do."""
_POLLS_PER_S: Final = 500.0
"""To all agents together: at 0.3 ms of CPU each, some 15% of the router's one core."""
_INFO_EVERY_S: Final = 30.0
_KEY_BYTES: Final = 8
_PIECE_KEYS: Final = 5_000
"""Keys applied before others may run: some milliseconds."""


def poll_gap_s(agents: int) -> float:
    """Return the pause before each of this many agents is asked again."""
    return max(_POLL_GAP_S, agents / _POLLS_PER_S)


class AgentFeed:
    """What one replica's agent tells: the replica's identity, and its lower tiers."""

    def __init__(
        self,
        fleet: Fleet,
        replica: Replica,
        client: AgentClient,
        kv_feed: KvFeed,
        gap_s: Callable[[], float],
    ) -> None:
        """``kv_feed`` learns where vLLM publishes; ``gap_s`` returns `poll_gap_s`."""
        self._fleet = fleet
        self._replica = replica
        self._client = client
        self._kv_feed = kv_feed
        self._gap_s = gap_s
        self.tried = asyncio.Event()
        """Set when the agent was asked once, with or without success."""

    async def run(self) -> None:
        """Follow the agent, and start again whenever that breaks off; never returns."""
        pause = Backoff(_FIRST_S, _LONGEST_S)
        while True:
            try:
                await self._follow(pause)
            except HistoryGoneError:
                log.info("%s: events were lost; taking a new snapshot", self._replica.id)
            except (AgentError, ValueError) as error:  # ValueError: keys that are not whole
                if not pause.is_failing:
                    log.warning("%s: its agent does not answer: %s", self._replica.id, error)
            except Exception:  # else the following would end unnoticed
                log.exception("%s: following its agent failed", self._replica.id)
            finally:
                self.tried.set()
            await asyncio.sleep(pause.next_s())

    async def _follow(self, pause: Backoff) -> None:
        """Take a snapshot and then every change; raise `AgentError` when that breaks off."""
        await self._take_info()
        snapshot = await self._client.snapshot()
        incarnation, after = snapshot.incarnation, snapshot.seq
        if self._replica.incarnation != incarnation:
            raise HistoryGoneError("the replica started anew between /info and /snapshot")
        await self._take_snapshot(snapshot)
        self.tried.set()
        pause.reset()
        log.info("%s: following its agent at %s", self._replica.id, self._client.base_url)
        info_due_s = time.monotonic() + _INFO_EVERY_S
        while True:
            batch = await self._client.events(after, incarnation, _POLL_S)
            if batch.incarnation != incarnation:
                raise HistoryGoneError("the replica started anew")
            await self._take_events(batch)
            after = batch.seq
            if time.monotonic() >= info_due_s:
                await self._take_info()
                info_due_s = time.monotonic() + _INFO_EVERY_S
            # After an empty answer too: an agent that answers at once would be asked without end.
            await asyncio.sleep(self._gap_s())

    async def _take_info(self) -> None:
        info = await self._client.info()
        self._kv_feed.note_agent_info(info, self._fleet.apply_info(self._replica.id, info))

    async def _take_snapshot(self, snapshot: Snapshot) -> None:
        """Replace what is known of the lower tiers: by nothing, then by the snapshot in pieces.

        Requests placed between the pieces see less than there is. What changes at the agent
        meanwhile is asked for when the snapshot is whole, by the same task, and so wins over it.
        """
        self._fleet.apply_snapshot(self._replica.id, msgspec.structs.replace(snapshot, tiers={}))
        stored = [KeyEvent(tier, True, keys) for tier, keys in snapshot.tiers.items()]
        await self._take_events(
            EventBatch(incarnation=snapshot.incarnation, seq=snapshot.seq, events=stored)
        )

    async def _take_events(self, batch: EventBatch) -> None:
        """Apply events in their order, with a turn for others after every `_PIECE_KEYS`.

        Between the pieces nothing else changes the lower tiers of this replica: of its KV
        events, which another task applies, only those of the GPU count, as there is an agent.
        """
        room_bytes = _PIECE_KEYS * _KEY_BYTES
        for event in batch.events:
            at = 0
            while at < len(event.keys):
                keys = event.keys[at : at + room_bytes]
                piece = [KeyEvent(event.tier, event.stored, keys)]
                self._fleet.apply_events(
                    self._replica.id, msgspec.structs.replace(batch, events=piece)
                )
                at += len(keys)
                room_bytes -= len(keys)
                if room_bytes <= 0:
                    await asyncio.sleep(0)
                    room_bytes = _PIECE_KEYS * _KEY_BYTES


_START_WAIT_S: Final = 3.0


class Feeds:
    """All feeds of a fleet, between `start` and `stop`."""

    def __init__(
        self, fleet: Fleet, session: aiohttp.ClientSession, secret: FleetSecret | None = None
    ) -> None:
        """``secret`` is shown to agents."""
        self._fleet = fleet
        self._session = session
        self._secret = secret
        self._receiver = KvReceiver()
        self._tasks: dict[Replica, list[asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin, and wait a little so that the first request finds the agents' snapshots."""
        agents = [self.joined(each) for each in self._fleet.replicas.values()]
        await all_set((each.tried for each in agents if each is not None), _START_WAIT_S)

    def kv_behind_s(self) -> float:
        """Return for how long not all KV events that have arrived were taken."""
        return self._receiver.behind_s

    def joined(self, replica: Replica) -> AgentFeed | None:
        """Begin to follow a replica of the fleet; return the feed of its agent, if it has one."""
        kv_feed = KvFeed(self._fleet, replica, self._session, self._receiver)
        tasks = self._tasks[replica] = [asyncio.create_task(kv_feed.run())]
        if (url := replica.config.agent_url) is None:
            return None
        client = AgentClient(self._session, url, self._secret)
        agent = AgentFeed(self._fleet, replica, client, kv_feed, self._gap_s)
        tasks.append(asyncio.create_task(agent.run()))
        return agent

    def left(self, replica: Replica) -> None:
        """Follow a replica no longer."""
        for task in self._tasks.pop(replica):
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            task.cancel()

    async def stop(self) -> None:
        """End all feeds; what they told stays in the fleet, but for the KV events."""
        await end_all([*self._ending, *(each for tasks in self._tasks.values() for each in tasks)])
        await self._receiver.aclose()

    def _gap_s(self) -> float:
        agents = sum(each.config.agent_url is not None for each in self._tasks)
        return poll_gap_s(agents)
