"""A Redis or Valkey cluster as a remote store: its nodes share the chunks by hash slot.

valkey-py reads which node has which slot. Each node is a `RedisStore` of its own.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import valkey.exceptions
from valkey.cluster import ClusterNode, NodesManager
from valkey.crc import VALKEY_CLUSTER_HASH_SLOTS, key_slot

from cacheengine.tiers.redis_store import RedisServer, RedisStore
from cacheengine.tiers.remote import OutageLog
from cacheengine.tiers.remote_url import Address
from cacheengine.tiers.store import (
    Blob,
    BlobStore,
    Deadline,
    ReadTarget,
    ServerBackoff,
    StoreError,
    StoreFullError,
    StorePausedError,
)
from warmroute_common.addresses import join_host_port

S = TypeVar("S")
T = TypeVar("T")
Slots = Mapping[int, Address]
"""For each hash slot the node that takes its writes."""


def open_redis(server: RedisServer) -> BlobStore:
    """Return a store of the server or cluster, without connecting yet."""
    return RedisClusterStore(server) if server.is_cluster else RedisStore(server)


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    store: RedisStore
    log: OutageLog


class RedisClusterStore(BlobStore):
    """Blobs spread over the nodes of a cluster. A call is one batch for each node that it needs.

    While some nodes fail, their blobs count as missing, or as not stored. A call raises
    `StoreError` if every node that it needs fails. After any failure the slots are read again.
    The nodes of a call are called one after the other.
    """

    def __init__(
        self,
        server: RedisServer,
        *,
        make_backoff: Callable[[], ServerBackoff] = ServerBackoff,
    ) -> None:
        """Does not connect yet."""
        self._server = server
        self._make_backoff = make_backoff
        self._lock = threading.Lock()
        self._slots_lock = threading.Lock()
        self._slots_backoff = make_backoff()
        self._slots: Slots = {}
        self._slots_are_old = True
        self._nodes: dict[Address, _Node] = {}
        self._closed = False

    def exists(self, names: Sequence[str]) -> list[bool]:
        return self._spread(names, names, False, RedisStore.exists)

    def get_many(self, targets: Sequence[ReadTarget]) -> list[int | None]:
        names = [target.name for target in targets]
        return self._spread(names, targets, None, RedisStore.get_many)

    def put_many(self, blobs: Sequence[Blob]) -> list[bool]:
        return self._spread([blob.name for blob in blobs], blobs, False, RedisStore.put_many)

    def remove(self, names: Sequence[str]) -> None:
        def remove(node: RedisStore, own: Sequence[str]) -> list[None]:
            node.remove(own)
            return [None] * len(own)

        self._spread(names, names, None, remove)

    def remove_all(self, prefix: str) -> int:
        slots = self._current_slots()
        with self._lock:
            nodes = {self._node(address) for address in {*slots.values()}}
        removed = sum([node.store.remove_all(prefix) for node in nodes])
        if len(slots) < VALKEY_CLUSTER_HASH_SLOTS:
            raise StoreError("is part of a cluster of which nodes are missing")
        return removed

    def close(self) -> None:
        with self._lock:
            self._closed = True
            nodes = list(self._nodes.values())
        for node in nodes:
            node.store.close()

    def _spread(
        self,
        names: Sequence[str],
        items: Sequence[S],
        otherwise: T,
        call: Callable[[RedisStore, Sequence[S]], Sequence[T]],
    ) -> list[T]:
        """Call each node with the items of these names that are its; return the answers."""
        answers = [otherwise] * len(names)
        errors: list[StoreError] = []
        by_node = self._by_node(names)
        for node, own in by_node.items():
            try:
                found = call(node.store, [items[position] for position in own])
            except StoreFullError as error:
                errors.append(error)
                node.log.refused(error)
                continue
            except StoreError as error:
                errors.append(error)
                node.log.failed(error)
                if not isinstance(error, StorePausedError):
                    self._slots_are_old = True
                continue
            node.log.answered()
            for position, answer in zip(own, found, strict=True):
                answers[position] = answer
        if errors and len(errors) == len(by_node):
            raise errors[0]
        return answers

    def _by_node(self, names: Sequence[str]) -> dict[_Node, list[int]]:
        if not names:
            return {}
        slots = self._current_slots()
        found: dict[_Node, list[int]] = {}
        with self._lock:
            if self._closed:
                raise StoreError("closed")
            for position, name in enumerate(names):
                address = slots.get(key_slot(name.encode()))
                if address is None:
                    raise StoreError("is part of a cluster of which nodes are missing")
                found.setdefault(self._node(address), []).append(position)
        return found

    def _node(self, address: Address) -> _Node:
        node = self._nodes.get(address)
        if node is None:
            host, port = address
            server = replace(self._server, host=host, port=port, more_hosts=(), is_cluster=False)
            store = RedisStore(server, backoff=self._make_backoff())
            node = _Node(store, OutageLog(f"redis://{join_host_port(host, port)}"))
            self._nodes[address] = node
        return node

    def _current_slots(self) -> Slots:
        """Return the slots. Old ones are read again, except during a pause after a failure."""
        if self._slots and not self._slots_are_old:
            return self._slots
        with self._slots_lock:  # one thread reads, and the others use what it has read
            if not self._slots or self._slots_are_old:
                self._read_slots()
            return self._slots

    def _read_slots(self) -> None:
        """Read the slots; raise `StoreError` if that fails without old ones to use."""
        rest_s = self._slots_backoff.admit()
        if rest_s and not self._slots:
            raise StorePausedError(f"failed a short time ago; tried again in {rest_s:.1f} s")
        if rest_s:
            return
        began_s = self._slots_backoff.now_s()
        # Before they are read: a node that fails from now on makes the new ones old again.
        self._slots_are_old = False
        try:
            self._slots = slots_of(self._server)
        except StoreError:
            self._slots_are_old = True
            self._slots_backoff.failed(began_s)
            if not self._slots:
                raise
        else:
            self._slots_backoff.succeeded()


def slots_of(server: RedisServer) -> Slots:
    """Ask the nodes that the URL names, one after the other, for the slots of the cluster."""
    deadline = Deadline(server.connect_timeout_s)
    nodes = [
        ClusterNode(host, port)  # type: ignore[no-untyped-call]
        for host, port in server.addresses
    ]
    share_s = deadline.left_s() / len(nodes)
    try:
        manager = NodesManager(
            nodes,
            dynamic_startup_nodes=False,
            username=server.user or None,
            password=server.password or None,
            socket_timeout=share_s,
            socket_connect_timeout=share_s,
        )
        slots = {slot: (own[0].host, own[0].port) for slot, own in manager.slots_cache.items()}
        nodes += manager.nodes_cache.values()
        return slots
    except (valkey.exceptions.ValkeyError, valkey.exceptions.ValkeyClusterException):
        raise StoreError(
            "none of the nodes answers with the slots of a cluster: check that one is up, that it "
            "is in cluster mode, and that it accepts the user and the password"
        ) from None
    finally:
        for node in nodes:
            if node.valkey_connection is not None:
                node.valkey_connection.close()
