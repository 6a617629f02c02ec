"""The router as LMCache's coordinator: registered servers, their events, and their replicas.

No I/O; times are passed in. Unknown, repeated and late event batches change nothing and are
counted.
"""

import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Any, Final

from router.fleet.fleet import Fleet
from router.index.lmcache_keys import LmcacheKeys
from router.index.prompt_keys import KvTier
from router.lmcache.coordinator_protocol import ObjectKey, ServerEventBatch, ServerRegistration
from router.lmcache.key_directory import (
    KeyDirectory,
    TierChange,
    backend_of,
    is_shared,
    owner_of,
)
from warmroute_common.addresses import join_host_port
from warmroute_common.api_errors import OverloadedError

log = logging.getLogger("warmroute.lmcache")

SILENCE_S: Final = 30.0
"""A server without a heartbeat for this long is forgotten; it sends one every 5 s."""
MAX_SERVERS: Final = 1024
DEFAULT_CHUNK_TOKENS: Final = 256
"""LMCache's default."""
_MAX_SHARED: Final = 64
"""Backends that several servers reach; further ones are ignored."""
_MAX_MODELS: Final = 64
"""Models remembered per server."""
_MAX_STORES: Final = 256
"""Models in shared backends that the index knows; further ones are ignored."""


@dataclass(frozen=True, kw_only=True)
class RegisteredServer:
    """A server that has registered."""

    instance_id: str
    registration: ServerRegistration
    registered_wall_s: float
    """Seconds since 1970."""
    seen_s: float

    @property
    def url(self) -> str:
        """Base URL of its HTTP API."""
        return f"http://{join_host_port(self.registration.ip, self.registration.http_port)}"

    def listing(self) -> dict[str, Any]:
        """Return its entry of LMCache's ``GET /instances``."""
        return {
            "instance_id": self.instance_id,
            "ip": self.registration.ip,
            "http_port": self.registration.http_port,
            "registration_time": self.registered_wall_s,
            "metadata": self.registration.metadata,
            "p2p_advertised_url": self.registration.p2p_advertised_url,
            "mq_port": self.registration.mq_port,
        }


class RegisteredServers:
    """The servers that have registered, at most `MAX_SERVERS`."""

    def __init__(self) -> None:
        self._servers: dict[str, RegisteredServer] = {}

    def __len__(self) -> int:
        return len(self._servers)

    def register(
        self, instance_id: str, registration: ServerRegistration, now_s: float, wall_s: float
    ) -> bool:
        """Add or replace a server; return whether it was known. Raises `OverloadedError`."""
        known = instance_id in self._servers
        if not known and len(self._servers) >= MAX_SERVERS:
            raise OverloadedError(f"the limit of {MAX_SERVERS} registered servers is reached")
        self._servers[instance_id] = RegisteredServer(
            instance_id=instance_id,
            registration=registration,
            registered_wall_s=wall_s,
            seen_s=now_s,
        )
        return known

    def heartbeat(self, instance_id: str, now_s: float) -> bool:
        """Record a heartbeat; return False if the server has to register first."""
        known = self._servers.get(instance_id)
        if known is not None:
            self._servers[instance_id] = replace(known, seen_s=now_s)
        return known is not None

    def forget(self, instance_id: str) -> None:
        self._servers.pop(instance_id, None)

    def silent(self, now_s: float) -> list[str]:
        """Return the ids of servers without a heartbeat for `SILENCE_S`."""
        servers = self._servers.values()
        return [each.instance_id for each in servers if now_s - each.seen_s > SILENCE_S]

    def get(self, instance_id: str) -> RegisteredServer | None:
        return self._servers.get(instance_id)

    def all(self) -> list[RegisteredServer]:
        return list(self._servers.values())


class BatchStatus(StrEnum):
    """What became of a batch; the values are LMCache's names in the answer to ``POST /events``."""

    APPLIED = "applied"
    DUPLICATE = "duplicates"
    STALE = "stale"
    """From an earlier process of the server."""


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """Where a batch stands in its server's stream."""

    status: BatchStatus
    restarted: bool = False
    """The server has restarted, with an empty L1."""
    gap: bool = False
    """Batches before this one were missed; they will not be sent again."""


@dataclass(slots=True)
class _Cursor:
    """The last batch that was taken from a server's stream."""

    incarnation: int
    seq: int = 0


