"""What agents, KV events and LMCache's workers tell: odd messages are errors that are foreseen."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import aiohttp
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.agent_client import AgentClient, AgentError
from router.config.settings import ReplicaConfig, RouterConfig
from router.fleet.fleet import Fleet
from router.index.kv_events import KvEventFormatError, KvEventReader
from tests.fuzz.bodies import nearly_bytes
from tests.fuzz.json_text import ODD, TEXT, Pairs, nearly
from tests.fuzz.odd_replica import ANSWERS, WELL, Odd, answer
from warmroute_common.agent_protocol import EventBatch, KeyEvent, Snapshot

INFO: Final = {
    "instance_id": "odd",
    "model": "sim",
    "hash_algorithm": "sha256",
    "hash_seed": "x",
    "block_tokens": 16,
    "chunk_tokens": 256,
    "chunk_bytes": 1000,
    "kv_events_port": None,
    "kv_replay_port": None,
    "transfer_port": 5,
    "incarnation": "1",
    "tiers": {
        "cpu": {"capacity_bytes": 5, "used_bytes": 4, "read_bytes_per_s": 1.0},
        "disk": {"capacity_bytes": 5, "used_bytes": 4, "write_bytes_per_s": 1.0},
    },
    "layout": "x",
    "version": "1",
}
KEYS: Final = b"\0\0\0\0\0\0\0\1" * 3
SNAPSHOT: Final = msgspec.msgpack.encode(
    Snapshot(incarnation="1", seq=3, tiers={"cpu": KEYS, "disk": KEYS[:8]})
)
BATCH: Final = msgspec.msgpack.encode(
    EventBatch(
        incarnation="1",
        seq=4,
        events=[KeyEvent("cpu", True, KEYS), KeyEvent("remote", False, KEYS[:8])],
    )
)


def fleet() -> tuple[Fleet, str]:
    """Return a fleet of one replica, and its name."""
    config = RouterConfig(replicas=(ReplicaConfig(url="http://odd", agent_url="http://agent"),))
    made = Fleet(config)
    return made, next(iter(made.replicas))


# --- agents


@pytest.fixture(scope="module")
def agent() -> Iterator[Odd]:
    made = Odd()
    yield made
    made.close()


class Told(AgentClient):
    """Calls to an agent whose answers are here."""

    def __init__(self, says: Mapping[str, bytes]) -> None:
        self.base_url = "http://odd"
        self._says = says

    async def _call(self, path: str, *_: object, **__: object) -> bytes:
        return self._says[path]


async def _all_calls(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        await _tell(AgentClient(session, url))


async def _tell(client: AgentClient) -> None:
    """Tell a fleet what an agent says, with what `router.feeds` foresees."""
    found, name = fleet()
    with suppress(AgentError):
        found.apply_info(name, await client.info())
    name = next(iter(found.replicas))
    with suppress(AgentError, ValueError):
        found.apply_snapshot(name, await client.snapshot())
    with suppress(AgentError, ValueError):
        found.apply_events(name, await client.events(3, "1", 0.0))
    with suppress(AgentError):
        await client.prefetch([b"x" * 32], wait_s=0.0, pin_s=1.0)
    found.index.check()


INFOS: Final = st.one_of(nearly([INFO]).map(answer), ANSWERS)
SNAPSHOTS: Final = st.one_of(nearly_bytes(SNAPSHOT).map(answer), ANSWERS)
BATCHES: Final = st.one_of(nearly_bytes(BATCH).map(answer), ANSWERS)


@given(info=INFOS, snapshot=SNAPSHOTS, batch=BATCHES, prefetched=ANSWERS)
@example(info=answer(b"[" * 10_000), snapshot=answer(b"\x91" * 10_000), batch=WELL, prefetched=WELL)
def test_agents_that_answer_oddly(
    agent: Odd, info: bytes, snapshot: bytes, batch: bytes, prefetched: bytes
) -> None:
    agent.says = {
        "/info": info,
        "/snapshot": snapshot,
        "/events": batch,
        "/prefetch": prefetched,
    }
    asyncio.run(_all_calls(agent.url))


@given(info=nearly([INFO]), snapshot=nearly_bytes(SNAPSHOT), batch=nearly_bytes(BATCH))
@example(info=json.dumps(INFO | {"block_tokens": 0}).encode(), snapshot=SNAPSHOT, batch=BATCH)
@example(info=json.dumps(INFO | {"chunk_tokens": -1}).encode(), snapshot=SNAPSHOT, batch=BATCH)
@example(info=json.dumps(INFO | {"chunk_bytes": 10**30}).encode(), snapshot=SNAPSHOT, batch=BATCH)
def test_what_an_agent_tells_of_itself(info: bytes, snapshot: bytes, batch: bytes) -> None:
    told = {"/info": info, "/snapshot": snapshot, "/events": batch, "/prefetch": b"{}"}
    asyncio.run(_tell(Told(told)))


# --- KV events


STORED: Final = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [*range(32)],
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}


def _plain(value: Any) -> Any:
    """Return a value of `ODD` as msgpack can have it; of what it cannot, nothing."""
    match value:
        case Pairs(pairs):
            return {_plain(key): _plain(each) for key, each in pairs}
        case list():
            return [_plain(each) for each in value]
        case str():
            return value.encode(errors="replace").decode()
        case int() if -(2**63) <= value < 2**64:
            return value
        case float() | None:
            return value
    return None


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """Return a message's payload: valid events with fields made odd, or odd bytes."""
    event = dict(STORED)
    for _ in range(draw(st.integers(0, 3))):
        event[draw(st.sampled_from([*STORED][1:]))] = _plain(draw(ODD))
    tokens = st.lists(st.integers(-(2**63), 2**64 - 1), min_size=32, max_size=32)
    if draw(st.integers(0, 3)) == 0:
        event["token_ids"] = draw(tokens)
    medium = _plain(draw(TEXT))
    removed = {"type": "BlockRemoved", "block_hashes": [1, b"xx", -1], "medium": medium}
    is_array = draw(st.booleans())
    events: list[Any] = [[*event.values()]] if is_array else [event, removed]
    ts = draw(st.sampled_from([0.0, -1.0, float("nan"), float("inf"), 5]))
    encoded = msgspec.msgpack.encode([ts, events, 0])
    return draw(st.one_of(st.just(encoded), nearly_bytes(encoded)))


@given(messages=st.lists(payloads(), min_size=1, max_size=4))
@example(messages=[b"\x91" * 10_000])
@example(messages=[b"\x93\xcb" + b"\0" * 8 + b"\x91" + b"\x91" * 10_000 + b"\x00\x00"])
@example(messages=[b"\x93\xcb" + b"\0" * 8 + b"\x91\xd9\x02\xff\xfe\x00"])
def test_kv_events(messages: list[bytes]) -> None:
    found, name = fleet()
    reader = KvEventReader()
    found.following_kv(name)
    for number, payload in enumerate(messages):
        try:
            batch = reader.read(number, payload)
        except KvEventFormatError:
            continue
        found.apply_kv(name, batch, 1.0)
    found.index.check()
