"""Through a whole router: events in, a prefetch before the forward, and every way it can fail."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest

from router.config.settings import ControllerConfig, PrefetchConfig, RatesConfig, ReplicaConfig
from router.fleet.replica import ReplicaState
from router.index.prefix_index import PrefixIndex
from router.index.prompt_keys import KvTier, PromptKeyCache
from router.lmcache.server_prefetch import GapRepair
from tests.router.agent_server import serving
from tests.router.conftest import Fleet, Running, Wait
from tests.router.lmcache.helpers import (
    CHUNK,
    MODEL,
    FakeServer,
    batch,
    coordinator_of,
    key,
    make_fleet,
    serving_fake,
)
from tests.router.prompt.prompts_given import tokens
from tests.router.scripted import stream

Patch = pytest.MonkeyPatch
PROMPT = list(range(4 * CHUNK))


_SLOW_RATES = RatesConfig(prefill_tokens_per_s=30)
"""So that a prefetch is worth more time than a busy machine takes for it."""


@dataclass(kw_only=True)
class Rig:
    """A router before two upstreams, the first with an LMCache server."""

    fleet: Fleet
    running: Running
    server: FakeServer
    controller_url: str
    client: aiohttp.ClientSession

    async def tell(self, *batches: Any) -> dict[str, Any]:
        """Report events as the server does."""
        body = msgspec.json.encode({"batches": list(batches)})
        async with self.client.post(f"{self.controller_url}/events", data=body) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer

    async def ask(self) -> aiohttp.ClientResponse:
        """Ask the router about the prompt."""
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
        async with self.client.post(f"{self.running.url}/v1/completions", json=body) as response:
            await response.read()
            assert response.status == 200
            return response


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture(autouse=True)
def patient(monkeypatch: Patch) -> None:
    """A server's answers come in time, on a slow machine too."""
    monkeypatch.setattr("router.lmcache.server_monitor._ANSWER_S", 20.0)
    monkeypatch.setattr("router.lmcache.server_prefetch._WAIT_S", 20.0)


@pytest.fixture
def wait_cap_s() -> float:
    return 20.0


@pytest.fixture
async def rig(
    fleet: Fleet,
    server: FakeServer,
    client: aiohttp.ClientSession,
    wait_cap_s: float,
) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving_fake(server))
        replicas = (
            ReplicaConfig(url=fleet.one.url, instance_id="one", lmcache=server.url),
            ReplicaConfig(url=fleet.two.url, instance_id="two"),
        )
        root: dict[str, object] = {"id": "m", "object": "model", "owned_by": "vllm", "root": MODEL}
        fleet.one.entries = fleet.two.entries = [root]
        running = await fleet.router(
            policy="ttft",
            replicas=replicas,
            controller=ControllerConfig(port=0, monitor_port=0),
            rates=_SLOW_RATES,
            prefetch=PrefetchConfig(wait_cap_s=wait_cap_s),
        )
        controller = running.parts.controller
        assert controller is not None
        url = await stack.enter_async_context(serving(controller.api()))
        yield Rig(fleet=fleet, running=running, server=server, controller_url=url, client=client)


def on_disk() -> list[Any]:
    return [batch(1, keys=[key(0)]), batch(2, tier="l2", keys=[key(n) for n in range(4)])]


async def test_what_lies_in_l2_is_prefetched_before_the_request_goes_there(rig: Rig) -> None:
    assert await rig.tell(*on_disk()) == {"applied": 2, "duplicates": 0, "stale": 0}
    answer = await rig.ask()
    assert answer.headers["x-warmroute-replica"] == "one"
    assert answer.headers["x-warmroute-matched-cpu"] == "256"
    assert answer.headers["x-warmroute-matched-disk"] == "768"
    assert answer.headers["x-warmroute-prefetch"] == "asked=3;promoted=3;pending=0;missing=0"
    assert rig.server.asked == [
        {"model_name": MODEL, "world_size": 1, "token_ids": PROMPT, "cache_salt": ""}
    ]
    record = await rig.running.record()
    assert record.prepared.prefetch is not None
    assert record.prepared.prefetch.promoted_bytes == 3 * 1000


async def test_what_is_in_l1_already_is_not_prefetched(rig: Rig) -> None:
    await rig.tell(batch(1, keys=[key(n) for n in range(4)]))
    answer = await rig.ask()
    assert answer.headers["x-warmroute-matched-cpu"] == "1024"
    assert rig.server.asked == []


