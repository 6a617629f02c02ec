"""LMCache's workers inside vLLM: which have registered, and which replicas they belong to. Pure.

Times are passed in. An instance has one worker per rank. Worker 0 leads: an instance without it has
no replica.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from router.config.settings import LmcacheWorkersConfig, ReplicaConfig
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.index.lmcache_keys import LmcacheKeys
from router.index.prompt_keys import PromptKeyCache
from router.lmcache.worker_protocol import (
    DeRegisterMsg,
    FromWorker,
    FullSyncStartMsg,
    HeartbeatMsg,
    KVOpEvent,
    RegisterMsg,
)
from warmroute_common.addresses import join_host_port, server_key
from warmroute_common.api_errors import ConflictError, OverloadedError

log = logging.getLogger("warmroute.lmcache")

MAX_WORKERS: Final = 1024
LEADER: Final = 0
MAX_LOCATIONS: Final = 16
"""Per worker; messages about further locations are refused."""
SYNC_AGAIN_S: Final = 60.0
"""Least time between two full syncs; each takes 5 s or more, and the worker stores nothing then."""

_MAX_PROMPTS: Final = 10_000
_LEAST_PROMPTS: Final = 20
_FOREIGN_CHUNKS: Final = 200
"""This many chunks that begin no routed prompt mean that the keys differ."""


@dataclass(frozen=True, slots=True)
class FollowedOperations:
    """Which of a message's operations must be applied."""

    fresh: Sequence[KVOpEvent]
    """After a gap: the operations behind it."""
    late: int
    """Operations that were seen before, or come from an ended process."""
    gap: bool


@dataclass(slots=True)
class FullSync:
    """A full sync in progress, or the last one."""

    start: FullSyncStartMsg
    received: set[int] = field(default_factory=set)
    ended: bool = False
    counted: bool = False
    """Whether its completion was counted."""

    @property
    def is_complete(self) -> bool:
        """Whether all batches have arrived."""
        return self.ended and len(self.received) == self.start.batch_count

    def missing(self, most: int = 1000) -> list[int]:
        """Return batches that were sent and have not arrived."""
        if not self.ended:
            return []
        return [each for each in range(self.start.batch_count) if each not in self.received][:most]


@dataclass(eq=False, slots=True, kw_only=True)
class LmcacheWorker:
    """A worker that has registered, and how far its messages were followed."""

    registration: RegisterMsg
    """Its registration, or the heartbeat that replaced it."""
    seen_s: float
    from_start: bool
    """Whether it was known before its first operation; otherwise numbers may begin anywhere."""
    heartbeats: int = 0
    sync: FullSync | None = None
    wants_sync: str | None = None
    """Why its keys must be requested."""
    sync_requested_s: float | None = None
    _next: dict[str, int] = field(default_factory=dict)
    """By location the next operation's number."""

    @property
    def has_reported(self) -> bool:
        """Whether any of its operations was seen."""
        return bool(self._next)

    def follow(self, location: str, operations: Sequence[KVOpEvent]) -> FollowedOperations | None:
        """Check the numbers of operations; None if the worker has too many locations."""
        expected = self._next.get(location)
        if expected is None and len(self._next) >= MAX_LOCATIONS:
            return None
        if expected is None and self.from_start:
            expected = 0
        fresh: list[KVOpEvent] = []
        late, gap = 0, False
        for each in operations:
            if expected is not None and each.seq_num < expected:
                late += 1
                continue
            if expected is not None and each.seq_num > expected:
                gap = True
                fresh.clear()
            fresh.append(each)
            expected = each.seq_num + 1
        if expected is not None:
            self._next[location] = expected
        return FollowedOperations(fresh, late, gap)

    def begin_sync(self, start: FullSyncStartMsg) -> None:
        """Follow a new full sync. A worker runs one at a time: it has given up an earlier one."""
        self.sync = FullSync(start)

    def sync_due(self, now_s: float) -> str | None:
        """Return why its keys must be requested now; None if they need not be."""
        last_s = self.sync_requested_s
        if self.wants_sync is None or (last_s is not None and now_s - last_s < SYNC_AGAIN_S):
            return None
        self.sync_requested_s = now_s
        return self.wants_sync


