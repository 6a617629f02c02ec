"""Moves between two replicas in one process: real engines, agents, sockets and disks."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cacheengine.agent import move_jobs as moving
from cacheengine.agent.peers import AgentHttpClient
from cacheengine.record import TransferMeter
from cacheengine.residency.decisions import Presence
from cacheengine.tiers.tier import PutOutcome
from cacheengine.transfer import fetch as fetching
from cacheengine.transfer import protocol
from cacheengine.transfer.protocol import Channel, ChunkDigests
from tests.cacheengine.agent.moving_replica import PREFIX, TOKENS, Replica
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import CHUNK_BYTES, Bench, config, keys
from tests.cacheengine.scripted_tier import ScriptedTier
from tests.cacheengine.whole_replica import identity
from warmroute_common import agent_protocol as wire

NUM_TOKENS = 256 * 20


class Fleet:
    """Two replicas, and calls to their agents."""

    def __init__(self, first: Replica, second: Replica, session: aiohttp.ClientSession) -> None:
        self.first = first
        self.second = second
        self.session = session

    async def call(self, url: str, body: Any = None, status: int = 200) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        method = "GET" if body is None else "POST"
        headers = {} if body is None else {"Content-Type": "application/json"}
        async with self.session.request(method, url, data=data, headers=headers) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def begin(self, status: int = 200, **changes: Any) -> Any:
        """Ask the second replica to fetch from the first."""
        source = {
            "agent_url": self.first.url,
            "transfer_address": self.first.address,
            "tier": changes.pop("old", "cpu"),
        } | changes.pop("source", {})
        body = {"source": source, "tokens": TOKENS} | changes
        return await self.call(f"{self.second.url}/move", body, status)

    async def status(self, event_id: str, wait_s: float = 20) -> Any:
        return await self.call(f"{self.second.url}/moves/{event_id}?wait_s={wait_s}")

    async def move(self, **changes: Any) -> Any:
        """Move, and return how it ended."""
        return await self.status((await self.begin(**changes))["event_id"])


MakeFleet = Callable[[Bench, Bench], Any]


@pytest.fixture
async def make_fleet() -> AsyncIterator[MakeFleet]:
    replicas: list[Replica] = []
    async with aiohttp.ClientSession() as session:

        async def make(first: Bench, second: Bench) -> Fleet:
            for name, bench in (("one", first), ("two", second)):
                replicas.append(await asyncio.to_thread(Replica, name, bench))
            return Fleet(replicas[-2], replicas[-1], session)

        yield make
    for replica in replicas:
        await asyncio.to_thread(replica.stop)


@pytest.fixture
async def fleet(make_fleet: MakeFleet, make_bench: MakeBench, tmp_path: Path) -> Fleet:
    """The first replica holds the prefix in its pool and on its disk."""
    first = make_bench(32, config(tmp_path / "one"))
    first.store(PREFIX)
    first.finish_puts()
    fleet: Fleet = await make_fleet(first, make_bench(32, config(tmp_path / "two")))
    return fleet


async def test_a_copy_is_at_both(fleet: Fleet) -> None:
    begun = await fleet.begin(copy=True)
    assert begun["num_tokens"] == NUM_TOKENS
    assert await fleet.status(begun["event_id"]) == {
        "event_id": begun["event_id"],
        "state": "done",
        "asked_chunks": 20,
        "arrived_chunks": 20,
        "moved_bytes": 20 * CHUNK_BYTES,
        "error": "",
        "note": "",
    }
    assert fleet.first.holds() == fleet.second.holds() == 20
    assert fleet.second.bench.has_right_bytes(PREFIX)


async def test_a_move_leaves_the_sources_tier_and_that_alone(fleet: Fleet) -> None:
    fleet.first.bench.store(keys(1))
    assert (await fleet.move())["state"] == "done"
    assert fleet.second.bench.has_right_bytes(PREFIX)
    assert fleet.first.holds("cpu") == 0
    assert fleet.first.holds("disk") == 20
    assert fleet.first.bench.has_right_bytes(keys(1))


async def test_a_move_of_a_part_by_keys(fleet: Fleet) -> None:
    ended = await fleet.move(tokens=None, keys=[key.hex() for key in PREFIX[:3]])
    assert (ended["state"], ended["arrived_chunks"]) == ("done", 3)
    assert fleet.second.holds() == 3
    assert fleet.first.bench.engine.match(PREFIX)[:4] == ["disk", "disk", "disk", "cpu"]


async def test_from_the_disk_of_one_to_the_disk_of_the_other(fleet: Fleet) -> None:
    fleet.first.bench.engine.clear(["cpu"])
    assert (await fleet.move(old="disk", tier="disk"))["state"] == "done"
    assert fleet.first.holds("disk") == 0
    assert fleet.second.holds("disk") == 20
    fleet.second.bench.engine.clear(["cpu"])
    assert fleet.second.bench.promote(PREFIX) == (0, 20, 0)
    assert fleet.second.bench.has_right_bytes(PREFIX)


async def test_only_what_the_sources_tier_holds_is_moved(fleet: Fleet) -> None:
    fleet.first.bench.engine.clear(["cpu"], PREFIX[8:])
    begun = await fleet.begin(copy=True)
    assert begun["num_tokens"] == 8 * 256
    ended = await fleet.status(begun["event_id"])
    assert (ended["state"], ended["asked_chunks"], ended["arrived_chunks"]) == ("done", 8, 8)
    assert fleet.second.holds() == 8


async def test_a_copy_takes_what_the_sources_tiers_hold_together(fleet: Fleet) -> None:
    fleet.first.bench.engine.clear(["cpu"], PREFIX[4:8])
    fleet.first.bench.engine.clear(["disk"], PREFIX[:2])
    fleet.first.bench.engine.clear(["disk"], PREFIX[12:])
    ended = await fleet.move(copy=True, old=None)
    assert (ended["state"], ended["asked_chunks"], ended["arrived_chunks"]) == ("done", 20, 20)
    assert fleet.second.bench.has_right_bytes(PREFIX)
    refused = await fleet.begin(400, old=None)
    assert "give the source's 'tier' from which to remove the chunks" in refused["error"]


async def test_a_part_of_a_prefix_is_copied_behind_what_the_destination_holds(
    fleet: Fleet,
) -> None:
    """The source need not hold the beginning."""
    fleet.first.bench.engine.clear(keys=PREFIX[:8])
    fleet.second.bench.store(PREFIX[:10])
    ended = await fleet.move(
        copy=True, old=None, tokens=None, keys=[key.hex() for key in PREFIX[10:]]
    )
    assert (ended["state"], ended["arrived_chunks"]) == ("done", 10)
    assert fleet.second.bench.has_right_bytes(PREFIX)


async def test_copies_that_nobody_used_are_counted(fleet: Fleet) -> None:
    await fleet.move(copy=True, pin_s=10)
    engine = fleet.second.bench.engine
    engine.hold(PREFIX[:5])
    engine.release(PREFIX[:5])
    assert engine.stats().prefetch_unused_chunks == 0
    fleet.second.bench.clock.advance(10.1)
    assert engine.expire_pins() == 20
    stats = engine.stats()
    assert stats.prefetch_unused_chunks == 15
    assert stats.prefetch_unused_bytes == 15 * CHUNK_BYTES
    async with fleet.session.get(f"{fleet.second.url}/metrics") as response:
        metrics = await response.text()
    assert "warmroute_engine_prefetch_unused_chunks_total 15.0" in metrics


async def test_an_operators_copy_is_not_in_vain(fleet: Fleet) -> None:
    """Without a pin it waits for no request."""
    await fleet.move(copy=True)
    fleet.second.bench.engine.clear()
    assert fleet.second.bench.engine.stats().prefetch_unused_chunks == 0


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        # The example of LMCache's documentation.
        (12, "nothing to move: less than a chunk of 256 tokens is never kept"),
        (300, "nothing to move: the source's tier (cpu) has none of it"),
    ],
)
async def test_nothing_to_move_is_done_at_once(fleet: Fleet, tokens: int, why: str) -> None:
    begun = await fleet.begin(tokens=[1] * tokens)
    assert begun["num_tokens"] == 0
    ended = await fleet.status(begun["event_id"])
    assert (ended["state"], ended["asked_chunks"], ended["note"]) == ("done", 0, why)
    assert not ended["error"], "that is no failure"


async def test_what_the_destination_had_counts_as_arrived(fleet: Fleet) -> None:
    fleet.second.bench.store(PREFIX[:15])
    ended = await fleet.move()
    assert (ended["arrived_chunks"], ended["moved_bytes"]) == (20, 5 * CHUNK_BYTES)
    assert fleet.first.holds() == 0


async def test_the_peer_dies_in_the_middle(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that arrived are usable, and the source drops no others."""
    monkeypatch.setattr(fetching, "_WINDOW_BYTES", 4 * CHUNK_BYTES)
    send = protocol.send_chunk
    sent = iter(range(1000))

    def dies(channel: Channel, key: bytes, view: memoryview, digests: ChunkDigests) -> None:
        if next(sent) == 10:
            channel.send(protocol._CHUNK.pack(0, len(view)) + bytes(32) + key, view[:99])
            for each in list(fleet.first.server._open):
                each.shut()
        send(channel, key, view, digests)

    monkeypatch.setattr(protocol, "send_chunk", dies)
    ended = await fleet.move()
    assert ended["state"] == "failed"
    arrived = ended["arrived_chunks"]
    assert arrived < 20
    assert ended["moved_bytes"] > 0
    assert fleet.first.address in ended["error"]
    assert fleet.second.bench.has_right_bytes(PREFIX[:arrived])
    assert fleet.first.bench.engine.match(PREFIX) == ["disk"] * arrived + ["cpu"] * (20 - arrived)
    assert await asyncio.to_thread(fleet.second.held) == 0


