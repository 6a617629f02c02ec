"""KV that comes before the request, through the whole router: real engines, agents and feeds."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from router.config.settings import PrefetchConfig, RatesConfig, ReplicaConfig
from router.record.records import Outcome
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import CHUNK_BYTES, Bench, config
from tests.cacheengine.whole_replica import WholeReplica
from tests.router.conftest import Fleet, Running, Wait
from tests.router.real_replicas import CHUNKS, TOKENS

ASK: Final[dict[str, Any]] = {"model": "m", "prompt": TOKENS}
SESSION: Final = {"x-session-id": "s"}
SLOW: Final = RatesConfig(prefill_tokens_per_s=100.0)
"""So that computing the prompt again takes fifty seconds: longer than a copy on a busy machine."""


@dataclass(kw_only=True)
class Pair:
    """Two replicas' engines and agents, and a router before them."""

    one: WholeReplica
    two: WholeReplica
    router: Running

    def queue_at_one(self, seconds: float = 100.0) -> None:
        """Make the router believe that the first replica is busy for this time."""
        replica = self.router.parts.fleet.replicas["one"]
        replica.queue.join(seconds, asyncio.get_running_loop().time())


async def pair(fleet: Fleet, benches: tuple[Bench, Bench], **prefetch: Any) -> Pair:
    one = await asyncio.to_thread(WholeReplica, "one", benches[0])
    two = await asyncio.to_thread(WholeReplica, "two", benches[1])

    async def stop() -> None:
        # Both at once: each waits a second for the router's long polls.
        await asyncio.gather(asyncio.to_thread(one.stop), asyncio.to_thread(two.stop))

    fleet.stack.push_async_callback(stop)
    router = await fleet.router(
        policy="ttft",
        rates=SLOW,
        prefetch=replace(PrefetchConfig(wait_cap_s=20.0), **prefetch),
        replicas=(
            ReplicaConfig(url=fleet.one.url, instance_id="one", agent_url=one.url),
            ReplicaConfig(url=fleet.two.url, instance_id="two", agent_url=two.url),
        ),
    )
    return Pair(one=one, two=two, router=router)


@pytest.fixture
def benches(make_bench: MakeBench, tmp_path: Path) -> tuple[Bench, Bench]:
    """The first holds the prompt in its pool and on its disk, the second nothing."""
    first = make_bench(32, config(tmp_path / "one"))
    first.store(CHUNKS)
    first.finish_puts()
    return first, make_bench(32, config(tmp_path / "two"))


@contextlib.asynccontextmanager
async def asked(
    client: aiohttp.ClientSession, router: Running, **headers: str
) -> AsyncIterator[aiohttp.ClientResponse]:
    async with client.post(
        f"{router.url}/v1/completions", json=ASK, headers=SESSION | headers
    ) as response:
        assert response.status == 200, await response.text()
        yield response


async def metrics(client: aiohttp.ClientSession, router: Running) -> str:
    async with client.get(f"{router.url}/metrics") as response:
        return await response.text()


async def test_a_spilled_session_finds_its_kv_where_it_goes(
    fleet: Fleet, client: aiohttp.ClientSession, benches: tuple[Bench, Bench]
) -> None:
    made = await pair(fleet, benches)
    async with asked(client, made.router) as response:
        assert response.headers["x-warmroute-replica"] == "one"
        assert "x-warmroute-copy" not in response.headers
    made.queue_at_one()
    async with asked(client, made.router) as response:
        assert response.headers["x-warmroute-replica"] == "two"
        assert response.headers["x-warmroute-copy"] == "from=one;asked=20;arrived=20;in-time"
    assert benches[1].has_right_bytes(CHUNKS)
    record = await made.router.record(2)
    copy = record.prepared.copy
    assert copy is not None
    assert (copy.timing, copy.moved_bytes) == ("in-time", 20 * CHUNK_BYTES)
    assert record.prepared.waited_s > 0
    text = await metrics(client, made.router)
    assert 'warmroute_copies_total{replica="two",result="in-time"} 1.0' in text
    assert f'warmroute_copy_bytes_total{{replica="two"}} {20 * CHUNK_BYTES}.0' in text


async def test_what_the_new_replica_has_on_disk_comes_up_meanwhile(
    fleet: Fleet, client: aiohttp.ClientSession, benches: tuple[Bench, Bench]
) -> None:
    two = benches[1]
    two.store(CHUNKS[:8])
    two.finish_puts()
    two.engine.clear(["cpu"])
    made = await pair(fleet, benches)
    made.queue_at_one()
    async with asked(client, made.router) as response:
        assert response.headers["x-warmroute-replica"] == "two"
        assert response.headers["x-warmroute-prefetch"] == "asked=8;promoted=8;pending=0;missing=0"
        assert "in-time" in response.headers["x-warmroute-copy"]
    assert two.has_right_bytes(CHUNKS)
    assert two.engine.stats().promoted == 8
    assert made.two.meter.stats().received_chunks == 12


async def test_a_source_that_is_gone_does_not_fail_the_request(
    fleet: Fleet, client: aiohttp.ClientSession, benches: tuple[Bench, Bench]
) -> None:
    made = await pair(fleet, benches)
    await asyncio.to_thread(made.one.stop)
    made.queue_at_one()
    async with asked(client, made.router) as response:
        assert response.headers["x-warmroute-replica"] == "two"
        assert response.headers["x-warmroute-copy"] == "from=one;asked=20;arrived=0;failed"
    async with asked(client, made.router) as response:
        assert "x-warmroute-copy" not in response.headers, "it is left alone for a while"
    assert made.router.in_flight() == 0


async def test_a_client_that_leaves_during_the_copy(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    benches: tuple[Bench, Bench],
    eventually: Wait,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing stays in flight; the copy continues, and nobody waits for it at the end."""
    made = await pair(fleet, benches)
    made.queue_at_one()
    holds = benches[0].engine.hold
    going, gate = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def waits(key: bytes) -> int | None:
        loop.call_soon_threadsafe(going.set)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return holds([key])[0]

    monkeypatch.setattr(benches[0].engine, "try_hold", waits)

    async def ask() -> None:
        async with asked(client, made.router):
            pass

    asking = asyncio.create_task(ask())
    await going.wait()
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    assert (await made.router.record()).outcome is Outcome.CLIENT_GONE
    assert made.router.in_flight() == 0
    assert not fleet.two.seen
    gate.set()
    await eventually(lambda: benches[1].engine.held_in(CHUNKS, "cpu") == 20)
