"""The agent over HTTP, on a real engine with a real disk tier."""

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from cacheengine.agent import agent_requests as answers
from cacheengine.agent.agent import Agent
from cacheengine.identity.kv_versions import KvVersions
from cacheengine.record import EngineStats, TierStats, TransferStats
from cacheengine.settings.engine_config import EngineConfig
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import CHUNK_BYTES, Bench, config, keys, layout, wait_until
from tests.cacheengine.scripted_tier import ScriptedRemote
from warmroute_common import agent_protocol as wire
from warmroute_common.agent_protocol import ReplicaIdentity
from warmroute_common.keys import HashScheme, chunk_keys, key64, prompt_extra_keys

IDENTITY = ReplicaIdentity(
    instance_id="replica-1",
    model="some/model",
    hash_algorithm="sha256",
    hash_seed="seed",
    block_tokens=16,
    chunk_tokens=256,
    chunk_bytes=CHUNK_BYTES,
    kv_events_port=5557,
    kv_replay_port=5558,
    transfer_port=8004,
)
TOKENS = list(range(1000))
CHAIN = HashScheme("sha256", "seed").chain(TOKENS, 16)
CHUNKS = chunk_keys(CHAIN, 16)


class Rig:
    """An engine, its agent, and a client."""

    def __init__(self, bench: Bench, session: aiohttp.ClientSession, base: str) -> None:
        self.bench = bench
        self.session = session
        self.base = base

    async def get(self, path: str, status: int = 200) -> bytes:
        async with self.session.get(self.base + path) as response:
            body = await response.read()
            assert response.status == status, body
            return body

    async def post(self, path: str, body: Any, status: int = 200) -> Any:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.base + path, data=data, headers=headers) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def snapshot(self) -> wire.Snapshot:
        return msgspec.msgpack.decode(await self.get("/snapshot"), type=wire.Snapshot)

    async def events(self, query: str) -> wire.EventBatch:
        return msgspec.msgpack.decode(await self.get(f"/events?{query}"), type=wire.EventBatch)


@asynccontextmanager
async def open_rig(bench: Bench) -> AsyncIterator[Rig]:
    """Serve an engine."""
    agent = Agent(bench.engine, IDENTITY, EngineConfig(lmcache_worker_port=0))
    await asyncio.to_thread(agent.start)
    assert agent.address is not None
    host, port = agent.address
    async with aiohttp.ClientSession() as session:
        yield Rig(bench, session, f"http://{host}:{port}")
    await asyncio.to_thread(agent.stop)


@pytest.fixture
async def rig(tmp_path: Path, make_bench: MakeBench) -> AsyncIterator[Rig]:
    async with open_rig(make_bench(8, config(tmp_path))) as opened:
        yield opened


async def test_info_says_who_and_how_keys_are_made(rig: Rig) -> None:
    info = msgspec.json.decode(await rig.get("/info"), type=wire.InstanceInfo)
    assert info.instance_id == "replica-1"
    assert info.incarnation == rig.bench.engine.incarnation
    assert (info.hash_algorithm, info.hash_seed) == ("sha256", "seed")
    assert (info.block_tokens, info.chunk_tokens, info.chunk_bytes) == (16, 256, CHUNK_BYTES)
    assert (info.kv_events_port, info.kv_replay_port) == (5557, 5558)
    assert info.tiers["cpu"].capacity_bytes == 8 * CHUNK_BYTES
    assert info.tiers["disk"].capacity_bytes > 0
    assert (info.transfer_port, info.layout) == (8004, layout().fingerprint())


