"""Which replica uses which LMCache server; changes of that server's tiers are told to the fleet.

Pure state: the watching tells which servers answer, the coordinator what they hold.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from router.fleet import Fleet
from router.index import LmcacheKeys, Tier, lmcache_key64
from router.lmcache.coordinator.directory import Directory
from router.lmcache.coordinator.records import Change
from router.lmcache.wire import Batch, ObjectKey

log = logging.getLogger("warmroute.lmcache")

_MAX_SHARED: Final = 64
"""Backends that several servers reach; any others are passed over."""
_MAX_MODELS: Final = 64
"""Models of one server that are kept apart."""


@dataclass(eq=False, kw_only=True)
class Server:
    """An LMCache server that answers."""

    url: str
    instance_id: str
    chunk_tokens: int
    worlds: dict[str, int] = field(default_factory=dict)
    """By the models whose KV it keeps over how many ranks each is spread."""


class Ties:
    """The servers of the replicas; a change of theirs is told to the fleet at once."""

    def __init__(self, fleet: Fleet, directory: Directory) -> None:
        self._fleet = fleet
        self._directory = directory
        self._server_of: dict[str, Server] = {}
        self._told_roots: dict[str, frozenset[str]] = {}
        """By replica the roots of its models by which its server's keys were told of."""
        self._mounts: dict[str, set[str]] = {}

    def server_of(self, replica_id: str) -> Server | None:
        """Return a replica's server, by any id of the replica's."""
        return self._server_of.get(self._name(replica_id))

    def tie(self, replica_id: str, server: Server | None) -> None:
        """Note a replica's server, None where it has none that answers.

        To be called again where the replica may have other models.
        """
        name, roots = self._name(replica_id), self._fleet.replicas[replica_id].roots
        before = self._server_of.pop(name, None)
        if server is not None:
            self._server_of[name] = server
        if before is not server or (server is not None and self._told_roots[name] != roots):
            self._told_roots[name] = roots
            self._tell_all(name)

    def left(self, replica_id: str) -> None:
        """Forget a replica of the fleet, which is about to leave it."""
        self.tie(replica_id, None)
        self._told_roots.pop(self._name(replica_id), None)

    def mounted(self, owner: str, instance_id: str) -> None:
        """Note that a server reaches a shared backend; ``owner`` is `owner_of` it."""
        if owner not in self._mounts and len(self._mounts) >= _MAX_SHARED:
            return
        mounting = self._mounts.setdefault(owner, set())
        if instance_id not in mounting:
            mounting.add(instance_id)
            for name, server in list(self._server_of.items()):
                if server.instance_id == instance_id:
                    self._tell(name, self._held_by((owner,)))

    def mounted_by_all(self, owner: str) -> None:
        """Note that every replica's server reaches a shared backend."""
        for server in {id(each): each for each in self._server_of.values()}.values():
            self.mounted(owner, server.instance_id)

    def forget(self, instance_id: str) -> None:
        """Forget which shared backends a server reaches: it has ended."""
        left = ((owner, by - {instance_id}) for owner, by in self._mounts.items())
        self._mounts = {owner: by for owner, by in left if by}

    def note(self, batch: Batch, changes: Sequence[Change]) -> None:
        """Tell the fleet a batch's changes, and learn of the models in it."""
        self.tell(changes)
        if batch.event_type != "store":
            return
        for name, server in self._server_of.items():
            if server.instance_id == batch.instance_id:
                for entry in batch.entries:
                    self._learn(name, server, entry.key.key(), entry.size_bytes)

    def tell(self, changes: Sequence[Change]) -> None:
        """Tell the fleet the changes at its replicas' servers."""
        touched = {each.owner for each in changes}
        for name, server in self._server_of.items():
            if owners := touched & self._owners(server):
                self._tell(name, (each for each in changes if each.owner in owners))

    def model_of(self, replica_id: str) -> tuple[str, int] | None:
        """Return the name by which a replica's server knows its model, and its world size."""
        name = self._name(replica_id)
        server = self._server_of.get(name)
        if server is None:
            return None
        worlds = server.worlds.items()
        return next((each for each in worlds if self._accepts(name, each[0])), None)

    # --- parts of the above

    def _name(self, replica_id: str) -> str:
        """Return the configured name of a replica: the one that never changes."""
        return self._fleet.replicas[replica_id].config.name

    def _owners(self, server: Server) -> set[str]:
        mounted = {each for each, by in self._mounts.items() if server.instance_id in by}
        return {server.instance_id, *mounted}

    def _accepts(self, name: str, model: str) -> bool:
        roots = self._fleet.replicas[name].roots
        return not roots or model in roots

    def _learn(self, name: str, server: Server, key: ObjectKey, size_bytes: int) -> None:
        if key.leads and self._accepts(name, key.model_name) and len(server.worlds) < _MAX_MODELS:
            server.worlds[key.model_name] = max(1, key.world_size)
            if size_bytes:
                per_token = size_bytes * max(1, key.world_size) / server.chunk_tokens
                self._fleet.replicas[name].kv_bytes_per_token = per_token

    def _tell_all(self, name: str) -> None:
        server = self._server_of.get(name)
        keys = None if server is None else LmcacheKeys(chunk_tokens=server.chunk_tokens)
        self._fleet.tie_lmcache(name, keys)
        if server is not None:
            self._tell(name, self._held_by(self._owners(server)))

    def _held_by(self, owners: Iterable[str]) -> Iterator[Change]:
        for owner in owners:
            for key, tiers in self._directory.held_by(owner):
                yield from (Change(owner, tier, True, key) for tier in tiers)

    def _tell(self, name: str, changes: Iterable[Change]) -> None:
        for (tier, stored), keys in self._grouped(name, changes).items():
            self._fleet.change_lower(name, tier, list(keys), stored=stored)

    def _grouped(
        self, name: str, changes: Iterable[Change]
    ) -> dict[tuple[Tier, bool], dict[int, None]]:
        """Return index keys by tier and whether they were stored.

        One batch stores a key or deletes it, never both; only an eviction may take away
        what the same batch has stored, and comes after it.
        """
        found: dict[tuple[Tier, bool], dict[int, None]] = {}
        for each in changes:
            key = each.key
            if key.leads and self._accepts(name, key.model_name):
                number = lmcache_key64(key.chunk_hash, key.cache_salt)
                found.setdefault((each.tier, each.stored), {})[number] = None
        return dict(sorted(found.items(), key=lambda one: not one[0][1]))