class EventStreams:
    """How far each server's event stream was followed."""

    def __init__(self) -> None:
        self._cursors: dict[str, _Cursor] = {}

    def take(self, batch: ServerEventBatch) -> BatchOrder:
        """Return where a batch stands, and advance its stream."""
        cursor = self._cursors.get(batch.instance_id)
        restarted = cursor is not None and batch.incarnation > cursor.incarnation
        if cursor is not None and batch.incarnation < cursor.incarnation:
            return BatchOrder(BatchStatus.STALE)
        if cursor is None or restarted:
            cursor = self._cursors[batch.instance_id] = _Cursor(batch.incarnation)
        if batch.seq <= cursor.seq:
            return BatchOrder(BatchStatus.DUPLICATE)
        gap = batch.seq > cursor.seq + 1
        cursor.seq = batch.seq
        return BatchOrder(BatchStatus.APPLIED, restarted, gap)

    def forget(self, instance_id: str) -> None:
        """Start over with a server's stream: its next batch counts as the first one seen."""
        self._cursors.pop(instance_id, None)

    def is_followed(self, instance_id: str) -> bool:
        return instance_id in self._cursors

    def incarnation(self, instance_id: str) -> int:
        """Return a server's incarnation, 0 if it is not followed."""
        cursor = self._cursors.get(instance_id)
        return 0 if cursor is None else cursor.incarnation


@dataclass(eq=False, kw_only=True)
class LiveServer:
    """An LMCache server that answers."""

    url: str
    instance_id: str
    chunk_tokens: int
    world_sizes: dict[str, int] = field(default_factory=dict)
    """Number of ranks by model."""


class ReplicaServers:
    """Which server each replica uses; applies changes of a server's tiers to the fleet's index.

    A shared backend's keys of one model are in the index once, as those of a store that replicas
    read (`PrefixIndex.mount`): LMCache's keys do not cover the model.
    """

    def __init__(self, fleet: Fleet, directory: KeyDirectory) -> None:
        self._fleet = fleet
        self._directory = directory
        self._server_of: dict[str, LiveServer] = {}
        self._indexed_roots: dict[str, frozenset[str]] = {}
        """By replica: the model roots for which its server's keys are in the index."""
        self._mounts: dict[str, set[str]] = {}
        """By owner name of a shared backend: the ids of the servers that reach it."""
        self._stores: dict[tuple[str, str], int] = {}
        """The slots of stores, by owner and model."""

    def server_of(self, replica_id: str) -> LiveServer | None:
        """Return a replica's server; any id of the replica will do."""
        return self._server_of.get(self._name(replica_id))

    def assign(self, replica_id: str, server: LiveServer | None) -> None:
        """Set a replica's server, None if it has none that answers.

        Call it again when the replica may have other models: its index is rebuilt then.
        """
        name, roots = self._name(replica_id), self._fleet.replicas[replica_id].roots
        before = self._server_of.pop(name, None)
        if server is not None:
            self._server_of[name] = server
        if before is not server or (server is not None and self._indexed_roots[name] != roots):
            self._indexed_roots[name] = roots
            self._rebuild(name)

    def left(self, replica_id: str) -> None:
        """Forget a replica that is about to leave the fleet."""
        self.assign(replica_id, None)
        self._indexed_roots.pop(self._name(replica_id), None)

    def mounted(self, owner: str, instance_id: str) -> None:
        """Record that a server reaches a shared backend; ``owner`` is from `owner_of`."""
        if owner not in self._mounts and len(self._mounts) >= _MAX_SHARED:
            return
        mounting = self._mounts.setdefault(owner, set())
        if instance_id not in mounting:
            mounting.add(instance_id)
            self._mount()

    def shared_backends(self, instance_id: str) -> set[str]:
        """Return the names of the backends that a server shares with others."""
        return {backend_of(each) for each, by in self._mounts.items() if instance_id in by}

    def mounting(self, owner: str) -> str:
        """Return one of the servers that reach a shared backend, the first by name."""
        return min(self._mounts.get(owner, ()), default="")

    def server_ended(self, instance_id: str) -> None:
        """Forget which shared backends a server reached."""
        left = ((owner, by - {instance_id}) for owner, by in self._mounts.items())
        self._mounts = {owner: by for owner, by in left if by}
        self._mount()

    def apply(self, changes: Sequence[TierChange]) -> None:
        """Apply changes to the index of each replica whose server they concern."""
        touched = {each.owner for each in changes}
        for name, server in self._server_of.items():
            if server.instance_id in touched:
                self._index(name, (each for each in changes if each.owner == server.instance_id))
        in_stores: dict[int, list[TierChange]] = {}
        for each in changes:
            if is_shared(each.owner) and (store := self._store(each)) is not None:
                in_stores.setdefault(store, []).append(each)
        for store, changed in in_stores.items():
            for (_, stored), keys in _grouped(changed).items():
                self._fleet.change_store(store, keys, stored=stored)

    def learn_models(self, batch: ServerEventBatch) -> None:
        """Learn a server's models, and their KV bytes per token, from stored keys."""
        if batch.event_type != "store":
            return
        for name, server in self._server_of.items():
            if server.instance_id == batch.instance_id:
                for entry in batch.entries:
                    self._learn_model(name, server, entry.key.key(), entry.size_bytes)

    def model_of(self, replica_id: str) -> tuple[str, int] | None:
        """Return the server's name of a replica's model, and its world size, if known."""
        name = self._name(replica_id)
        server = self._server_of.get(name)
        if server is None:
            return None
        models = server.world_sizes.items()
        return next((each for each in models if self._serves(name, each[0])), None)

    # --- parts of the above

    def _name(self, replica_id: str) -> str:
        """Return a replica's configured name: its id may change, this does not."""
        return self._fleet.replicas[replica_id].config.name

    def _store(self, change: TierChange) -> int | None:
        """Return the slot of the store that holds a key, None if the index does not know it."""
        named = (change.owner, change.model)
        if named not in self._stores and change.stored and len(self._stores) < _MAX_STORES:
            self._stores[named] = self._fleet.add_store()
            self._mount()
        return self._stores.get(named)

    def _mount(self) -> None:
        """Tell the index which replicas read which store."""
        for (owner, model), store in self._stores.items():
            mounting = self._mounts.get(owner, ())
            servers = self._server_of.items()
            reading = [name for name, server in servers if server.instance_id in mounting]
            self._fleet.mount(store, [name for name in reading if self._serves(name, model)])

    def _serves(self, name: str, model: str) -> bool:
        roots = self._fleet.replicas[name].roots
        return not roots or model in roots

    def _learn_model(self, name: str, server: LiveServer, key: ObjectKey, nbytes: int) -> None:
        sizes = server.world_sizes
        if key.is_leading and self._serves(name, key.model_name) and len(sizes) < _MAX_MODELS:
            sizes[key.model_name] = max(1, key.world_size)
            if nbytes:
                per_token = nbytes * max(1, key.world_size) / server.chunk_tokens
                self._fleet.replicas[name].kv_bytes_per_token = per_token

    def _rebuild(self, name: str) -> None:
        server = self._server_of.get(name)
        keys = None if server is None else LmcacheKeys(chunk_tokens=server.chunk_tokens)
        self._fleet.tie_lmcache(name, keys)
        if server is not None:
            self._index(name, self._directory.held_by(server.instance_id))
        self._mount()

    def _index(self, name: str, changes: Iterable[TierChange]) -> None:
        served = (each for each in changes if self._serves(name, each.model))
        for (tier, stored), keys in _grouped(served).items():
            self._fleet.change_lower(name, tier, keys, stored=stored)


