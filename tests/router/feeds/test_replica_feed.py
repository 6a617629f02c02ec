"""Feeds against a real HTTP agent and a real ZMQ publisher."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import zmq.asyncio
from aiohttp import web

from router.config.settings import ReplicaConfig, RouterConfig
from router.feeds.feeds import Feeds, KvFeed, poll_gap_s
from router.feeds.kv_receiver import KvReceiver
from router.feeds.kv_subscriber import KvEndpoints
from router.fleet.fleet import Fleet
from router.index.kv_events import BlocksStored, KvBatch
from router.index.prompt_keys import KvTier, keys64
from tests.router.agent_server import AgentServer, serving, until
from tests.router.feeds.helpers import feeding
from tests.router.feeds.kv_publisher import KvPublisher, publisher, removed, stored
from tests.router.fleet.helpers import place
from tests.router.prompt.prompts_given import tokens
from warmroute_common.keys import HashScheme, chunk_keys, key64

PROMPT = tokens(256)
CHAIN = PROMPT.chain(HashScheme(), 16)
BLOCKS = keys64(CHAIN)
CHUNKS = [key64(key) for key in chunk_keys(CHAIN, 4)]


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


def matched(fleet: Fleet) -> dict[str, int]:
    decision = place(fleet, PROMPT)
    return {str(tier): count for tier, count in decision.matched_tokens.items()}


def info_ports(source: KvPublisher) -> dict[str, int]:
    return {"kv_events_port": source.port, "kv_replay_port": source.replay_port}


async def test_a_snapshot_is_there_before_the_first_request() -> None:
    agent = AgentServer()
    agent.held = {"cpu": CHUNKS[:2], "disk": CHUNKS}
    async with serving(agent.app()) as url, feeding(agent_url=url) as fleet:
        assert matched(fleet) == {KvTier.CPU: 128, KvTier.DISK: 128}
        assert list(fleet.replicas) == ["instance1"]


async def test_changes_follow_the_snapshot() -> None:
    agent = AgentServer()
    async with serving(agent.app()) as url, feeding(agent_url=url) as fleet:
        await agent.change("cpu", True, CHUNKS)
        await until(lambda: matched(fleet) == {KvTier.CPU: 256})
        await agent.change("cpu", False, CHUNKS[2:])
        await until(lambda: matched(fleet) == {KvTier.CPU: 128})
        assert agent.calls.count("/snapshot") == 1


async def test_changes_soon_after_others_are_asked_for_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.feeds.feeds._POLL_GAP_S", 0.5)
    agent = AgentServer()
    async with serving(agent.app()) as url, feeding(agent_url=url) as fleet:
        await agent.change("cpu", True, CHUNKS[:1])
        await until(lambda: matched(fleet) == {KvTier.CPU: 64})
        for chunk in CHUNKS[1:]:
            await agent.change("cpu", True, [chunk])
            await asyncio.sleep(0.01)
        await until(lambda: matched(fleet) == {KvTier.CPU: 256})
        assert agent.calls.count("/events") <= 3  # the first news, the others, what comes next


async def test_an_agent_that_answers_empty_at_once_is_not_asked_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.feeds.feeds._POLL_GAP_S", 60.0)
    agent = AgentServer()
    agent.waits = False
    async with serving(agent.app()) as url, feeding(agent_url=url):
        await until(lambda: "/events" in agent.calls)
        await asyncio.sleep(0.2)
        assert agent.calls.count("/events") == 1


async def test_many_agents_are_not_asked_more_often_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [poll_gap_s(agents) for agents in (1, 25, 1000)] == [0.05, 0.05, 2.0]
    monkeypatch.setattr("router.feeds.feeds._POLLS_PER_S", 1 / 60)
    agent = AgentServer()
    agent.waits = False
    async with serving(agent.app()) as url, feeding(agent_url=url):
        await until(lambda: "/events" in agent.calls)
        await asyncio.sleep(0.2)
        assert agent.calls.count("/events") == 1


async def test_a_history_that_is_gone_is_replaced_by_a_snapshot() -> None:
    agent = AgentServer()
    async with serving(agent.app()) as url, feeding(agent_url=url) as fleet:
        agent.held = {"disk": CHUNKS[:1]}
        agent.oldest = agent.seq = 100
        await agent.change("disk", True, CHUNKS[1:2])
        await until(lambda: matched(fleet) == {KvTier.DISK: 128})


async def test_a_restart_is_noticed_and_its_disk_known_again(
    context: zmq.asyncio.Context,
) -> None:
    async with publisher(context) as before, publisher(context) as after:
        agent = AgentServer(**info_ports(before))
        async with serving(agent.app()) as url, feeding(agent_url=url) as fleet:
            await before.publish(stored(BLOCKS[:8]))
            await until(lambda: matched(fleet) == {KvTier.GPU: 128})
            await after.publish(stored(BLOCKS[:2]))
            agent.info |= info_ports(after)
            await agent.restart("two", disk=CHUNKS[:3])
            await until(lambda: matched(fleet) == {KvTier.GPU: 32, KvTier.DISK: 160})


async def test_an_agent_that_comes_late_is_found(caplog: pytest.LogCaptureFixture) -> None:
    agent = AgentServer()
    async with serving(agent.app()) as url:
        port = int(url.rpartition(":")[2])
    with caplog.at_level(logging.WARNING):
        async with feeding(agent_url=url) as fleet:
            assert matched(fleet) == {}
            agent.held = {"disk": CHUNKS}
            async with serving(agent.app(), port):
                await until(lambda: matched(fleet) == {KvTier.DISK: 256})
    assert sum("does not answer" in record.message for record in caplog.records) == 1


async def test_an_agent_that_fails_for_a_while_is_asked_again() -> None:
    agent = AgentServer()
    agent.failure = 500
    async with serving(agent.app()) as url, feeding(agent_url=url) as fleet:
        agent.failure = None
        agent.held = {"cpu": CHUNKS}
        await until(lambda: matched(fleet) == {KvTier.CPU: 256})


async def test_gpu_blocks_come_from_vllm_and_the_rest_from_the_agent(
    context: zmq.asyncio.Context,
) -> None:
    async with publisher(context) as source:
        await source.publish(stored(BLOCKS[:6]))
        agent = AgentServer(**info_ports(source))
        agent.held = {"cpu": CHUNKS[:2]}
        async with serving(agent.app()) as url, feeding(agent_url=url) as fleet:
            await until(lambda: matched(fleet) == {KvTier.GPU: 96, KvTier.CPU: 32})
            await source.publish(removed(BLOCKS[4:6]))
            await source.publish(stored(BLOCKS, medium="CPU"))  # the agent knows better
            await until(lambda: matched(fleet) == {KvTier.GPU: 64, KvTier.CPU: 64})


async def test_a_stock_vllm_tells_where_its_events_are(context: zmq.asyncio.Context) -> None:
    async with publisher(context) as source:
        await source.publish(stored(BLOCKS, list(PROMPT.token_ids or ())))
        await source.publish(stored(BLOCKS, medium="CPU"))
        await source.publish(removed(BLOCKS[8:]))

        async def sources(request: web.Request) -> web.Response:
            entry = {
                "endpoint": f"tcp://*:{source.port}",
                "replay_endpoint": f"tcp://*:{source.replay_port}",
                "topic": "",
            }
            return web.json_response({"0": entry})

        app = web.Application()
        app.router.add_get("/kv_event_sources", sources)
        async with serving(app) as url, feeding(url=url) as fleet:
            await until(lambda: matched(fleet) == {KvTier.GPU: 128, KvTier.CPU: 128})
            # A replay is applied before its end is known.
            await until(lambda: next(iter(fleet.replicas.values())).has_events)


async def test_a_replica_that_joined_in_another_s_place_is_followed(
    context: zmq.asyncio.Context,
) -> None:
    """The end of the following of the one that left takes nothing from it, though of one name."""
    async with publisher(context) as source, aiohttp.ClientSession() as session:
        await source.publish(stored(BLOCKS, list(PROMPT.token_ids or ())))
        endpoints: dict[str, Any] = {
            "kv_events": source.endpoint,
            "kv_replay": source.replay_endpoint,
        }
        config = ReplicaConfig(url="http://127.0.0.1:1", **endpoints)
        fleet = Fleet(RouterConfig(replicas=(config,)))
        feeds = Feeds(fleet, session)
        await feeds.start()
        try:
            old = next(iter(fleet.replicas.values()))
            await until(lambda: old.has_events)
            before = asyncio.all_tasks()
            feeds.left(old)
            fleet.remove(old.id)
            new = fleet.add(config)
            fleet.following_kv(new.id)
            await until(lambda: any(each.done() for each in before))
            assert new.has_events
            feeds.joined(new)
            await until(lambda: matched(fleet) == {KvTier.GPU: 256})
        finally:
            await feeds.stop()


async def test_late_events_of_a_replica_that_left_do_not_count_for_its_successor() -> None:
    config = ReplicaConfig(url="http://127.0.0.1:1", kv_events="tcp://127.0.0.1:1")
    fleet = Fleet(RouterConfig(replicas=(config,)))
    old = next(iter(fleet.replicas.values()))
    async with (
        aiohttp.ClientSession() as session,
        contextlib.aclosing(KvReceiver()) as receiver,
    ):
        feed = KvFeed(fleet, old, session, receiver)
        fleet.remove(old.id)
        new = fleet.add(config)
        assert new.id == old.id
        feed.apply(KvBatch(0, 1.0, [BlocksStored(KvTier.GPU, BLOCKS)]))
        assert not fleet.index.held(new.slot)


async def test_a_gpu_cache_that_is_reset_leaves_what_the_cpu_holds(
    context: zmq.asyncio.Context,
) -> None:
    """vLLM says so of its GPU's prefix cache alone; its CPU tier may go on."""
    async with publisher(context) as source:
        await source.publish(stored(BLOCKS, list(PROMPT.token_ids or ())))
        await source.publish(stored(BLOCKS, medium="CPU"))
        await source.publish({"type": "AllBlocksCleared"})
        endpoints = {"kv_events": source.endpoint, "kv_replay": source.replay_endpoint}
        async with feeding(**endpoints) as fleet:
            await until(lambda: matched(fleet) == {KvTier.CPU: 256})