class WorkerKeyCheck:
    """Checks that workers and router make the same keys of a prompt.

    With another seed, hash or chunk size no chunk would ever match, and nothing else would show it.
    So chunks that were stored are compared with the first chunks of the latest prompts.
    """

    def __init__(self) -> None:
        self._prompts: OrderedDict[int, None] = OrderedDict()
        self._foreign: dict[str, int] = {}
        """Chunks stored by replica; -1 once one of them began a routed prompt."""

    def prompt_placed(self, replicas: Iterable[Replica], prompt_keys: PromptKeyCache) -> None:
        """Remember a prompt that will be sent to one of the replicas."""
        for each in replicas:
            chunks = prompt_keys.of(each.key_shape, each.adapters).chunk_keys
            if chunks:
                self._prompts[chunks[0]] = None
        while len(self._prompts) > _MAX_PROMPTS:
            self._prompts.popitem(last=False)

    def restart(self, replica: str) -> None:
        """Forget a replica's result."""
        self._foreign.pop(replica, None)

    def stored(self, replica: str, chunks: Sequence[int]) -> None:
        """Check chunks that a replica has stored; log once if its keys seem to differ."""
        before = self._foreign.get(replica, 0)
        if before < 0:
            return
        if any(each in self._prompts for each in chunks):
            self._foreign[replica] = -1
            return
        if len(self._prompts) < _LEAST_PROMPTS:
            return
        after = self._foreign[replica] = before + len(chunks)
        if before < _FOREIGN_CHUNKS <= after:
            log.warning(
                "LMCache inside %s has stored %d chunks, and none begins a prompt that was sent "
                "there: compare its chunk_size, pre_caching_hash_algorithm and PYTHONHASHSEED with "
                "lmcache_workers and hash_seed here; or do all its prompts bypass this router?",
                replica,
                after,
            )

    def state(self, replica: str | None) -> str:
        """Return "seen" (keys agree), "differ" or "unknown"."""
        count = 0 if replica is None else self._foreign.get(replica, 0)
        return "seen" if count < 0 else "differ" if count >= _FOREIGN_CHUNKS else "unknown"


