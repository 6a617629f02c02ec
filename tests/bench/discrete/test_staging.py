"""Agents in model time: a call takes 2 ms, a chunk 40 ms from disk and 100 from a replica."""

import asyncio
from collections.abc import Sequence

import pytest

from replay.replica import ModelReplica
from replay.staging import KV_BYTES_PER_TOKEN, ModelAgent, Network
from router.agent_client import AgentError
from tests.bench.discrete.building import CHUNK, in_model_time, machine, prompt, served
from tests.cacheengine.helpers import keys
from warmroute_common.agent_protocol import MoveRequest, MoveSource, MoveStatus

CALL_S = 0.002
READ_S = CHUNK / 500
SEND_S = CHUNK / 200


class Bench:
    """Replicas, their agents and a clock."""

    def __init__(self, replicas: int = 1, **changes: float) -> None:
        self.replicas = [ModelReplica(slot, machine(**changes)) for slot in range(replicas)]
        self.network = Network()
        others = {f"http://r{each.slot}": each for each in self.replicas}
        self.agents = [ModelAgent(each, others, self.network) for each in self.replicas]
        self._loop = asyncio.get_running_loop()

    @property
    def now_s(self) -> float:
        return self._loop.time()

    def store(self, replica: int, chunks: Sequence[bytes]) -> None:
        engine = self.replicas[replica].engine
        reservation = engine.prepare_store(chunks)
        assert reservation is not None and list(reservation.keys) == list(chunks)
        engine.complete_store(reservation.keys)

    async def on_disk_alone(self, replica: int, chunks: Sequence[bytes]) -> None:
        """Store chunks, and forget them in RAM when they are written."""
        self.store(replica, chunks)
        await asyncio.sleep(1.0)
        self.replicas[replica].engine.clear_cpu()
        assert set(self.tiers(replica, chunks)) == {"disk"}

    def tiers(self, replica: int, chunks: Sequence[bytes]) -> list[str]:
        return self.replicas[replica].engine.match(chunks)

    async def move(self, source: int, destination: int, chunks: Sequence[bytes]) -> MoveStatus:
        """Have chunks copied, and wait for it."""
        agent = self.agents[destination]
        where = MoveSource(
            agent_url=f"http://r{source}", transfer_address=f"r{source}:1", tier=None
        )
        request = MoveRequest(
            source=where, keys=[each.hex() for each in chunks], copy=True, pin_s=5.0
        )
        reply = await agent.move(request)
        assert reply.num_tokens == len(chunks) * CHUNK
        status = await agent.move_status(reply.event_id, wait_s=25.0)
        for each in self.replicas:
            each.engine.check()
        return status


@in_model_time
async def test_a_prefetch_that_ends_in_time_is_told_whole() -> None:
    bench = Bench()
    await bench.on_disk_alone(0, keys(1, 2))
    began_s = bench.now_s
    reply = await bench.agents[0].prefetch(keys(1, 2, 3), wait_s=10.0, pin_s=5.0)
    assert bench.now_s - began_s == pytest.approx(CALL_S + 2 * READ_S)
    assert (reply.promoted, reply.resident, reply.pending, reply.missing) == (2, 0, 0, 1)
    assert reply.promoted_bytes == 2 * CHUNK * KV_BYTES_PER_TOKEN


@in_model_time
async def test_a_prefetch_that_is_late_goes_on_after_its_answer() -> None:
    bench = Bench()
    await bench.on_disk_alone(0, keys(1, 2))
    began_s = bench.now_s
    reply = await bench.agents[0].prefetch(keys(1, 2), wait_s=0.01, pin_s=5.0)
    assert bench.now_s - began_s == pytest.approx(CALL_S + 0.01)
    assert (reply.promoted, reply.pending) == (0, 2)
    await asyncio.sleep(2 * READ_S)
    assert bench.tiers(0, keys(1, 2)) == ["cpu", "cpu"]


@in_model_time
async def test_what_is_in_ram_is_not_waited_for() -> None:
    bench = Bench()
    bench.store(0, keys(1))
    began_s = bench.now_s
    reply = await bench.agents[0].prefetch(keys(1), wait_s=10.0, pin_s=5.0)
    assert (reply.resident, reply.promoted_bytes) == (1, 0)
    assert bench.now_s - began_s == pytest.approx(CALL_S)


