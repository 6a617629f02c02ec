"""``/replicas``: telling how each replica is, draining one, and getting it back."""

import asyncio
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from router.api.access import new_key, sha256_of
from router.cli.commands import main
from router.config.settings import AccessConfig, BreakerConfig, ReplicaConfig
from tests.router.conftest import Fleet, Running, Wait
from tests.router.scripted import chat_events, json_answer, stream

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def told(client: aiohttp.ClientSession, router: Running) -> dict[str, dict[str, Any]]:
    async with client.get(f"{router.url}/replicas") as response:
        assert response.status == 200
        return {each["id"]: each for each in await response.json()}


async def change(
    client: aiohttp.ClientSession, router: Running, what: str, **headers: str
) -> tuple[int, dict[str, Any]]:
    async with client.post(f"{router.url}/replicas/{what}", headers=headers) as response:
        return response.status, await response.json()


async def replica_of(client: aiohttp.ClientSession, router: Running) -> str:
    async with client.post(router.url + CHAT, json=ASK) as response:
        assert response.status == 200
        await response.read()
        return response.headers["x-warmroute-replica"]


async def test_all_replicas_are_told_of(
    fleet: Fleet, client: aiohttp.ClientSession, dead_port: int
) -> None:
    dead = ReplicaConfig(url=f"http://127.0.0.1:{dead_port}", instance_id="dead")
    live = ReplicaConfig(url=fleet.one.url, instance_id="live")
    router = await fleet.router(replicas=(dead, live))
    found = await told(client, router)
    assert list(found) == ["dead", "live"]
    assert found["live"] == {
        "id": "live",
        "url": fleet.one.url,
        "state": "up",
        "breaker": "closed",
        "in_flight": 0,
        "why": None,
    }
    assert found["dead"]["state"] == "down"
    assert str(dead_port) in found["dead"]["why"]