class WorkerRegistry:
    """The workers that have registered, at most `MAX_WORKERS`."""

    def __init__(self, fleet: Fleet, config: LmcacheWorkersConfig, counts: Counter[str]) -> None:
        self._fleet = fleet
        self._config = config
        self._workers: dict[tuple[str, int], LmcacheWorker] = {}
        self._replica_of: dict[str, str] = {}
        self.problems: dict[str, str] = {}
        """Why an instance has no replica, by instance."""
        self.counts = counts
        """Messages by what became of them."""
        self.key_check = WorkerKeyCheck()
        self._warned: set[str] = set()

    def __len__(self) -> int:
        return len(self._workers)

    def all(self) -> list[LmcacheWorker]:
        return list(self._workers.values())

    def instances(self) -> list[str]:
        """Return the instances' ids."""
        return list(dict.fromkeys(name for name, _ in self._workers))

    def of(self, instance_id: str) -> dict[int, LmcacheWorker]:
        """Return the workers of an instance by their numbers, in order."""
        found = {
            number: each for (name, number), each in self._workers.items() if name == instance_id
        }
        return dict(sorted(found.items()))

    def replica_of(self, instance_id: str) -> str | None:
        """Return the replica that an instance is inside of, if known."""
        return self._replica_of.get(instance_id)

    def prompt_placed(self, prompt_keys: PromptKeyCache) -> None:
        """Remember a prompt for the check of the workers' keys."""
        followed = (self._fleet.replicas[each] for each in self._replica_of.values())
        self.key_check.prompt_placed(followed, prompt_keys)

    def register(self, message: RegisterMsg, now_s: float) -> None:
        """Register a worker that has started; what it held before is forgotten.

        Raises `ConflictError` for the name of a replica without LMCache inside, `OverloadedError`.
        """
        self._add(message, now_s, from_start=True)

    def heartbeat(self, message: HeartbeatMsg, now_s: float) -> str | None:
        """Record a heartbeat; return why the worker must send all its keys, None if it need not.

        An unknown worker has registered with an earlier process of the router. Raises as
        `register` does.
        """
        worker = self._workers.get(message.name)
        if worker is None or _address(worker.registration) != _address(message):
            worker = self._add(message, now_s, from_start=False)
        worker.seen_s = now_s
        worker.heartbeats += 1
        return worker.sync_due(now_s) if self.followed(message) is not None else None

    def deregister(self, message: DeRegisterMsg) -> None:
        """Forget a worker that ends."""
        if self._workers.pop(message.name, None) is None:
            self._warn_unknown(message)
            return
        log.info("LMCache worker %s:%d has left", *message.name)
        self._bind()

    def expire(self, now_s: float) -> None:
        """Forget the workers that have been silent for ``timeout_s``."""
        limit_s = now_s - self._config.timeout_s
        silent = [name for name, each in self._workers.items() if each.seen_s < limit_s]
        for name in silent:
            log.warning(
                "LMCache worker %s:%d has been silent for %g s and is forgotten",
                *name,
                self._config.timeout_s,
            )
            self.counts["worker_silent"] += 1
            del self._workers[name]
        if silent:
            self._bind()

    def followed(self, message: FromWorker) -> str | None:
        """Return the replica whose tiers the sender reports; None unless it leads an instance."""
        return self._replica_of.get(message.instance_id) if message.worker_id == LEADER else None

    def known(self, message: FromWorker, now_s: float) -> LmcacheWorker | None:
        """Return the sender of a message; None, counted, if it has not registered."""
        worker = self._workers.get(message.name)
        if worker is None:
            self._warn_unknown(message)
        else:
            worker.seen_s = now_s
        return worker

    def replicas_changed(self, left: str | None = None) -> None:
        """Match instances and replicas again; ``left`` is about to leave the fleet."""
        for instance in [name for name, each in self._replica_of.items() if each == left]:
            del self._replica_of[instance]
        if left is not None:
            self.key_check.restart(left)
        self._bind(without=left)

    # --- parts of the above

    def _add(self, message: RegisterMsg, now_s: float, *, from_start: bool) -> LmcacheWorker:
        self._check_name(message.instance_id)
        known = self._workers.get(message.name)
        if known is None and len(self._workers) >= MAX_WORKERS:
            raise OverloadedError(f"the limit of {MAX_WORKERS} registered workers is reached")
        log.info(
            "LMCache worker %s:%d has registered from %s:%d", *message.name, *_address(message)
        )
        worker = self._workers[message.name] = LmcacheWorker(
            registration=message, seen_s=now_s, from_start=from_start
        )
        if known is not None:
            self._replace(known, worker)
        if not from_start:
            worker.wants_sync = "the controller has restarted"
        self._bind()
        return worker

    def _replace(self, before: LmcacheWorker, after: LmcacheWorker) -> None:
        """Replace a worker by one with the same name."""
        if (replica := self.followed(after.registration)) is not None:
            self._fleet.forget_lower(replica)
        # Two workers with one name must not be asked for their keys alternately.
        after.sync_requested_s = before.sync_requested_s
        old, new = _address(before.registration), _address(after.registration)
        if old != new:
            log.warning(
                "LMCache worker %s:%d is at %s:%d now, and was at %s:%d: two instances must not "
                "have one lmcache_instance_id",
                *(*after.registration.name, *new, *old),
            )

    def _check_name(self, instance_id: str) -> None:
        replica = self._fleet.replicas.get(instance_id)
        if replica is None or (replica.config.agent_url is None and replica.config.lmcache is None):
            return
        raise ConflictError(
            f"'{instance_id}' is a replica with an agent_url or an LMCache server, and LMCache "
            "inside vLLM claims that name: give it another lmcache_instance_id",
            code="name_taken",
        )

    def _bind(self, without: str | None = None) -> None:
        """Match replicas and the instances inside them, as they are now."""
        fleet = self._fleet.replicas.items()
        replicas = {name: each.config for name, each in fleet if name != without}
        hosts = {
            name: each.registration.ip
            for (name, number), each in self._workers.items()
            if number == LEADER
        }
        found, problems = match_replicas(replicas, hosts)
        for instance, replica in list(self._replica_of.items()):
            if found.get(instance) != replica:
                del self._replica_of[instance]
                self._fleet.tie_lmcache(replica, None)
        for instance in found.keys() - self._replica_of.keys():
            self._assign(instance, found[instance], problems)
        for each in set(problems.values()) - set(self.problems.values()):
            log.warning("%s", each)
        self.problems = problems

    def _assign(self, instance: str, replica: str, problems: dict[str, str]) -> None:
        config = self._config
        try:
            keys = LmcacheKeys.inside(
                config.chunk_size,
                config.pre_caching_hash_algorithm,
                self._fleet.replicas[replica].config.hash_seed,
            )
        except ValueError as error:
            problems[instance] = f"the keys of LMCache inside {replica} cannot be computed: {error}"
            return
        self._replica_of[instance] = replica
        self._fleet.tie_lmcache(replica, keys)
        self.key_check.restart(replica)
        leader = self._workers[instance, LEADER]
        if leader.has_reported:
            leader.wants_sync = "its replica was not clear"

    def _warn_unknown(self, message: FromWorker) -> None:
        self.counts["worker_unknown"] += 1
        if message.instance_id not in self._warned and len(self._warned) < MAX_WORKERS:
            self._warned.add(message.instance_id)
            log.warning(
                "LMCache worker %s:%d has not registered here: its messages are ignored until its "
                "next heartbeat or its restart; set lmcache_worker_heartbeat_time there",
                *message.name,
            )


