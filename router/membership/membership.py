"""Which replicas the fleet has, as sources name them, and how replicas join and leave.

Several sources may name the same replica; the settings of the first source are used. A replica
that no source names any longer is drained: it gets no new requests and is removed when its
requests have finished, or after a time limit. Requests that still run then continue.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, Protocol

from router.config.settings import DiscoveredConfig, ReplicaConfig
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica, ReplicaState
from warmroute_common.addresses import join_host_port, server_key
from warmroute_common.command_line import counted
from warmroute_common.tasks import all_set, end_all

log = logging.getLogger("warmroute.membership")

_CHECK_S: Final = 0.25
"""How often draining replicas are checked."""
_FIRST_PROBES_S: Final = 3.0
"""Old replicas are drained once the new ones were probed, or after this time."""


class Source(IntEnum):
    """Where replicas are named. The settings of the lowest source that names a replica are used."""

    FILE = 0
    REGISTRATION = 1
    KUBERNETES = 2
    DNS = 3


_Key = tuple[str, str, int | None, str]
"""A server's identity (`server_key`)."""


class NameReplicas(Protocol):
    """Sets all replicas that a source names now: `Membership.name`."""

    def __call__(
        self, source: Source, replicas: Iterable[ReplicaConfig], *, part: str = ""
    ) -> None:
        """``part`` distinguishes several sources of one kind."""


