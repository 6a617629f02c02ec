"""LMCache's coordinator, as the router stands in for it: members, their events, their keys.

No I/O; times are passed in. A batch that is unknown, repeated or late changes nothing and is
counted.
"""

import logging
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any, Final

from router.fleet import Fleet
from router.lmcache.coordinator.directory import Directory
from router.lmcache.coordinator.pins import Pins
from router.lmcache.coordinator.quotas import Quotas
from router.lmcache.coordinator.records import Held, Place, owner_of
from router.lmcache.coordinator.usage import Declared, usage
from router.lmcache.members import MAX_MEMBERS, Members
from router.lmcache.ties import Ties
from router.lmcache.wire import Batch, ObjectKey, RegisterCall

log = logging.getLogger("warmroute.lmcache")

MAX_KEYS: Final = 500_000
"""Of the directory; at 256 tokens a chunk they stand for 128 million tokens."""
DEFAULT_CHUNK_TOKENS: Final = 256
"""LMCache's own."""


class Verdict(StrEnum):
    """The fate of a batch; the names are those of the answer to ``POST /events``."""

    APPLIED = "applied"
    DUPLICATE = "duplicates"
    STALE = "stale"
    """Of a process of the server's that has ended."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The meaning of a batch's number."""

    verdict: Verdict
    restarted: bool = False
    """The server has started anew, with an empty L1."""
    gap: bool = False
    """Batches before this one were missed, and will not come again."""


@dataclass(slots=True)
class Cursor:
    """How far a server's stream was followed."""

    incarnation: int
    seq: int = 0


class Streams:
    """The cursors of all servers; `Members` bounds how many servers have one."""

    def __init__(self) -> None:
        self._cursors: dict[str, Cursor] = {}

    def admit(self, batch: Batch) -> Admission:
        """Return the fate of a batch, and take its number."""
        cursor = self._cursors.get(batch.instance_id)
        restarted = cursor is not None and batch.incarnation > cursor.incarnation
        if cursor is not None and batch.incarnation < cursor.incarnation:
            return Admission(Verdict.STALE)
        if cursor is None or restarted:
            cursor = self._cursors[batch.instance_id] = Cursor(batch.incarnation)
        if batch.seq <= cursor.seq:
            return Admission(Verdict.DUPLICATE)
        gap = batch.seq > cursor.seq + 1
        cursor.seq = batch.seq
        return Admission(Verdict.APPLIED, restarted, gap)

    def forget(self, instance_id: str) -> None:
        """Follow a server's stream from wherever it goes on."""
        self._cursors.pop(instance_id, None)

    def of(self, instance_id: str) -> Cursor | None:
        """Return how far a server was followed, None if it never was."""
        return self._cursors.get(instance_id)