def _grouped(changes: Iterable[TierChange]) -> dict[tuple[KvTier, bool], list[int]]:
    """Return index keys by tier and by whether they were stored, stored ones first.

    A batch either stores a key or deletes it. Only the directory's own eviction removes what
    the same batch has stored; so removals come last.
    """
    found: dict[tuple[KvTier, bool], dict[int, None]] = {}
    for each in changes:
        found.setdefault((each.tier, each.stored), {})[each.key] = None
    in_order = sorted(found.items(), key=lambda one: not one[0][1])
    return {group: list(keys) for group, keys in in_order}


class Coordinator:
    """Everything that the router knows about stock LMCache servers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.servers = RegisteredServers()
        self.directory = KeyDirectory(fleet.index.max_keys)
        self.replica_servers = ReplicaServers(fleet, self.directory)
        self.chunk_tokens = DEFAULT_CHUNK_TOKENS
        """Chunk size of the servers that answer; LMCache wants one size per fleet."""
        self.counts: Counter[str] = Counter()
        """Batches by status, and other events and failures by name."""
        self._streams = EventStreams()
        self._expected: set[str] = set()
        self._missed_s: dict[str, float] = {}

    def register(
        self, registration: ServerRegistration, now_s: float, wall_s: float
    ) -> dict[str, Any]:
        """Register a server; return the answer of LMCache's coordinator."""
        instance_id = registration.instance_id.strip() or f"mp-{uuid.uuid4().hex}"
        known = self.servers.register(instance_id, registration, now_s, wall_s)
        log.info("LMCache server %s has registered from %s", instance_id, registration.ip)
        return {"instance_id": instance_id, "re_registered": known}

    def deregister(self, instance_id: str) -> None:
        """Forget a server that ends, and its L1. Its L2 stays known."""
        self.servers.forget(instance_id)
        self._streams.forget(instance_id)
        self._expected.discard(instance_id)
        self._missed_s.pop(instance_id, None)
        self.replica_servers.server_ended(instance_id)
        self.replica_servers.apply(self.directory.server_ended(instance_id))

    def expire(self, now_s: float) -> None:
        """Forget the servers whose heartbeats have stopped."""
        for instance_id in self.servers.silent(now_s):
            log.warning(
                "LMCache server %s has sent no heartbeat for %g s and is forgotten",
                instance_id,
                SILENCE_S,
            )
            self.counts["silent"] += 1
            self.deregister(instance_id)

    def expect(self, instance_id: str, now_s: float = 0.0) -> None:
        """Accept events of a server that answers but has not registered yet.

        After a restart of the router a server registers again with its next heartbeat, seconds
        later. Its earlier events are missed, unless the next batch is its first.
        """
        if len(self._expected) < MAX_SERVERS:
            self._expected.add(instance_id)
            if not self._streams.is_followed(instance_id):
                self._missed_s[instance_id] = now_s

    def lost(self, instance_id: str) -> None:
        """Record that a server has stopped answering: its L1 becomes uncertain."""
        self.counts["servers_lost"] += 1
        self.replica_servers.apply(self.directory.events_missed(instance_id))

    def apply(self, batches: list[ServerEventBatch], now_s: float = 0.0) -> dict[str, int]:
        """Apply batches in their order; return how many had which status."""
        found: Counter[str] = Counter({each.value: 0 for each in BatchStatus})
        self.directory.max_keys = self._fleet.index.max_keys
        for batch in batches:
            status = self._apply(batch, now_s)
            self.counts[status] += 1
            if status in found:
                found[status] += 1
        return dict(found)

    def refuted(self, replica_id: str, keys: list[ObjectKey]) -> None:
        """Record keys that a replica's server was asked for and lacks."""
        self.counts["missing"] += len(keys)
        server = self.replica_servers.server_of(replica_id)
        if server is not None:
            self.replica_servers.apply(self.directory.refute(server.instance_id, keys))

    def confirmed(self, instance_id: str, keys: list[ObjectKey]) -> None:
        """Record keys that a server was asked for and has in L1."""
        self.replica_servers.apply(self.directory.confirm(instance_id, keys))

    def placements(self, key: ObjectKey) -> list[dict[str, Any]]:
        """Return where a key's chunk is, as LMCache's coordinator answers it; sizes are not kept.

        One server is named for a shared backend.
        """
        found = []
        for owner, tier, backend in self.directory.placements(key):
            name = self.replica_servers.mounting(owner) if is_shared(owner) else owner
            found.append(
                {
                    "instance_id": name,
                    "incarnation": self._streams.incarnation(name),
                    "tier": tier,
                    "backend": backend,
                    "size_bytes": 0,
                    "shared": is_shared(owner),
                }
            )
        return sorted(found, key=lambda each: (each["instance_id"], each["tier"], each["backend"]))

    @property
    def last_missed_s(self) -> float:
        """When events of any server were last missed; minus infinity if never."""
        return max(self._missed_s.values(), default=-inf)

    def missed_s(self, instance_id: str) -> float:
        """Return when events of a server were last missed; minus infinity if never."""
        return self._missed_s.get(instance_id, -inf)

    def _apply(self, batch: ServerEventBatch, now_s: float) -> str:
        known = self.servers.get(batch.instance_id) is not None
        if not known and batch.instance_id not in self._expected:
            return "unknown"
        order = self._streams.take(batch)
        if order.status is not BatchStatus.APPLIED:
            return order.status.value
        if batch.seq == 1 and not order.restarted:
            self._missed_s.pop(batch.instance_id, None)
        if order.restarted:
            log.info("LMCache server %s has restarted", batch.instance_id)
            # Its last writes to L2 may not have been reported.
            self._missed_s[batch.instance_id] = now_s
            self.replica_servers.apply(self.directory.server_ended(batch.instance_id))
        elif order.gap:
            self.counts["gaps"] += 1
            self._missed_s[batch.instance_id] = now_s
            log.info("events of LMCache server %s were missed", batch.instance_id)
            self.replica_servers.apply(self.directory.events_missed(batch.instance_id))
        if batch.shared:
            self.replica_servers.mounted(owner_of(batch), batch.instance_id)
        self.replica_servers.apply(self.directory.apply(batch))
        if self.directory.evicted:
            if not self.counts["evicted"]:
                log.warning(
                    "the directory of LMCache's keys is full (%d keys): chunks that servers hold "
                    "are no longer matched; raise index.max_keys",
                    self.directory.max_keys,
                )
            self.counts["evicted"] = self.directory.evicted
        self.replica_servers.learn_models(batch)
        return BatchStatus.APPLIED.value
