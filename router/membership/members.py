"""The replicas as their sources name them, and how they join and leave the fleet.

Several sources may name one replica: it is one replica, and the first source's settings count.
A replica that no source names any more is drained: it gets nothing new, and is removed when its
requests have ended, or after a time. Requests that are still under way then go on to their ends.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from router.config import ReplicaConfig, server_key
from router.fleet import Fleet, Replica, State
from warmroute_common.tasks import all_set, end_all

log = logging.getLogger("warmroute.membership")

_CHECK_S: Final = 0.25
"""How often draining replicas are looked at."""
_FIRST_PROBES_S: Final = 3.0
"""Replicas are drained when those that have joined were probed once, or after so long without."""


class Source(IntEnum):
    """Where replicas are named; a lower one's settings of a replica count."""

    FILE = 0
    REGISTRATION = 1
    KUBERNETES = 2
    DNS = 3


_Key = tuple[str, str, int | None, str]
"""What tells servers apart."""


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A replica that drains since no source names it any more."""

    until_s: float
    was_draining: bool
    """Whether it drained before, since somebody asked for that."""


class Members:
    """Changes the fleet as its sources change, between `start` and `stop`."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        drain_s: float,
        joined: Callable[[Replica], asyncio.Event],
        left: Callable[[Replica], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``joined`` is told of each replica that has joined the fleet, and returns what is set
        when it was probed once; ``left`` of each that is about to be removed, at the latest
        ``drain_s`` after no source named it any more.
        """
        self.fleet = fleet
        self._drain_s = drain_s
        self._joined = joined
        self._left = left
        self._clock = clock
        replicas = {server_key(each.config.url): each for each in fleet.replicas.values()}
        self._replicas: dict[_Key, Replica] = replicas
        """Those of the fleet that are named, or drain."""
        named = {key: each.config for key, each in replicas.items()}
        self._named: dict[tuple[Source, str], dict[_Key, ReplicaConfig]] = {
            (Source.FILE, ""): named
        }
        self._leaving: dict[_Key, _Leaving] = {}
        self._refused: set[_Key] = set()
        """Replicas that are named and could not join."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.listeners: list[Callable[[], None]] = []
        """Called whenever replicas have joined or left."""

    def start(self) -> None:
        """Begin to change the fleet."""
        self._task = asyncio.create_task(self._run(), name="membership")

    async def stop(self) -> None:
        """Leave the fleet as it is."""
        if self._task is not None:
            await end_all([self._task])

    def name(self, source: Source, replicas: Iterable[ReplicaConfig], *, part: str = "") -> None:
        """Note all replicas that a source names now; they join, and others leave, soon after.

        ``part`` tells sources of one kind apart.
        """
        self._named[source, part] = {server_key(each.url): each for each in replicas}
        self._changed.set()

    def source(self, replica: Replica) -> Source | None:
        """Return where a replica's settings come from; None for one that leaves."""
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
            except Exception:  # else no replica would join or leave any more
                log.exception("changing the fleet failed")

    async def _apply(self) -> None:
        """Have replicas join, then those leave that are named no more.

        In this order, and not before the new ones were probed: else a fleet whose replicas are
        all replaced at once would have none that is known to be up.
        """
        before = set(self._replicas.values())
        probed = self._take_in(self._wanted())
        await all_set(probed, _FIRST_PROBES_S)
        self._let_go(self._wanted())
        if before != set(self._replicas.values()):
            for told in self.listeners:
                told()

    def _wanted(self) -> dict[_Key, ReplicaConfig]:
        wanted: dict[_Key, ReplicaConfig] = {}
        for source in sorted(self._named):
            for key, config in self._named[source].items():
                wanted.setdefault(key, config)
        return wanted

    # --- joining

    def _take_in(self, wanted: Mapping[_Key, ReplicaConfig]) -> list[asyncio.Event]:
        """Have the fleet's replicas be as they are wanted; return what is set when new ones
        were probed.
        """
        for key in self._leaving.keys() & wanted.keys():
            self._stay(key)
        # All of these first: one may have got the name of another.
        drained = {key for key, config in wanted.items() if self._replaced(key, config)}
        new = [key for key in wanted if key not in self._replicas]
        self._free({wanted[key].name for key in new}, wanted)
        probed = []
        for key in new:
            if (replica := self._add(key, wanted[key])) is not None:
                probed.append(self._joined(replica))
                if key in drained:
                    self.fleet.drain(replica.id)
        self._refused &= wanted.keys()
        return probed

    def _replaced(self, key: _Key, config: ReplicaConfig) -> bool:
        """Remove a replica that is configured otherwise now; return whether it was draining.

        With its key alone changed it goes on as it is.
        """
        replica = self._replicas.get(key)
        if replica is None or replica.config == config:
            return False
        if replace(replica.config, api_key=config.api_key) == config:
            replica.config = config
            log.info("%s has another api_key", replica.id)
            return False
        is_draining = replica.state is State.DRAINING
        log.info("%s is configured otherwise: it joins anew", replica.id)
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
        """Remove at once what leaves and has a name of a replica that joins."""
        for key, replica in list(self._replicas.items()):
            if key not in wanted and replica.config.name in names:
                self._remove(key)

    # --- leaving

    def _let_go(self, wanted: Container[_Key]) -> None:
        now_s = self._clock()
        for key, replica in list(self._replicas.items()):
            if key not in wanted and key not in self._leaving:
                was_draining = replica.state is State.DRAINING
                self._leaving[key] = _Leaving(now_s + self._drain_s, was_draining)
                log.info("%s leaves the fleet: %d requests there", replica.id, replica.in_flight)
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
        self._left(replica)
        self.fleet.remove(replica.id)
        log.info("%s has left the fleet; %d requests go on", replica.id, replica.in_flight)