async def test_an_adapters_chunks_are_those_of_its_files(rig: Rig, tmp_path: Path) -> None:
    lora = ("name", str(tmp_path / "adapter"))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    every, first = prompt_extra_keys(lora=lora)
    chain = HashScheme("sha256", "seed").chain(TOKENS, 16, extra_keys=every, first_extra_keys=first)
    vllms = chunk_keys(chain, 16)
    version = KvVersions().of_name(lora)
    rig.bench.store([version.stored_key(key) for key in vllms])
    rig.bench.finish_puts()
    rig.bench.engine.clear(["cpu"])
    named = {"keys": [key.hex() for key in vllms], "lora": lora}
    reply = await rig.post("/prefetch", {**named, "wait_s": 10})
    assert reply["promoted"] == len(vllms) == 3
    assert (await rig.post("/lookup", named))["matched_tokens"] == 768
    tokens = {"tokens": TOKENS, "lora": lora}
    assert (await rig.post("/lookup", tokens))["matched_tokens"] == 768
    stored = {"keys": [version.stored_key(key).hex() for key in vllms], "keys_are_stored": True}
    assert (await rig.post("/lookup", stored))["matched_tokens"] == 768
    assert (await rig.post("/lookup", {"keys": named["keys"]}))["matched_tokens"] == 0
    (tmp_path / "adapter" / "adapter_config.json").write_text("{ }")
    for replaced in (named, tokens):
        assert (await rig.post("/lookup", replaced))["matched_tokens"] == 0


async def test_lookup_by_tokens_and_by_keys_tells_the_tiers(rig: Rig) -> None:
    rig.bench.store(CHUNKS)
    rig.bench.finish_puts()
    rig.bench.engine.clear(["cpu"])
    rig.bench.promote(CHUNKS[:1])
    expected = {
        "matched_tokens": 768,
        "tokens_by_tier": {"cpu": 256, "disk": 512},
        "tiers": ["cpu", "disk", "disk"],
    }
    assert await rig.post("/lookup", {"tokens": TOKENS}) == expected
    assert await rig.post("/lookup", {"keys": [chunk.hex() for chunk in CHUNKS]}) == expected
    salted = await rig.post("/lookup", {"tokens": TOKENS, "cache_salt": "other tenant"})
    assert salted["matched_tokens"] == 0


async def test_a_long_prompt_is_hashed_while_other_calls_are_answered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, hashed = threading.Event(), threading.Event(), HashScheme.chain

    def chain(*args: Any, **options: Any) -> list[bytes]:
        begun.set()
        assert may_end.wait(20)
        return hashed(*args, **options)

    monkeypatch.setattr(HashScheme, "chain", chain)
    asked = asyncio.create_task(rig.post("/lookup", {"tokens": TOKENS}))
    assert await asyncio.to_thread(begun.wait, 20)
    await rig.get("/health")
    may_end.set()
    assert (await asked)["matched_tokens"] == 0