async def test_a_source_that_cannot_be_told_to_drop_keeps_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(fleet.first.bench.engine, "clear", refuses)
    ended = await fleet.move()
    assert (ended["state"], ended["arrived_chunks"]) == ("failed", 20)
    assert "the source did not drop the 20 chunks that arrived: http://" in ended["error"]
    monkeypatch.undo()
    assert fleet.first.holds() == fleet.second.holds() == 20


async def test_a_destination_without_room(make_fleet: MakeFleet, make_bench: MakeBench) -> None:
    first, second = make_bench(32), make_bench(8)
    first.store(PREFIX)
    second.store(keys(1, 2))
    second.engine.hold(keys(1, 2))
    fleet: Fleet = await make_fleet(first, second)
    ended = await fleet.move()
    assert (ended["state"], ended["arrived_chunks"]) == ("failed", 6)
    assert ended["error"] == "this replica's cpu tier has no space for the last 14 chunks"
    assert fleet.first.bench.engine.held_in(PREFIX, "cpu") == 0
    assert fleet.first.bench.has_right_bytes(PREFIX[6:])
    second.engine.release(keys(1, 2))


async def test_two_moves_of_the_same_at_once(fleet: Fleet) -> None:
    begun = [await fleet.begin(copy=True) for _ in range(2)]
    ended = [await fleet.status(each["event_id"]) for each in begun]
    assert [each["state"] for each in ended] == ["done", "done"]
    assert sum(each["moved_bytes"] for each in ended) == 20 * CHUNK_BYTES
    assert fleet.second.bench.has_right_bytes(PREFIX)