class Coordinator:
    """All that the router knows of LMCache's servers."""

    def __init__(self, fleet: Fleet, max_keys: int = MAX_KEYS) -> None:
        self.members = Members()
        self.directory = Directory(max_keys)
        self.ties = Ties(fleet, self.directory)
        self.pins = Pins()
        self.quotas = Quotas()
        self.chunk_tokens = DEFAULT_CHUNK_TOKENS
        """Of the servers that answer; one fleet has one chunk size, as LMCache has it."""
        self.counts: Counter[str] = Counter()
        """Batches by their fate, and other events and failures, by a word for each."""
        self._streams = Streams()
        self._declared = Declared()
        self._expected: set[str] = set()
        self._missed_s: dict[str, float] = {}

    def register(self, call: RegisterCall, now_s: float, wall_s: float) -> dict[str, Any]:
        """Take in a server; return what LMCache's coordinator answers."""
        instance_id = call.instance_id.strip() or f"mp-{uuid.uuid4().hex}"
        known = self.members.register(instance_id, call, now_s, wall_s)
        log.info("LMCache server %s has registered from %s", instance_id, call.ip)
        return {"instance_id": instance_id, "re_registered": known}

    def deregister(self, instance_id: str) -> None:
        """Forget a server that ends: its L1 is gone, what lies in L2 stays."""
        self.members.forget(instance_id)
        self._streams.forget(instance_id)
        self._declared.forget(instance_id)
        self._expected.discard(instance_id)
        self._missed_s.pop(instance_id, None)
        self.ties.forget(instance_id)
        self.ties.tell(self.directory.fence(instance_id))

    def expire(self, now_s: float) -> None:
        """Forget the servers that have fallen silent, as if they had ended."""
        for instance_id in self.members.silent(now_s):
            log.warning("LMCache server %s sends no heartbeats: forgotten", instance_id)
            self.counts["silent"] += 1
            self.deregister(instance_id)

    def expect(self, instance_id: str, now_s: float = 0.0) -> None:
        """Take events of a server that answers before it has registered.

        After a restart of the router a server registers anew at its next heartbeat, seconds
        later. Its earlier events are missed, unless its next batch is its first.
        """
        if len(self._expected) < MAX_MEMBERS:
            self._expected.add(instance_id)
            if self._streams.of(instance_id) is None:
                self._missed_s[instance_id] = now_s

    def lost(self, instance_id: str) -> None:
        """Note that a server does not answer: of its L1 nothing is certain any more."""
        self.counts["servers_lost"] += 1
        self.ties.tell(self.directory.doubt(instance_id))

    def apply(self, batches: list[Batch], now_s: float = 0.0) -> dict[str, int]:
        """Take over batches in their order; return how many of them had which fate."""
        found: Counter[str] = Counter({each.value: 0 for each in Verdict})
        for batch in batches:
            verdict = self._apply(batch, now_s)
            self.counts[verdict] += 1
            if verdict in found:
                found[verdict] += 1
        return dict(found)

    def refuted(self, replica_id: str, keys: list[ObjectKey]) -> None:
        """Note that a replica's server was asked for keys and lacks them."""
        self.counts["missing"] += len(keys)
        server = self.ties.server_of(replica_id)
        if server is not None:
            self.ties.tell(self.directory.refute(server.instance_id, keys))

    def found(self, instance_id: str, keys: list[ObjectKey]) -> None:
        """Note that a server was asked for keys and holds them in L1."""
        self.ties.tell(self.directory.confirm(instance_id, keys))

    def evicted(self, place: Place, keys: list[ObjectKey]) -> None:
        """Note that a server has answered that it has deleted keys."""
        self.counts["evicted"] += len(keys)
        self.ties.tell(self.directory.drop(place, keys))

    def told(self, key: ObjectKey, places: Mapping[Place, Held]) -> None:
        """Take over a key's places from another coordinator; all servers reach shared ones."""
        for place in places:
            if place.shared:
                self.ties.mounted_by_all(place.owner)
        self.ties.tell(self.directory.replace(key, places))

    @property
    def last_missed_s(self) -> float:
        """When events of any server were missed last, minus infinity if never."""
        return max(self._missed_s.values(), default=-inf)

    def missed_s(self, instance_id: str) -> float:
        """Return when events of a server were missed last, minus infinity if never."""
        return self._missed_s.get(instance_id, -inf)

    def usage(self) -> dict[str, Any]:
        """Return what LMCache's ``GET /instances/usage`` says."""
        registered = {each.instance_id for each in self.members.all()}
        return usage(self.directory.totals, self._declared, registered)

    def _apply(self, batch: Batch, now_s: float) -> str:
        known = self.members.get(batch.instance_id) is not None
        if not known and batch.instance_id not in self._expected:
            return "unknown"
        admission = self._streams.admit(batch)
        if admission.verdict is not Verdict.APPLIED:
            return admission.verdict.value
        if batch.seq == 1 and not admission.restarted:
            self._missed_s.pop(batch.instance_id, None)
        if admission.restarted:
            log.info("LMCache server %s has started anew", batch.instance_id)
            # No event may have told of its last writes to L2.
            self._missed_s[batch.instance_id] = now_s
            self.ties.tell(self.directory.fence(batch.instance_id))
        elif admission.gap:
            self.counts["gaps"] += 1
            self._missed_s[batch.instance_id] = now_s
            log.info("events of LMCache server %s were missed", batch.instance_id)
            self.ties.tell(self.directory.doubt(batch.instance_id))
        if batch.event_type == "config":
            self._declared.note(batch)
        if batch.shared:
            self.ties.mounted(owner_of(batch), batch.instance_id)
        self.ties.note(batch, self.directory.apply(batch))
        return Verdict.APPLIED.value
