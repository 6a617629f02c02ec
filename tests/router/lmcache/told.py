"""What LMCache's servers say, made by hand or taken from a real one (``transcript.jsonl``)."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from router.config.settings import ReplicaConfig, RouterConfig
from router.fleet.fleet import Fleet
from router.index.lmcache_keys import lmcache_chain
from router.lmcache.coordinator.state import Coordinator
from router.lmcache.ties import Server
from router.lmcache.wire import Batch, ObjectKey, RegisterCall, rank_of_world

TRANSCRIPT = Path(__file__).with_name("transcript.jsonl")
"""lmcache 0.5.6 with L1 and a disk: a prompt stored and used, L1 cleared, then prefetched.

Of each batch the entries of the prompt's first two chunks are left.
"""
MODEL = "models/small"
CHUNK = 256


def transcript_tokens() -> list[int]:
    """Return the prompt that the transcript tells of."""
    random = Random(1)
    return [random.randrange(10, 4000) for _ in range(2000)]


def transcript() -> list[dict[str, Any]]:
    return [json.loads(line) for line in TRANSCRIPT.read_text().splitlines()]


def told_batches() -> list[Batch]:
    """Return the transcript's batches, in their order."""
    return [
        msgspec.convert(batch, Batch)
        for each in transcript()
        if each["path"] == "/events"
        for batch in each["body"]["batches"]
    ]


def key(number: int, *, model: str = MODEL, rank: int = 0, world: int = 1, salt: str = "") -> Any:
    """Return the key of one of the chunks of ``range(...)``, the prompt of most tests."""
    digest = chain(number + 1)[number]
    return ObjectKey(digest, model, rank_of_world(world, rank), 0, salt)


def chain(chunks: int) -> list[bytes]:
    return lmcache_chain(range(chunks * CHUNK), CHUNK)


def batch(
    seq: int,
    event_type: str = "store",
    tier: str = "l1",
    keys: Sequence[ObjectKey] = (),
    **changes: Any,
) -> Batch:
    """Return a batch of the server ``mp0``."""
    values: dict[str, Any] = {
        "instance_id": "mp0",
        "incarnation": 100,
        "seq": seq,
        "event_type": event_type,
        "tier": tier,
        "backend": {"l1": "dram", "l2": "fs_native"}[tier],
        "entries": [
            {"key": each.encoded(), "size_bytes": 1000 if event_type == "store" else 0}
            for each in keys
        ],
    }
    return msgspec.convert(values | changes, Batch)


def make_fleet(count: int = 2, **changes: Any) -> Fleet:
    """Return a fleet of replicas r0, r1, ... that are up, each with an LMCache by its URL."""
    replicas = tuple(
        ReplicaConfig(
            url=f"http://host{number}:8000",
            instance_id=f"r{number}",
            **({"lmcache": f"http://host{number}:8210"} | changes),
        )
        for number in range(count)
    )
    fleet = Fleet(RouterConfig(replicas=replicas))
    for name in fleet.replicas:
        fleet.up(name)
    return fleet


def register(
    coordinator: Coordinator, name: str = "mp0", ip: str = "host0", port: int = 8210
) -> None:
    call = RegisterCall(ip=ip, http_port=port, instance_id=name)
    coordinator.register(call, now_s=0.0, wall_s=0.0)


def tied(fleet: Fleet | None = None, **names: str) -> Coordinator:
    """Return a coordinator whose servers are registered and tied: replica=server, ..."""
    coordinator = Coordinator(fleet or make_fleet())
    for replica, server in (names or {"r0": "mp0"}).items():
        register(coordinator, server)
        coordinator.ties.tie(
            replica, Server(url="http://host0:8210", instance_id=server, chunk_tokens=CHUNK)
        )
    return coordinator