async def test_within_one_replica_up(fleet: Fleet) -> None:
    fleet.first.bench.engine.clear(["cpu"])
    here = {"agent_url": fleet.first.url}
    fleet.second, fleet.first = fleet.first, fleet.second
    ended = await fleet.move(old="disk", tier="cpu", source=here)
    assert (ended["state"], ended["arrived_chunks"]) == ("done", 20)
    assert fleet.second.holds("cpu") == 20
    assert fleet.second.holds("disk") == 0


async def test_within_one_replica_nobody_is_called(fleet: Fleet) -> None:
    fleet.second.bench.store(PREFIX)
    fleet.second.bench.finish_puts()
    nowhere = {"agent_url": "http://127.0.0.1:1", "transfer_address": ""}
    ended = await fleet.move(old="cpu", tier="disk", source=nowhere)
    assert (ended["state"], ended["arrived_chunks"]) == ("done", 20)
    assert (fleet.second.holds("cpu"), fleet.second.holds("disk")) == (0, 20)
    same = await fleet.begin(400, old="disk", tier="disk", source=nowhere)
    assert "the source and the destination are both this replica's disk tier" in same["error"]
    await fleet.begin(400, old="remote", tier="disk", source=nowhere)
    some = await fleet.move(old=None, copy=True, source=nowhere)
    assert (some["state"], fleet.second.holds("cpu")) == ("done", 20)


async def test_within_one_replica_down(fleet: Fleet) -> None:
    fleet.second, fleet.first = fleet.first, fleet.second
    here = {"agent_url": fleet.second.url}
    fleet.second.bench.engine.clear(["disk"], PREFIX[12:])
    ended = await fleet.move(old="cpu", tier="disk", source=here)
    assert (ended["state"], ended["arrived_chunks"]) == ("failed", 12)
    assert "the disk tier has 12 of 20 chunks; chunks are written to lower tiers" in ended["error"]
    tiers = fleet.second.bench.engine.match(PREFIX)
    assert tiers == ["disk"] * 12 + ["cpu"] * 8
    same = await fleet.begin(400, old="cpu", tier="cpu", source=here)
    assert "the source and the destination are both this replica's cpu tier" in same["error"]