@pytest.mark.parametrize("wait_cap_s", [0.5])
async def test_a_late_prefetch_is_followed_to_its_end(rig: Rig, eventually: Wait) -> None:
    """The request is forwarded after ``wait_cap_s``; a server forgets jobs whose end was read."""
    rig.server.gate = asyncio.Event()
    await rig.tell(*on_disk())
    answer = await rig.ask()
    assert answer.headers["x-warmroute-prefetch"] == "asked=3;promoted=0;pending=3;missing=0"
    before = rig.server.polled
    rig.server.gate.set()
    await eventually(lambda: rig.server.polled > before)


async def test_what_is_not_found_is_counted(rig: Rig) -> None:
    rig.server.found = 2
    await rig.tell(*on_disk())
    answer = await rig.ask()
    assert answer.headers["x-warmroute-prefetch"] == "asked=3;promoted=1;pending=0;missing=2"
    lmcache = rig.running.parts.lmcache
    assert lmcache.counts["missing"] == 2
    async with rig.client.get(f"{rig.running.url}/metrics") as response:
        text = await response.text()
    assert 'warmroute_lmcache_total{what="missing"} 2.0' in text
    assert 'warmroute_prefetches_total{replica="one",result="failed"} 1.0' in text


async def test_what_was_uncertain_and_is_not_found_is_forgotten(rig: Rig) -> None:
    rig.server.found = 1
    await rig.tell(batch(1, keys=[key(n) for n in range(4)]))
    await rig.tell(batch(3, "config"))
    answer = await rig.ask()
    assert answer.headers["x-warmroute-matched-disk"] == "1024"
    assert answer.headers["x-warmroute-prefetch"] == "asked=4;promoted=1;pending=0;missing=3"
    slot = rig.running.parts.fleet.replicas["one"].slot
    assert rig.running.parts.fleet.index.held(slot) == {KvTier.CPU: 0, KvTier.DISK: 1}


async def test_a_server_without_a_layout_yet_does_not_count_as_failing(rig: Rig) -> None:
    rig.server.refusal = 503
    await rig.tell(*on_disk())
    for number in range(2):
        answer = await rig.ask()
        assert answer.headers["x-warmroute-replica"] == "one", number
    lmcache = rig.running.parts.lmcache
    assert lmcache.counts["not_ready"] >= 1


async def test_events_that_are_malformed_change_nothing_and_are_counted(rig: Rig) -> None:
    good = msgspec.to_builtins(batch(1, keys=[key(0)]))
    for change in (
        {"seq": 0},
        {"tier": "l3"},
        {"instance_id": ""},
        {"backend": ""},
        {"entries": [{"key": {"chunk_hash_hex": "xyz", "model_name": "m", "kv_rank": 1}}]},
        {"entries": [{"key": {"chunk_hash_hex": "ab", "model_name": "a@b", "kv_rank": 1}}]},
    ):
        body = msgspec.json.encode({"batches": [good, good | change]})
        async with rig.client.post(f"{rig.controller_url}/events", data=body) as response:
            assert response.status == 422, change
            assert "detail" in await response.json()
    lmcache = rig.running.parts.lmcache
    assert (dict(lmcache.counts), len(lmcache)) == ({"malformed": 6}, 0)


