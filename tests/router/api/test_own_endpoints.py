"""What the router answers itself."""

import asyncio
from typing import Any

import aiohttp
import pytest

from router.config.settings import ReplicaConfig, TimeoutsConfig
from tests.router.conftest import Fleet, Wait
from tests.router.scripted import raw_server

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def test_models_are_merged(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    fleet.one.models = ["m", "a/b"]
    fleet.two.models = ["m", "c"]
    router = await fleet.router()
    async with client.get(f"{router.url}/v1/models") as response:
        answer = await response.json()
    assert answer["object"] == "list"
    assert [each["id"] for each in answer["data"]] == ["m", "a/b", "c"]
    async with client.get(f"{router.url}/v1/models/a/b") as response:
        assert (await response.json())["id"] == "a/b"
    async with client.get(f"{router.url}/v1/models/z") as response:
        assert response.status == 404


async def test_a_question_for_models_asks_no_replica(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    router = await fleet.router(timeouts=TimeoutsConfig(health_interval_s=3600))
    asked = fleet.one.listings, fleet.two.listings
    for _ in range(20):
        async with client.get(f"{router.url}/v1/models") as response:
            assert [each["id"] for each in (await response.json())["data"]] == ["m"]
    assert (fleet.one.listings, fleet.two.listings) == asked == (1, 1)


async def test_a_model_is_asked_of_who_serves_it(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.two.models = ["only-two"]
    router = await fleet.router()
    for _ in range(3):
        async with client.post(
            f"{router.url}/v1/chat/completions", json={**ASK, "model": "only-two"}
        ) as response:
            assert response.headers["x-warmroute-replica"] == "two"


async def test_health_names_faults_to_the_administration_only(
    fleet: Fleet, client: aiohttp.ClientSession, stranger: aiohttp.ClientSession
) -> None:
    """Requests are answered all the same, so the status stays."""
    # No probe that is under way calls the second replica up again.
    router = await fleet.router(timeouts=TimeoutsConfig(health_interval_s=3600.0))
    replica = router.parts.fleet.replicas["one"]
    replica.events_problem = "no KV events"
    fleet.two.healthy = False
    router.parts.fleet.replicas["two"].events_problem = "it is down: that says enough"
    router.parts.fleet.down("two")
    async with client.get(f"{router.url}/health") as response:
        answer = await response.json()
    assert (response.status, answer["status"]) == (200, "ok")
    assert answer["faults"] == {"replica 'one'": "no KV events"}
    async with stranger.get(f"{router.url}/health") as response:
        assert not {"faults", "tokens"} & (await response.json()).keys()
    async with client.get(f"{router.url}/metrics") as response:
        assert 'warmroute_kv_events_known{replica="one"} 0.0' in await response.text()


async def test_health_names_the_replicas(
    fleet: Fleet, client: aiohttp.ClientSession, dead_port: int
) -> None:
    dead = ReplicaConfig(url=f"http://127.0.0.1:{dead_port}", instance_id="dead")
    live = ReplicaConfig(url=fleet.one.url, instance_id="live")
    router = await fleet.router(replicas=(dead, live))
    async with client.get(f"{router.url}/health") as response:
        assert response.status == 200
        answer = await response.json()
    assert answer["status"] == "ok"
    assert {name: each["state"] for name, each in answer["replicas"].items()} == {
        "dead": "down",
        "live": "up",
    }


async def test_the_port_is_open_while_a_replica_is_asked_for_the_first_time(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one replica is up and serves; the other has not answered its first probe yet."""
    monkeypatch.setattr("router.feeds.health_monitor._FIRST_PROBES_S", 0.1)
    gate = asyncio.Event()

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await gate.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    async with raw_server(slowly) as slow:
        router = await fleet.router(
            replicas=(
                ReplicaConfig(url=slow, instance_id="slow"),
                ReplicaConfig(url=fleet.one.url, instance_id="live"),
            ),
            timeouts=TimeoutsConfig(health_timeout_s=60.0, health_interval_s=60.0),
        )

        async def health() -> tuple[str, str]:
            async with client.get(f"{router.url}/health") as response:
                assert response.status == 200
                answer = await response.json()
            return answer["first_probes"], answer["replicas"]["slow"]["state"]

        live_replica = router.parts.fleet.replicas["live"]
        await eventually(lambda: live_replica.state == "up")
        assert await health() == ("under way", "unknown")
        async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
            assert response.headers["x-warmroute-replica"] == "live"
        gate.set()
        slow_replica = router.parts.fleet.replicas["slow"]
        await eventually(lambda: slow_replica.state == "up")
        assert await health() == ("done", "up")


async def test_metrics_count_what_has_happened(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    router = await fleet.router()
    async with client.post(f"{router.url}/v1/chat/completions", json=ASK) as response:
        await response.read()
    await router.record()
    async with client.get(f"{router.url}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        text = await response.text()
    lines = text.splitlines()
    assert (
        'warmroute_requests_total{endpoint="/v1/chat/completions",outcome="ok",replica="one",'
        'status="200"} 1.0'
    ) in lines
    assert 'warmroute_replica_up{replica="one",state="up"} 1.0' in lines
    assert 'warmroute_in_flight{replica="one"} 0.0' in lines
    assert 'warmroute_decisions_total{reason="round-robin"} 1.0' in lines


async def test_two_routers_have_metrics_of_their_own(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    first, second = await fleet.router(), await fleet.router()
    async with client.post(f"{first.url}/v1/chat/completions", json=ASK) as response:
        await response.read()
    async with client.get(f"{second.url}/metrics") as response:
        assert "warmroute_requests_total{" not in await response.text()


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ("", ASK),
        ("", {"model": "m", "prompt": "hello"}),
        ("", {"model": "m", "input": "hello"}),
        ("?endpoint=/v1/messages", ASK),
    ],
)
async def test_explain_sends_nothing(
    fleet: Fleet, client: aiohttp.ClientSession, query: str, body: dict[str, Any]
) -> None:
    router = await fleet.router()
    async with client.post(f"{router.url}/explain{query}", json=body) as response:
        assert response.status == 200
        answer = await response.json()
    assert answer["replica"] == "one"
    assert answer["reason"] == "round-robin"
    assert {each["replica_id"] for each in answer["candidates"]} == {"one", "two"}
    assert not fleet.one.seen and not fleet.two.seen
    assert router.in_flight() == 0


@pytest.mark.parametrize(
    ("query", "body", "said"),
    [
        ("", {"model": "m"}, "neither 'messages' nor 'prompt' nor 'input'"),
        ("?endpoint=/tokenize", ASK, "'/tokenize' has no prompt to explain; choose from"),
    ],
)
async def test_explain_refuses(
    fleet: Fleet, client: aiohttp.ClientSession, query: str, body: dict[str, Any], said: str
) -> None:
    router = await fleet.router()
    async with client.post(f"{router.url}/explain{query}", json=body) as response:
        assert response.status == 400
        assert said in (await response.json())["error"]["message"]