async def test_an_open_breaker_is_told_of(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    fleet.one.will(json_answer({}, status=500))
    router = await fleet.router(breaker=BreakerConfig(failures_in_a_row=2, open_s=60.0))
    for _ in range(4):
        async with client.post(router.url + CHAT, json=ASK) as response:
            await response.read()
    one = (await told(client, router))["one"]
    assert (one["state"], one["breaker"]) == ("up", "open")
    assert one["why"].startswith("2 requests in a row failed; it is tried again in ")
    async with client.get(f"{router.url}/metrics") as response:
        metrics = await response.text()
    assert 'warmroute_breaker_closed{replica="one",state="open"} 0.0' in metrics
    assert 'warmroute_breaker_closed{replica="two",state="closed"} 1.0' in metrics
    assert 'warmroute_breaker_openings_total{replica="one"} 1.0' in metrics


async def test_a_drained_replica_gets_nothing_new_and_finishes_what_it_has(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    end = asyncio.Event()
    fleet.one.will(stream(*chat_events("a", "b"), gates=(None, end)))
    router = await fleet.router()
    async with client.post(router.url + CHAT, json=ASK) as running:
        await running.content.readany()
        assert await change(client, router, "one/drain") == (
            200,
            {
                "id": "one",
                "url": fleet.one.url,
                "state": "draining",
                "breaker": "closed",
                "in_flight": 1,
                "why": "it is draining",
            },
        )
        assert (await change(client, router, "one/drain"))[0] == 200, "idempotent"
        assert [await replica_of(client, router) for _ in range(3)] == ["two"] * 3
        waiting = asyncio.create_task(change(client, router, "one/drain?wait_s=60"))
        # It is answered after this request, which comes later and is not held up.
        assert (await told(client, router))["one"]["in_flight"] == 1
        assert not waiting.done()
        end.set()
        assert b"[DONE]" in await running.read()
    status, answer = await waiting
    assert (status, answer["in_flight"]) == (200, 0)
    await eventually(lambda: router.in_flight() == 0)


async def test_a_drain_waits_no_longer_than_it_may(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(stream(*chat_events("a", "b"), gates=(None, asyncio.Event())))
    router = await fleet.router()
    async with client.post(router.url + CHAT, json=ASK) as running:
        await running.content.readany()
        status, answer = await change(client, router, "one/drain?wait_s=0.2")
        assert (status, answer["in_flight"], answer["state"]) == (200, 1, "draining")


async def test_a_resumed_replica_is_used_again(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    router = await fleet.router()
    await change(client, router, "one/drain")
    assert (await change(client, router, "one/resume"))[1]["state"] in ("unknown", "up")
    replica = router.parts.fleet.replicas["one"]
    await eventually(lambda: replica.state == "up")
    assert {await replica_of(client, router) for _ in range(2)} == {"one", "two"}
    status, answer = await change(client, router, "one/resume")
    assert (status, answer["state"]) == (200, "up"), "one that does not drain stays as it is"


async def test_a_drained_replica_that_dies_is_down_once_resumed(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    router = await fleet.router()
    await change(client, router, "one/drain")
    fleet.one.healthy = False
    replica = router.parts.fleet.replicas["one"]
    await eventually(lambda: bool(replica.why_down))
    assert (await told(client, router))["one"]["why"] == ("it is draining; /health answers 503")
    await change(client, router, "one/resume")
    await eventually(lambda: replica.state == "down")


async def test_the_only_replica_may_be_drained(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    router = await fleet.router(replicas=(ReplicaConfig(url=fleet.one.url, instance_id="one"),))
    await change(client, router, "one/drain")
    async with client.post(router.url + CHAT, json=ASK) as response:
        assert response.status == 503
        assert "one draining" in (await response.json())["error"]["message"]


async def test_unknown_ids_are_answered_with_those_that_are_known(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    router = await fleet.router()
    for what in ("nobody/drain", "nobody/resume"):
        status, answer = await change(client, router, what)
        assert status == 404
        assert answer["error"]["message"] == "there is no replica 'nobody'; known: one, two"


@pytest.mark.parametrize("wait_s", ["-1", "nan", "soon", "1e9"])
async def test_a_wait_that_is_no_wait(
    fleet: Fleet, client: aiohttp.ClientSession, wait_s: str
) -> None:
    router = await fleet.router()
    status, answer = await change(client, router, f"one/drain?wait_s={wait_s}")
    assert (status, answer["error"]["param"]) == (400, "wait_s")
    assert router.parts.fleet.replicas["one"].state == "up"


async def test_methods_and_origins_that_may_not_change_replicas(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """A page of another site may send a plain POST from an administrator's browser."""
    router = await fleet.router()
    async with client.get(f"{router.url}/replicas/one/drain") as response:
        assert response.status == 405
    for what in ("one/drain", "one/resume"):
        status, _ = await change(client, router, what, Origin="http://evil.example")
        assert status == 403
    assert router.parts.fleet.replicas["one"].state == "up"
    assert (await change(client, router, "one/drain", Origin=router.url))[0] == 200


async def test_the_commands_drain_and_resume(fleet: Fleet, eventually: Wait) -> None:
    replicas = (
        ReplicaConfig(url=fleet.one.url, instance_id="a/b:1"),
        ReplicaConfig(url=fleet.two.url, instance_id="two"),
    )
    router = await fleet.router(replicas=replicas)

    async def command(*args: str) -> tuple[int, str]:
        args = (*args, "--router", router.url)
        done = await asyncio.to_thread(CliRunner().invoke, main, args)
        return done.exit_code, done.output

    assert await command("drain", "a/b:1") == (0, "a/b:1 is draining; 0 requests in flight\n")
    assert (await command("resume", "a/b:1"))[0] == 0
    await eventually(lambda: router.parts.fleet.replicas["a/b:1"].state == "up")
    code, said = await command("drain", "nobody")
    assert (code, said) == (1, "Error: there is no replica 'nobody'; known: a/b:1, two\n")


async def test_the_command_says_that_requests_still_run(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(stream(*chat_events("a", "b"), gates=(None, asyncio.Event())))
    router = await fleet.router()
    async with client.post(router.url + CHAT, json=ASK) as running:
        await running.content.readany()
        args = ["drain", "one", "--wait-s", "0.1", "--router", router.url]
        done = await asyncio.to_thread(CliRunner().invoke, main, args)
    assert (done.exit_code, done.output) == (1, "one is draining; 1 request in flight\n")


async def test_draining_needs_an_admin_key(fleet: Fleet, stranger: aiohttp.ClientSession) -> None:
    admin = new_key()
    router = await fleet.router(access=AccessConfig(admin_sha256=(sha256_of(admin),)))
    given = {"Authorization": f"Bearer {admin}"}
    assert (await change(stranger, router, "one/drain"))[0] == 401
    assert (await change(stranger, router, "one/drain", **given))[0] == 200