async def test_a_stock_vllm_that_dies_is_forgotten_and_found_again(
    context: zmq.asyncio.Context,
) -> None:
    token_ids = list(PROMPT.token_ids or ())
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(publisher(context))
        port = source.port
        await source.publish(stored(BLOCKS, token_ids))
        fleet = await stack.enter_async_context(feeding(kv_events=f"tcp://127.0.0.1:{port}"))
        await source.subscribed()
        await source.publish(stored(BLOCKS[:4], token_ids[:64]))
        await until(lambda: matched(fleet) == {KvTier.GPU: 64})
        await source.close()
        await until(lambda: matched(fleet) == {})
        again = await stack.enter_async_context(publisher(context, port=port))
        await again.subscribed()
        await again.publish(stored(BLOCKS[:2], token_ids[:32]))
        await until(lambda: matched(fleet) == {KvTier.GPU: 32})


async def test_an_unknown_seed_is_said_once(
    context: zmq.asyncio.Context, caplog: pytest.LogCaptureFixture
) -> None:
    async with publisher(context) as source:
        for start in (0, 1000):
            prompt = tokens(64, start=start)
            keys = keys64(prompt.chain(HashScheme("xxhash", "random"), 16))
            await source.publish(stored(keys, list(prompt.token_ids or ())))
        endpoints = {"kv_events": source.endpoint, "kv_replay": source.replay_endpoint}
        async with feeding(**endpoints) as fleet:
            replica = next(iter(fleet.replicas.values()))
            await until(lambda: replica.has_events)
    assert sum("PYTHONHASHSEED" in record.message for record in caplog.records) == 1