def _address(message: RegisterMsg) -> tuple[str, int]:
    return message.ip, message.port


def match_replicas(
    replicas: Mapping[str, ReplicaConfig], instances: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the replica of each instance, and for other instances why they have none.

    ``instances`` has each instance's host. An instance's replica is the one whose ``instance_id``
    is its ``lmcache_instance_id``. Without that, it is the replica on the instance's host, if that
    host has one such replica and one such instance.
    """
    found = {each: each for each in instances if each in replicas}
    replicas_at: dict[str, list[str]] = {}
    for name, each in replicas.items():
        if name not in found and each.agent_url is None and each.lmcache is None:
            replicas_at.setdefault(_host(each.url), []).append(name)
    unnamed = {
        each: _host(f"http://{join_host_port(ip, 80)}")
        for each, ip in instances.items()
        if each not in found
    }
    problems = {}
    for instance, host in unnamed.items():
        here = replicas_at.get(host, [])
        others = [each for each, its in unnamed.items() if its == host and each != instance]
        if len(here) == 1 and not others:
            found[instance] = here[0]
        else:
            problems[instance] = _unclear(instance, instances[instance], here, others)
    return found, problems


def _host(url: str) -> str:
    return server_key(url)[1]


def _unclear(instance: str, ip: str, here: list[str], others: list[str]) -> str:
    if not here:
        why = f"no other replica's url names its host {ip}"
    elif others:
        why = f"{', '.join(others)} is at {ip} too"
    else:
        why = f"{', '.join(here)} are all at {ip}"
    return (
        f"the replica of LMCache instance '{instance}' is not clear: {why}; write "
        f"'instance_id: {instance}' at its replica"
    )