@in_model_time
async def test_a_prefetched_prompt_is_loaded_and_not_read_again() -> None:
    bench = Bench(gpu_tokens=200, cpu_tokens=200)
    replica = bench.replicas[0]
    for text in (1, 2):
        await served(replica, prompt(100 * text, text=text))
        await asyncio.sleep(1.0)
    chunks = prompt(79, text=1).keys[1::2]
    assert set(bench.tiers(0, chunks)) == {"disk"}
    await bench.agents[0].prefetch(chunks, wait_s=10.0, pin_s=5.0)
    # 60 tokens loaded in 6 ms, 19 computed in 29.
    assert await served(replica, prompt(79, text=1)) == pytest.approx(0.035)
    assert replica.model.totals.cached.cpu == 60


@in_model_time
async def test_a_copy_takes_as_long_as_the_slower_of_its_ends() -> None:
    for sends, receives in ((200.0, 400.0), (400.0, 200.0)):
        bench = Bench(2, peer_tokens_per_s=sends, receive_tokens_per_s=receives)
        bench.store(0, keys(1, 2, 3, 4, 5, 6))
        began_s = bench.now_s
        status = await bench.move(0, 1, keys(1, 2, 3, 4, 5, 6))
        assert bench.now_s - began_s == pytest.approx(CALL_S + 6 * CHUNK / 200)
        assert (status.state, status.arrived_chunks) == ("done", 6)
        assert status.moved_bytes == 6 * CHUNK * KV_BYTES_PER_TOKEN
        assert bench.tiers(1, keys(1, 2, 3, 4, 5, 6)) == ["cpu"] * 6
        assert bench.network.moved_tokens == 6 * CHUNK


@in_model_time
async def test_a_copy_leaves_out_what_is_there() -> None:
    bench = Bench(2)
    bench.store(0, keys(1, 2, 3))
    bench.store(1, keys(1, 2))
    status = await bench.move(0, 1, keys(1, 2, 3))
    assert (status.state, status.arrived_chunks) == ("done", 3)
    assert status.moved_bytes == CHUNK * KV_BYTES_PER_TOKEN
    assert bench.now_s == pytest.approx(CALL_S + SEND_S)


@in_model_time
async def test_two_copies_to_one_receiver_come_one_after_the_other() -> None:
    bench = Bench(3, peer_tokens_per_s=200.0, receive_tokens_per_s=200.0)
    bench.store(0, keys(1, 2))
    bench.store(1, keys(3, 4))
    await asyncio.gather(bench.move(0, 2, keys(1, 2)), bench.move(1, 2, keys(3, 4)))
    assert bench.now_s == pytest.approx(CALL_S + 4 * SEND_S)


@in_model_time
async def test_a_receiver_of_twice_the_rate_takes_two_copies_at_once() -> None:
    bench = Bench(3, peer_tokens_per_s=200.0, receive_tokens_per_s=400.0)
    bench.store(0, keys(1, 2))
    bench.store(1, keys(3, 4))
    await asyncio.gather(bench.move(0, 2, keys(1, 2)), bench.move(1, 2, keys(3, 4)))
    assert bench.now_s == pytest.approx(CALL_S + 2 * SEND_S)


@in_model_time
async def test_two_copies_from_one_sender_leave_one_after_the_other() -> None:
    bench = Bench(3)
    bench.store(0, keys(1, 2))
    await asyncio.gather(bench.move(0, 1, keys(1, 2)), bench.move(0, 2, keys(1, 2)))
    assert bench.now_s == pytest.approx(CALL_S + 4 * SEND_S)


def test_what_waits_at_its_sender_takes_its_receivers_time_when_it_comes() -> None:
    """A copy that is sent late does not find that its receiver's time is over already."""

    @in_model_time
    async def scenario() -> None:
        sources = [ModelReplica(slot, machine(peer_tokens_per_s=100.0)) for slot in (0, 1)]
        busy, idle = (ModelReplica(slot, machine(receive_tokens_per_s=100.0)) for slot in (2, 3))
        network = Network()
        assert network.arrival_s(sources[0], idle, 100, 0.0) == pytest.approx(1.0)
        # It leaves from 1 s to 2 s, and is received meanwhile.
        assert network.arrival_s(sources[0], busy, 100, 0.0) == pytest.approx(2.0)
        assert network.arrival_s(sources[1], busy, 100, 1.0) == pytest.approx(3.0)

    scenario()