def discovered(
    each: DiscoveredConfig, scheme: str, host: str, port: int, *, name: str | None = None
) -> ReplicaConfig:
    """Return the settings of a discovered replica; ``each`` has the settings that all share."""

    def at(scheme: str, port: int | None) -> str | None:
        return None if port is None else f"{scheme}://{join_host_port(host, port)}"

    return ReplicaConfig(
        url=f"{scheme}://{join_host_port(host, port)}",
        instance_id=name,
        agent_url=at("http", each.agent_port),
        kv_events=at("tcp", each.kv_events_port),
        kv_replay=at("tcp", each.kv_replay_port),
        api_key=each.api_key,
        hash_seed=each.hash_seed,
        nixl_role=each.nixl_role,
    )


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A replica that is drained because no source names it any longer."""

    until_s: float
    was_draining: bool
    """Whether an operator was draining it before."""


class ReplicaFollowers(Protocol):
    """What keeps something for each replica of the fleet."""

    def joined(self, replica: Replica) -> asyncio.Event:
        """Begin, after a replica has joined; return an event that its first probe sets."""

    def left(self, replica: Replica) -> None:
        """End, before a replica is removed."""


class Membership:
    """Keeps the fleet in step with its sources, between `start` and `stop`."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        drain_s: float,
        followers: ReplicaFollowers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A replica is removed at most ``drain_s`` after the last source stopped naming it."""
        self.fleet = fleet
        self._drain_s = drain_s
        self._followers = followers
        self._clock = clock
        replicas = {server_key(each.config.url): each for each in fleet.replicas.values()}
        self._replicas: dict[_Key, Replica] = replicas
        """The fleet's replicas that are named or draining."""
        named = {key: each.config for key, each in replicas.items()}
        self._named: dict[tuple[Source, str], dict[_Key, ReplicaConfig]] = {
            (Source.FILE, ""): named
        }
        self._leaving: dict[_Key, _Leaving] = {}
        self._refused: set[_Key] = set()
        """Replicas that are named but could not join."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.listeners: list[Callable[[], None]] = []
        """Called after replicas have joined or left."""

    def start(self) -> None:
        """Begin to apply changes to the fleet."""
        self._task = asyncio.create_task(self._run(), name="membership")

    async def stop(self) -> None:
        """Stop; the fleet stays as it is."""
        if self._task is not None:
            await end_all([self._task])

    def name(self, source: Source, replicas: Iterable[ReplicaConfig], *, part: str = "") -> None:
        """Set all replicas that a source names now. They join, and others leave, soon after.

        ``part`` distinguishes several sources of one kind.
        """
        self._named[source, part] = {server_key(each.url): each for each in replicas}
        self._changed.set()

    def source(self, replica: Replica) -> Source | None:
        """Return the source of a replica's settings; None for a replica that is leaving."""
        key = server_key(replica.config.url)
        return min(
            (source for (source, _), named in self._named.items() if key in named), default=None
        )

    async def _run(self) -> None:
        while True:
            await all_set([self._changed], _CHECK_S)
            self._changed.clear()
            try:
                await self._apply()
            except Exception:  # otherwise no replica would join or leave any longer
                log.exception("changing the fleet failed")

    async def _apply(self) -> None:
        """Add new replicas, wait for their first probes, then drain those no longer named.

        In this order: otherwise a fleet whose replicas are all replaced at once would have none
        that is known to be up.
        """
        before = set(self._replicas.values())
        probed = self._add_all(self._wanted())
        await all_set(probed, _FIRST_PROBES_S)
        self._drain_all(self._wanted())
        if before != set(self._replicas.values()):
            for listener in self.listeners:
                listener()

    def _wanted(self) -> dict[_Key, ReplicaConfig]:
        wanted: dict[_Key, ReplicaConfig] = {}
        for source in sorted(self._named):
            for key, config in self._named[source].items():
                wanted.setdefault(key, config)
        return wanted

    # --- joining

    def _add_all(self, wanted: Mapping[_Key, ReplicaConfig]) -> list[asyncio.Event]:
        """Add and change replicas; return events that are set when the new ones were probed."""
        for key in self._leaving.keys() & wanted.keys():
            self._stay(key)
        # Remove all changed ones before adding any: replicas may have exchanged their names.
        drained = {key for key, config in wanted.items() if self._replaced(key, config)}
        new = [key for key in wanted if key not in self._replicas]
        self._free({wanted[key].name for key in new}, wanted)
        probed = []
        for key in new:
            if (replica := self._add(key, wanted[key])) is not None:
                probed.append(self._followers.joined(replica))
                if key in drained:
                    self.fleet.drain(replica.id)
        self._refused &= wanted.keys()
        return probed

    def _replaced(self, key: _Key, config: ReplicaConfig) -> bool:
        """Remove a replica whose settings have changed; return whether it was draining.

        If only its key has changed, the replica stays.
        """
        replica = self._replicas.get(key)
        if replica is None or replica.config == config:
            return False
        if replace(replica.config, api_key=config.api_key) == config:
            replica.config = config
            log.info("%s: api_key changed", replica.id)
            return False
        is_draining = replica.state is ReplicaState.DRAINING
        log.info("%s: its settings changed; it joins again", replica.id)
        self._remove(key)
        return is_draining

    def _add(self, key: _Key, config: ReplicaConfig) -> Replica | None:
        try:
            replica = self.fleet.add(config)
        except ValueError as error:
            if key not in self._refused:
                log.error("%s cannot join the fleet: %s", config.url, error)
            self._refused.add(key)
            return None
        self._replicas[key] = replica
        log.info("%s (%s) has joined the fleet", replica.id, config.url)
        return replica

    def _free(self, names: Container[str], wanted: Container[_Key]) -> None:
        """Remove leaving replicas at once whose name a joining replica has."""
        for key, replica in list(self._replicas.items()):
            if key not in wanted and replica.config.name in names:
                self._remove(key)

    # --- leaving

    def _drain_all(self, wanted: Container[_Key]) -> None:
        now_s = self._clock()
        for key, replica in list(self._replicas.items()):
            if key not in wanted and key not in self._leaving:
                was_draining = replica.state is ReplicaState.DRAINING
                self._leaving[key] = _Leaving(now_s + self._drain_s, was_draining)
                log.info(
                    "%s is leaving the fleet, with %s in flight",
                    replica.id,
                    counted(replica.in_flight, "request"),
                )
                self.fleet.drain(replica.id)
        for key, leaving in list(self._leaving.items()):
            if not self._replicas[key].in_flight or leaving.until_s <= now_s:
                self._remove(key)

    def _stay(self, key: _Key) -> None:
        if not self._leaving.pop(key).was_draining:
            self.fleet.resume(self._replicas[key].id)

    def _remove(self, key: _Key) -> None:
        self._leaving.pop(key, None)
        replica = self._replicas.pop(key)
        self._followers.left(replica)
        self.fleet.remove(replica.id)
        log.info(
            "%s has left the fleet, with %s in flight",
            replica.id,
            counted(replica.in_flight, "request"),
        )