async def test_other_puts_do_not_keep_a_move_running(
    make_fleet: MakeFleet, make_bench: MakeBench
) -> None:
    """As under steady traffic: something is always on its way down, but none of the prefix."""
    tier = ScriptedTier()
    bench = make_bench(32, tier=tier)
    fleet: Fleet = await make_fleet(make_bench(8), bench)
    tier.put_outcome = PutOutcome.FAILED
    bench.store(PREFIX)
    bench.finish_puts()
    bench.clock.advance(100)
    tier.put_outcome = PutOutcome.STORED
    tier.puts.clear()
    bench.store(keys(900))
    ended = await fleet.move(old="cpu", tier="disk", source={"agent_url": fleet.second.url})
    tier.puts.set()
    assert (ended["state"], ended["arrived_chunks"]) == ("failed", 0)


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"tier": "remote"}, 400, "this replica has no remote tier; it has cpu, disk"),
        ({"old": "remote"}, 400, "the source, one, has no remote tier"),
        ({"keys": ["aa"]}, 400, "give either 'tokens' or 'keys'"),
        ({"tokens": None, "keys": ["aa"]}, 400, "this replica's keys have 32 bytes"),
        ({"pin_s": -1}, 400, "give seconds from 0"),
        ({"stall_s": 0}, 400, "'stall_s' is 0.0; give seconds from 0.1 to 3600"),
        ({"source": {"transfer_address": "nowhere"}}, 400, "'transfer_address': 'nowhere'"),
        ({"source": {"agent_url": "http://127.0.0.1:1"}}, 502, "http://127.0.0.1:1/info: "),
        ({"source": {"agent_url": "nonsense"}}, 502, "nonsense/info"),
    ],
)
async def test_moves_that_cannot_be(
    fleet: Fleet, changes: dict[str, Any], status: int, message: str
) -> None:
    refused = await fleet.begin(status, **changes)
    assert message in refused["error"]
    assert refused["error"].startswith("/move: ")


async def test_another_layout_and_no_transfer_port_are_refused(fleet: Fleet) -> None:
    info = await fleet.call(f"{fleet.first.url}/info")
    answers = [info | {"layout": "f" * 32}, info | {"transfer_port": None}, [1]]

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(answers.pop(0))

    app = web.Application()
    app.router.add_get("/info", answer)
    async with TestServer(app) as server:
        source = {"agent_url": str(server.make_url(""))}
        for status, message in (
            (400, "the chunks of one have layout ffff"),
            (400, "one does not serve chunks: set its distributed_url"),
            (502, "is not an agent"),
        ):
            refused = await fleet.begin(status, source=source)
            assert message in refused["error"]


async def test_an_event_nobody_knows(fleet: Fleet) -> None:
    answer = await fleet.call(f"{fleet.second.url}/moves/abc", status=404)
    assert answer["error"] == "/moves/abc: this move is unknown, or ended too long ago"


async def test_moves_are_bounded_and_end_with_the_agent(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    gate = threading.Event()

    def hangs(*args: Any) -> None:
        loop.call_soon_threadsafe(started.set)
        gate.wait()

    monkeypatch.setattr(protocol, "send_chunk", hangs)
    # The first must not give up before the last has begun.
    begun = [await fleet.begin(stall_s=3600) for _ in range(moving.MAX_RUNNING)]
    async with asyncio.timeout(20):
        await started.wait()
    refused = await fleet.begin(503)
    assert f"{moving.MAX_RUNNING} moves are running; try again later" in refused["error"]
    status = await fleet.status(begun[0]["event_id"], wait_s=0)
    assert (status["state"], status["arrived_chunks"]) == ("running", 0)
    async with asyncio.timeout(20):
        await asyncio.to_thread(fleet.second.agent.stop)
    gate.set()
    assert fleet.first.holds() == 20


async def test_a_source_that_hangs_is_given_up(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was on the way is a miss again: nobody must wait for it."""
    gate = threading.Event()
    monkeypatch.setattr(protocol, "send_chunk", lambda *args: gate.wait())
    async with asyncio.timeout(15):
        ended = await fleet.move(copy=True, stall_s=0.2)
    gate.set()
    assert (ended["state"], ended["moved_bytes"]) == ("failed", 0)
    assert "within 0.2 s" in ended["error"]
    assert fleet.second.bench.engine.lookup(PREFIX[0]) is Presence.MISS


async def test_the_latest_moves_are_remembered(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "MAX_REMEMBERED", 3)
    engine, meter = fleet.second.bench.engine, TransferMeter()
    moves = moving.MoveJobs(engine, identity("three"), AgentHttpClient(fleet.session, None), meter)
    source = wire.MoveSource(agent_url=fleet.first.url, transfer_address=fleet.first.address)
    begun = []
    for _ in range(5):
        move = await moves.begin(wire.MoveRequest(source=source, tokens=[]), [])
        await move.ended.wait()
        begun.append(move.event_id)
    ended = [await moves.status(event_id, 0.0) for event_id in begun]
    assert [each and each.state for each in ended] == [None, None, *["done"] * 3]
    assert meter.stats().moves == 5
    await moves.stop()