async def test_a_server_that_ends_is_forgotten_and_its_replica_gets_no_requests(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """vLLM hangs until it notices; another replica answers, and where there is none, this one."""
    async with AsyncExitStack() as stack:
        mine = await stack.enter_async_context(AsyncExitStack())
        server = await mine.enter_async_context(serving_fake(FakeServer()))
        running = await fleet.router(
            policy="ttft",
            replicas=(
                ReplicaConfig(url=fleet.one.url, instance_id="one", lmcache=server.url),
                ReplicaConfig(url=fleet.two.url, instance_id="two"),
            ),
            controller=ControllerConfig(port=0, monitor_port=0),
        )
        controller, one = running.parts.controller, running.parts.fleet.replicas["one"]
        assert controller is not None
        url = await stack.enter_async_context(serving(controller.api()))
        rig = Rig(fleet=fleet, running=running, server=server, controller_url=url, client=client)
        await rig.tell(batch(1, keys=[key(n) for n in range(4)]))
        assert (await rig.ask()).headers["x-warmroute-replica"] == "one"
        await mine.aclose()
        await eventually(lambda: one.rests)
        answer = await rig.ask()
        assert answer.headers["x-warmroute-replica"] == "two"
        assert running.parts.fleet.index.held(one.slot).get(KvTier.CPU, 0) == 0
        fleet.two.healthy = False
        await eventually(lambda: running.parts.fleet.replicas["two"].state is ReplicaState.DOWN)
        assert (await rig.ask()).headers["x-warmroute-replica"] == "one"


async def test_a_server_with_another_hash_is_not_used_and_reported(
    rig: Rig, caplog: pytest.LogCaptureFixture, eventually: Wait
) -> None:
    async with serving_fake(FakeServer(instance_id="mp1", hash_algorithm="sha256_cbor")) as other:
        port = int(other.url.rpartition(":")[2])
        body = {"instance_id": "mp1", "ip": "127.0.0.1", "http_port": port}
        async with rig.client.post(f"{rig.controller_url}/instances", json=body) as response:
            assert await response.json() == {"instance_id": "mp1", "re_registered": False}
        await eventually(lambda: "--hash-algorithm blake3" in caplog.text)
    assert not rig.running.parts.fleet.replicas["two"].can_prefetch


async def test_a_request_that_waits_at_a_replica_whose_server_ends_is_answered_by_another(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    async with AsyncExitStack() as stack:
        mine = await stack.enter_async_context(AsyncExitStack())
        server = await mine.enter_async_context(serving_fake(FakeServer()))
        running = await fleet.router(
            replicas=(
                ReplicaConfig(url=fleet.one.url, instance_id="one", lmcache=server.url),
                ReplicaConfig(url=fleet.two.url, instance_id="two"),
            ),
            controller=ControllerConfig(port=0, monitor_port=0),
        )
        rig = Rig(fleet=fleet, running=running, server=server, controller_url="", client=client)
        never = asyncio.Event()
        fleet.one.will(stream(b"data: 1\n\n", gates=(never,)))
        asking = asyncio.create_task(rig.ask())
        await fleet.one.arrived.wait()
        await mine.aclose()
        answer = await asking
        assert answer.headers["x-warmroute-replica"] == "two"
        assert answer.headers["x-warmroute-retries"] == "1"
        await fleet.one.aborted.wait()
        record = await running.record()
        assert [each.cause for each in record.failed_tries] == ["hung"]
        assert running.in_flight() == 0


@pytest.mark.parametrize("told", [False, True])
async def test_a_router_that_has_missed_events_asks_before_it_places_a_prompt(
    rig: Rig, told: bool
) -> None:
    """As after its restart: the first batch that it sees is not the server's first."""
    rig.server.found = 3
    if told:
        await rig.tell(batch(40, "config"))
    answer = await rig.ask()
    assert answer.headers["x-warmroute-replica"] == "one"
    assert answer.headers["x-warmroute-matched-cpu"] == "768"
    assert len(rig.server.asked) == 1
    await rig.ask()
    assert len(rig.server.asked) == 1, "of a prompt it is asked once"


async def test_what_a_fleet_knows_of_a_prompt_is_one_walk(monkeypatch: Patch) -> None:
    """After missed events every long prompt cost as much as there are replicas."""
    fleet = make_fleet(3, lmcache="http://host0:8210")
    coordinator = coordinator_of(fleet, r0="mp0", r1="mp0", r2="mp1")
    coordinator.apply([batch(40, keys=[key(number) for number in range(8)])], now_s=1.0)
    monkeypatch.setattr(PrefixIndex, "match", None)
    async with aiohttp.ClientSession() as session:
        repair = GapRepair(fleet, coordinator, session, clock=lambda: 2.0)
        prompt = tokens(10 * CHUNK)
        assert repair._most_matched(PromptKeyCache(prompt)) == 8 * CHUNK
        coordinator.replica_servers.left("r1")
        fleet.remove("r1")
        coordinator.apply([batch(41, "delete", keys=[key(4)])], now_s=1.0)
        assert repair._most_matched(PromptKeyCache(prompt)) == 4 * CHUNK
        await repair.look_up(PromptKeyCache(tokens(5 * CHUNK)))
        assert not repair._asked, "almost all of it is known"


async def test_a_server_that_is_slow_has_not_ended(rig: Rig, monkeypatch: Patch) -> None:
    monkeypatch.setattr("router.lmcache.server_monitor._ANSWER_S", 0.01)
    lmcache = rig.running.parts.lmcache
    await lmcache.monitor.stop()  # every check is one of those below
    rig.server.busy = asyncio.Event()
    await rig.tell(batch(1, keys=[key(n) for n in range(4)]))
    for _ in range(3):
        await lmcache.monitor.check_all()
    assert not rig.running.parts.fleet.replicas["one"].rests
    assert (await rig.ask()).headers["x-warmroute-matched-cpu"] == "1024"
    for _ in range(3):
        await lmcache.monitor.check_all()
    assert rig.running.parts.fleet.replicas["one"].rests
    rig.server.busy.set()


async def test_a_server_that_does_not_answer_yet_is_logged_once(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    running = await fleet.router(
        replicas=(
            ReplicaConfig(url=fleet.one.url, instance_id="one", lmcache="http://127.0.0.1:1"),
        ),
        controller=ControllerConfig(port=0, monitor_port=0),
    )
    await running.parts.lmcache.monitor.check_all()
    said = [each for each in caplog.messages if "http://127.0.0.1:1 does not answer" in each]
    assert len(said) == 1