async def test_every_replica_of_a_large_fleet_has_its_sockets(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ's default is 1023 for all, of which 341 replicas took 3 each."""

    class Small(zmq.asyncio.Context):
        def __init__(self) -> None:
            super().__init__()
            self.set(zmq.MAX_SOCKETS, 10)

    monkeypatch.setattr("zmq.asyncio.Context", Small)
    async with publisher(context) as source, aiohttp.ClientSession() as session:
        replicas = tuple(
            ReplicaConfig(url=f"http://127.0.0.1:{port}", kv_events=source.endpoint)
            for port in range(1, 6)
        )
        fleet = Fleet(RouterConfig(replicas=replicas))
        feeds = Feeds(fleet, session)
        await feeds.start()
        try:
            await until(lambda: all(each.has_events for each in fleet.replicas.values()))
        finally:
            await feeds.stop()


async def test_a_replica_that_tells_nothing_is_let_be() -> None:
    async with serving(web.Application()) as url, feeding(url=url) as fleet:
        assert matched(fleet) == {}


async def test_stopping_ends_every_task() -> None:
    before = asyncio.all_tasks()
    agent = AgentServer()
    async with serving(agent.app()) as url, feeding(agent_url=url):
        pass
    assert {task for task in asyncio.all_tasks() - before if not task.done()} == set()


async def test_an_agent_with_a_hash_that_is_not_known_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = AgentServer(hash_algorithm="md5")
    agent.held = {"cpu": CHUNKS}
    async with serving(agent.app()) as url, feeding(agent_url=url) as fleet:
        assert "unknown hash algorithm 'md5'" in caplog.text
        agent.info["hash_algorithm"] = "sha256"
        await until(lambda: matched(fleet) == {"cpu": 256})


async def test_a_snapshot_that_is_broken_is_asked_for_again() -> None:
    agent = AgentServer()
    whole, agent.broken = {"cpu": CHUNKS}, True
    agent.held = whole
    async with serving(agent.app()) as url, feeding(agent_url=url) as fleet:
        assert matched(fleet) == {}
        agent.broken = False
        await until(lambda: matched(fleet) == {"cpu": 256})


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [each.message for each in caplog.records if part in each.message]


@pytest.mark.parametrize("accepts", [True, False])
async def test_a_publisher_that_is_not_there_is_a_fault_and_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, accepts: bool
) -> None:
    """Nothing listens at its port, or what does accepts connections and says nothing."""
    monkeypatch.setattr("router.feeds.feeds._ABSENT_AFTER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if accepts else 1
        async with feeding(kv_events=f"tcp://127.0.0.1:{port}") as fleet:
            (replica,) = fleet.replicas.values()
            await until(lambda: replica.events_fault() is not None)
            assert f"no KV events from tcp://127.0.0.1:{port}" in (replica.events_fault() or "")
    assert len(lines(caplog, "no KV events")) == 1


@pytest.mark.parametrize("replays", [True, False])
async def test_a_long_replay_is_not_taken_for_silence(replays: bool) -> None:
    """Its first messages have come, and its end has not."""
    fleet = Fleet(RouterConfig(replicas=(ReplicaConfig(url="http://127.0.0.1:1"),)))
    (replica,) = fleet.replicas.values()
    async with (
        aiohttp.ClientSession() as session,
        contextlib.aclosing(KvReceiver()) as receiver,
    ):
        feed = KvFeed(fleet, replica, session, receiver)
        if replays:
            feed.apply(KvBatch(0, 0.0, []))
        feed._note_absent(KvEndpoints("tcp://127.0.0.1:1"))
    assert (replica.events_fault() is None) is replays


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ((b"", bytes(24), b"\x93\xcb\x40\x8f\x40\x00\x00\x00\x00\x00\x90\x00"), "snapshots"),
        ((b"", bytes(8), b"\xc1"), "not vLLM's"),
    ],
)
async def test_events_that_are_not_understood_are_one_line(
    context: zmq.asyncio.Context,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    frames: tuple[bytes, ...],
    said: str,
) -> None:
    """However often it connects again. Once a message is understood, that is a line too."""
    monkeypatch.setattr("router.feeds.feeds._LONGEST_S", 0.05)
    caplog.set_level(logging.INFO)
    async with publisher(context) as source, feeding(kv_events=source.endpoint) as fleet:
        (replica,) = fleet.replicas.values()
        for _ in range(4):
            await source.subscribed()
            await source.send_frames(*frames)
        await source.subscribed()
        assert not replica.has_events
        assert said in (replica.events_fault() or "")
        assert len(lines(caplog, "KV events")) == 2, "the first connection, and what came of it"
        await source.publish(stored(BLOCKS[:4], list(PROMPT.token_ids or ())[:64]))
        await until(lambda: replica.has_events)
        assert matched(fleet) == {KvTier.GPU: 64}
        assert replica.events_fault() is None


async def test_a_stock_vllm_whose_agent_is_down_is_followed(context: zmq.asyncio.Context) -> None:
    async with publisher(context) as source:
        await source.publish(stored(BLOCKS, list(PROMPT.token_ids or ())))

        async def sources(request: web.Request) -> web.Response:
            entry = {"endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint}
            return web.json_response({"0": entry})

        app = web.Application()
        app.router.add_get("/kv_event_sources", sources)
        async with (
            serving(app) as url,
            feeding(url=url, agent_url="http://127.0.0.1:1") as fleet,
        ):
            await until(lambda: matched(fleet) == {KvTier.GPU: 256})