async def test_lookup_in_one_tier_counts_that_alone(rig: Rig) -> None:
    rig.bench.store(CHUNKS)
    rig.bench.finish_puts()
    rig.bench.engine.clear(["cpu"])
    rig.bench.promote(CHUNKS[:1])
    for tier, tokens in (("cpu", 256), ("disk", 768), ("remote", 0)):
        reply = await rig.post("/lookup", {"tokens": TOKENS, "tier": tier})
        assert reply["matched_tokens"] == tokens
        assert reply["tiers"] == [tier] * (tokens // 256)


async def test_pin_keeps_a_prefix_until_unpin(rig: Rig) -> None:
    rig.bench.store(CHUNKS)
    assert await rig.post("/pin", {"tokens": TOKENS}) == {"num_tokens": 768}
    rig.bench.finish_puts()
    assert len(rig.bench.store(keys(*range(10, 18))) or ()) == 5
    assert rig.bench.has_right_bytes(CHUNKS)
    by_keys = {"keys": [chunk.hex() for chunk in CHUNKS]}
    assert await rig.post("/unpin", by_keys) == {"num_tokens": 768}
    rig.bench.finish_puts()
    assert len(rig.bench.store(keys(*range(20, 28))) or ()) == 8


async def test_pin_on_disk_and_where_nothing_is(rig: Rig) -> None:
    rig.bench.store(CHUNKS)
    rig.bench.finish_puts()
    assert await rig.post("/pin", {"tokens": TOKENS, "tier": "disk"}) == {"num_tokens": 768}
    assert await rig.post("/pin", {"tokens": TOKENS, "tier": "remote"}) == {"num_tokens": 0}
    assert await rig.post("/pin", {"tokens": [1] * 600}) == {"num_tokens": 0}


async def test_prefetch_promotes_while_no_model_steps(rig: Rig) -> None:
    rig.bench.store(CHUNKS)
    rig.bench.finish_puts()
    rig.bench.engine.clear(["cpu"])
    asked = {"keys": [chunk.hex() for chunk in [*CHUNKS, *keys(99)]], "wait_s": 20.0}
    assert await rig.post("/prefetch", asked) == {
        "resident": 0,
        "promoted": 3,
        "pending": 0,
        "missing": 1,
        "promoted_bytes": 3 * CHUNK_BYTES,
    }
    assert rig.bench.has_right_bytes(CHUNKS)
    again = await rig.post("/prefetch", asked)
    assert (again["resident"], again["promoted"]) == (3, 0)


async def test_snapshot_then_events_tell_everything(rig: Rig) -> None:
    rig.bench.store(keys(1, 2))
    rig.bench.finish_puts()
    snapshot = await rig.snapshot()
    both = {key64(chunk) for chunk in keys(1, 2)}
    assert set(wire.unpack_keys(snapshot.tiers["cpu"])) == both
    assert set(wire.unpack_keys(snapshot.tiers["disk"])) == both

    rig.bench.engine.clear(["cpu"])
    batch = await rig.events(f"after={snapshot.seq}&incarnation={snapshot.incarnation}")
    assert batch.seq > snapshot.seq
    (event,) = batch.events
    assert (event.tier, event.stored) == ("cpu", False)
    assert set(wire.unpack_keys(event.keys)) == both


async def test_events_wait_for_news(rig: Rig) -> None:
    waiting = asyncio.create_task(rig.events("after=0&wait_s=20"))
    # The call has reached the agent when its listener is there.
    await asyncio.to_thread(wait_until, lambda: len(rig.bench.engine._lock.listeners) == 1)
    await asyncio.to_thread(rig.bench.store, keys(1))
    batch = await waiting
    assert batch.events[0].tier == "cpu"
    assert batch.events[0].stored
    assert len(rig.bench.engine._lock.listeners) == 0


async def test_no_news_is_an_empty_batch(rig: Rig) -> None:
    batch = await rig.events("after=0")
    assert (batch.seq, batch.events) == (0, [])


@pytest.mark.parametrize("query", ["after=7", "after=0&incarnation=another"])
async def test_a_gap_asks_for_a_new_snapshot(rig: Rig, query: str) -> None:
    assert b"take a new /snapshot" in await rig.get(f"/events?{query}", status=410)


async def test_clear_drops_the_tiers_named(rig: Rig) -> None:
    rig.bench.store(keys(1, 2))
    rig.bench.finish_puts()
    assert await rig.post("/clear", {"tiers": ["cpu"]}) == {"dropped": {"cpu": 2}}
    assert await rig.post("/clear", {}) == {"dropped": {"cpu": 0, "disk": 2}}


async def test_clear_drops_what_others_stored_in_the_remote_tier(make_bench: MakeBench) -> None:
    remote = ScriptedRemote(dict.fromkeys([*CHUNKS[:3], *keys(9)], b""))
    async with open_rig(make_bench(8, remote=remote)) as rig:
        cleared = await rig.post("/clear", {"tokens": TOKENS[:512], "tiers": ["remote"]})
        assert cleared == {"dropped": {"remote": 2}}
        remote.answers = False
        cleared = await rig.post("/clear", {"tiers": ["remote"]})
        assert cleared == {"dropped": {"remote": 0}, "not_cleared": ["remote"]}
        remote.answers = True
        cleared = await rig.post("/clear", {})
        assert cleared["dropped"]["remote"] == 2


async def test_clear_drops_only_what_is_named(rig: Rig) -> None:
    rig.bench.store([*CHUNKS, *keys(1)])
    rig.bench.finish_puts()
    assert await rig.post("/clear", {"tokens": TOKENS[:512], "tiers": ["cpu"]}) == {
        "dropped": {"cpu": 2}
    }
    assert await rig.post("/clear", {"keys": [CHUNKS[2].hex()]}) == {
        "dropped": {"cpu": 1, "disk": 1}
    }
    # An empty list names nothing; it does not mean all.
    assert await rig.post("/clear", {"tokens": []}) == {"dropped": {"cpu": 0, "disk": 0}}
    assert rig.bench.engine.match([*CHUNKS[:2], *keys(1)]) == ["disk", "disk", "cpu"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/lookup", b"{", "the body is not a LookupRequest"),
        ("/lookup", {}, "give either 'tokens' or 'keys'"),
        ("/lookup", {"tokens": [1], "keys": ["aa"]}, "give either 'tokens' or 'keys'"),
        ("/prefetch", {"keys": ["zz"]}, "digests in hex"),
        ("/prefetch", {"keyz": []}, "unknown field `keyz`"),
        ("/prefetch", {"keys": [], "pin_s": -1}, "give seconds from 0"),
        ("/clear", {"tiers": ["gpu"]}, "Invalid enum value 'gpu'"),
        ("/clear", {"cache_salt": "s"}, "give its 'tokens' too"),
        ("/clear", {"tokens": [1], "keys": []}, "give either 'tokens' or 'keys'"),
        ("/pin", {}, "give either 'tokens' or 'keys'"),
        ("/pin", {"keys": ["aa"]}, "this replica's keys have 32 bytes"),
        ("/unpin", {"tokens": [1], "tier": "gpu"}, "Invalid enum value 'gpu'"),
        ("/clear", {"tiers": ["gpu"]}, "Invalid enum value 'gpu'"),
        ("/move", {"tokens": [1]}, "missing required field `source`"),
    ],
)
async def test_bad_calls_say_how_to_mend_them(rig: Rig, path: str, body: Any, message: str) -> None:
    answer = await rig.post(path, body, status=400)
    assert answer["error"].startswith(path)
    assert message in answer["error"]


async def test_unknown_paths_and_bad_numbers_are_json_too(rig: Rig) -> None:
    assert b'"error"' in await rig.get("/nothing", status=404)
    assert b"'after' is 'x', not a number" in await rig.get("/events?after=x", status=400)


async def test_metrics_cover_every_count_of_the_engine(rig: Rig) -> None:
    rig.bench.store(keys(1))
    text = (await rig.get("/metrics")).decode()
    assert "warmroute_engine_stores_total 1.0" in text
    for name in {*EngineStats.__slots__} - {"disk", "remote"}:
        assert f"warmroute_engine_{name}" in text
    for name in TierStats.__slots__:
        assert f'warmroute_engine_tier_{name}_total{{tier="disk"}}' in text
    for name in TransferStats.__slots__:
        assert f"warmroute_transfer_{name}_total 0.0" in text
    assert await rig.get("/health") == b'{"status": "ok"}'


def test_a_taken_port_is_named(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        agent = Agent(bench.engine, IDENTITY, EngineConfig(lmcache_worker_port=port))
        with pytest.raises(OSError, match=f"lmcache_worker_port: cannot listen on .*:{port}"):
            agent.start()
        agent.stop()


def test_stop_without_start_and_twice(make_bench: MakeBench) -> None:
    agent = Agent(make_bench(2).engine, IDENTITY, EngineConfig(lmcache_worker_port=0))
    agent.stop()
    agent.start()
    agent.stop()
    agent.stop()


HEAD = b"POST /lookup HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


async def exchange(rig: Rig, data: bytes) -> bytes:
    """Send bytes; return all that comes until the agent closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.base.rpartition(":")[2]))
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01 my secret\r\n\r\n",
        b"GET /?\xff HTTP/1.1\r\n\r\n",
        HEAD + b"X: " + b"my secret" * 2000 + b"\r\n\r\n",
        CHUNKED + b"my secret\r\n",
        CHUNKED + b"5\r\nhello\r\nmy secret\r\n",
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\nmy secret",
    ],
)
async def test_what_is_no_http_is_refused_in_one_line_of_the_log(
    rig: Rig, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answer = await exchange(rig, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.") and b" 400 " in head.splitlines()[0], answer
    assert b'"error"' in body
    assert not [each for each in caplog.records if each.exc_info]
    assert "Traceback" not in caplog.text and "my secret" not in caplog.text
    await rig.get("/health")


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "BODY_S", 0.05)


@pytest.mark.usefixtures("short_wait")
async def test_a_body_that_does_not_come_is_not_waited_for_for_ever(rig: Rig) -> None:
    answer = await exchange(rig, HEAD + b"Content-Length: 9\r\n\r\n{")
    assert b" 408 " in answer.splitlines()[0], answer


async def test_a_lone_surrogate_in_a_call_is_refused(rig: Rig) -> None:
    answer = await rig.post("/lookup", b'{"keys": ["\\ud800"]}', status=400)
    assert "the body is not a LookupRequest" in answer["error"]