@in_model_time
async def test_what_is_on_the_sources_disk_is_read_there_first() -> None:
    bench = Bench(2)
    await bench.on_disk_alone(0, keys(1, 2))
    began_s = bench.now_s
    status = await bench.move(0, 1, keys(1, 2))
    assert status.state == "done"
    assert bench.now_s - began_s == pytest.approx(CALL_S + 2 * READ_S + 2 * SEND_S)
    assert bench.tiers(0, keys(1, 2)) == ["cpu", "cpu"]


@in_model_time
async def test_what_the_destination_has_on_disk_is_brought_up_there() -> None:
    bench = Bench(2)
    await bench.on_disk_alone(1, keys(1))
    bench.store(0, keys(1, 2))
    status = await bench.move(0, 1, keys(1, 2))
    assert (status.state, status.moved_bytes) == ("done", CHUNK * KV_BYTES_PER_TOKEN)
    assert bench.tiers(1, keys(1, 2)) == ["cpu", "cpu"]


@in_model_time
async def test_a_copy_from_a_dead_replica_fails_and_leaves_nothing() -> None:
    bench = Bench(2)
    bench.store(0, keys(1, 2))
    bench.replicas[0].die()
    status = await bench.move(0, 1, keys(1, 2))
    assert (status.state, status.arrived_chunks, status.moved_bytes) == ("failed", 0, 0)
    assert status.error
    assert bench.tiers(1, keys(1, 2)) == []


@in_model_time
async def test_what_came_before_the_source_died_can_be_used() -> None:
    bench = Bench(2)
    sevenfold = keys(1, 2, 3, 4, 5, 6, 7)
    bench.store(0, sevenfold)
    asyncio.get_running_loop().call_later(5.5 * SEND_S, bench.replicas[0].die)
    status = await bench.move(0, 1, sevenfold)
    assert (status.state, status.arrived_chunks) == ("failed", 4)
    assert bench.tiers(1, sevenfold) == ["cpu"] * 4


@in_model_time
async def test_a_copy_of_what_the_source_lost_fails() -> None:
    bench = Bench(2)
    bench.store(0, keys(1))
    status = await bench.move(0, 1, keys(1, 2))
    assert status.state == "failed"
    assert "does not have all of it" in status.error


@in_model_time
async def test_a_copy_without_room_fails() -> None:
    bench = Bench(2, cpu_tokens=4 * CHUNK)
    bench.store(0, keys(1, 2, 3))
    bench.store(1, keys(4, 5, 6, 7))
    for each in keys(4, 5, 6, 7):
        bench.replicas[1].engine.try_hold(each)
    status = await bench.move(0, 1, keys(1, 2, 3))
    assert (status.state, status.error) == ("failed", "no room")
    assert bench.network.moved_tokens == 0


@in_model_time
async def test_a_copy_goes_on_while_nobody_asks_how() -> None:
    bench = Bench(2)
    bench.store(0, keys(1, 2))
    agent = bench.agents[1]
    where = MoveSource(agent_url="http://r0", transfer_address="r0:1", tier=None)
    reply = await agent.move(
        MoveRequest(source=where, keys=[each.hex() for each in keys(1, 2)], copy=True, pin_s=5.0)
    )
    assert (await agent.move_status(reply.event_id, wait_s=0.01)).state == "running"
    await asyncio.sleep(2 * SEND_S)
    assert bench.tiers(1, keys(1, 2)) == ["cpu", "cpu"]
    assert (await agent.move_status(reply.event_id)).state == "done"


@in_model_time
async def test_the_agent_of_a_dead_replica_does_not_answer() -> None:
    bench = Bench(2)
    bench.replicas[0].die()
    with pytest.raises(AgentError):
        await bench.agents[0].prefetch(keys(1), wait_s=1.0, pin_s=1.0)
    with pytest.raises(AgentError):
        await bench.move(1, 0, keys(1))


@in_model_time
async def test_a_destination_that_dies_meanwhile_has_nothing() -> None:
    bench = Bench(2)
    bench.store(0, keys(1, 2, 3))
    asyncio.get_running_loop().call_later(SEND_S, bench.replicas[1].die)
    status = await bench.move(0, 1, keys(1, 2, 3))
    assert (status.state, status.arrived_chunks) == ("failed", 0)
