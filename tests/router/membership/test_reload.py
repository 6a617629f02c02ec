"""The configuration's file is rewritten while the router runs."""

import asyncio
import hashlib
import logging
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from router.config.loading import load_router_config
from router.config.settings import ReplicaConfig, RouterConfig
from router.fleet.replica import ReplicaState
from router.membership.membership import Source
from router.membership.reload import ConfigFile, Reload
from tests.router.conftest import Running, Wait
from tests.router.membership.conftest import Reloading
from tests.router.scripted import chat_events, json_answer, stream
from warmroute_common.config_reader import live_settings

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def named(running: Running) -> set[str]:
    return set(running.parts.fleet.replicas)


async def reload(running: Running) -> None:
    await running.parts.reload.now()


async def ask(client: aiohttp.ClientSession, running: Running, **headers: str) -> int:
    url = f"{running.url}/v1/chat/completions"
    async with client.post(url, json=CHAT, headers=headers) as response:
        await response.read()
        return response.status


async def health(client: aiohttp.ClientSession, running: Running) -> dict[str, Any]:
    async with client.get(f"{running.url}/health") as response:
        told: dict[str, Any] = await response.json()
        return told


async def metrics(client: aiohttp.ClientSession, running: Running) -> str:
    async with client.get(f"{running.url}/metrics") as response:
        return await response.text()


async def test_replicas_join_and_leave(
    reloading: Reloading, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    one, two = await reloading.upstream(), await reloading.upstream()
    reloading.write([one])
    running = await reloading.router()
    assert await ask(client, running) == 200
    reloading.write([two])
    await reload(running)
    await eventually(lambda: named(running) == {"r1"})
    assert await ask(client, running) == 200
    assert (len(one.seen), len(two.seen)) == (1, 1)
    assert (await health(client, running))["replicas"] == {"r1": {"url": two.url, "state": "up"}}


async def test_the_file_is_looked_at_without_being_told(
    reloading: Reloading, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    one, two = await reloading.upstream(), await reloading.upstream()
    reloading.write([one])
    running = await reloading.router()
    reloading.write([one, two])
    await eventually(lambda: named(running) == {"r0", "r1"})


async def test_links_are_followed_as_kubernetes_exchanges_them(
    reloading: Reloading, tmp_path: Path, eventually: Wait
) -> None:
    """A mounted ConfigMap is a link to a link: the inner one is what is exchanged."""
    one, two = await reloading.upstream(), await reloading.upstream()
    (tmp_path / "v1").mkdir()
    (tmp_path / "v2").mkdir()
    real, reloading.path = reloading.path, tmp_path / "v1" / "router.yaml"
    reloading.write([one])
    reloading.path = tmp_path / "v2" / "router.yaml"
    reloading.write([two])
    (tmp_path / "data").symlink_to("v1")
    real.symlink_to("data/router.yaml")
    reloading.path = real
    running = await reloading.router()
    (tmp_path / "new").symlink_to("v2")
    (tmp_path / "new").replace(tmp_path / "data")
    await eventually(lambda: named(running) == {"r1"})


async def test_the_old_ones_serve_until_the_new_ones_were_probed(
    reloading: Reloading, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """Else requests would go to replicas of which nothing is known yet."""
    one, two = await reloading.upstream(), await reloading.upstream()
    two.probe_gate.clear()
    timeouts = {"health_interval_s": 0.05, "health_timeout_s": 60}
    reloading.write([one], timeouts=timeouts)
    running = await reloading.router()
    reloading.write([two], timeouts=timeouts)
    await reload(running)
    await eventually(lambda: named(running) == {"r0", "r1"})
    assert [await ask(client, running) for _ in range(5)] == [200] * 5
    assert (len(one.seen), len(two.seen)) == (5, 0)
    two.probe_gate.set()
    await eventually(lambda: named(running) == {"r1"})
    assert await ask(client, running) == 200
    assert (len(one.seen), len(two.seen)) == (5, 1)


async def test_a_replica_that_leaves_answers_what_it_has(
    reloading: Reloading,
    client: aiohttp.ClientSession,
    eventually: Wait,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "warmroute.membership")
    one, two = await reloading.upstream(), await reloading.upstream()
    gate = asyncio.Event()
    one.will(stream(*chat_events("a", "b"), gates=(None, gate)))
    reloading.write([one])
    running = await reloading.router()
    async with client.post(f"{running.url}/v1/chat/completions", json=CHAT) as response:
        await response.content.readany()
        replica = running.parts.fleet.replicas["r0"]
        reloading.write([two])
        await reload(running)
        await eventually(lambda: replica.state is ReplicaState.DRAINING)
        assert "r0 is leaving the fleet, with 1 request in flight" in caplog.text
        assert await ask(client, running) == 200
        assert len(two.seen) == 1
        gate.set()
        assert b"[DONE]" in await response.read()
    await eventually(lambda: named(running) == {"r1"})
    assert replica.in_flight == 0


async def test_what_is_held_for_a_replica_that_leaves_goes_to_the_one_that_joined(
    reloading: Reloading, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """It waits for no replica that is gone."""
    one, two = await reloading.upstream(), await reloading.upstream()
    gate = asyncio.Event()
    one.will(stream(*chat_events("a"), gates=(gate,)))
    slow = {
        "policy": "ttft",
        "rates": {"prefill_tokens_per_s": 0.1},
        "admission": {"max_wait_s": 360_000},
    }
    reloading.write([one], **slow)
    running = await reloading.router()
    first = asyncio.create_task(ask(client, running))
    await one.arrived.wait()
    other = CHAT | {"messages": [{"role": "user", "content": "something else " * 10}]}
    held = asyncio.create_task(client.post(f"{running.url}/v1/chat/completions", json=other))
    await eventually(lambda: len(running.parts.admission) == 1)
    reloading.write([two], **slow)
    await reload(running)
    async with await held as response:
        assert response.status == 200
    assert len(two.seen) == 1
    gate.set()
    assert await first == 200
    await eventually(lambda: named(running) == {"r1"})
    assert (running.in_flight(), len(running.parts.admission)) == (0, 0)


async def test_one_that_drains_too_long_is_forgotten_and_its_requests_go_on(
    reloading: Reloading, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    one, two = await reloading.upstream(), await reloading.upstream()
    gate = asyncio.Event()
    one.will(stream(*chat_events("a", "b"), gates=(None, gate)))
    timeouts = {"health_interval_s": 0.05, "health_timeout_s": 60, "drain_s": 0.1}
    reloading.write([one], timeouts=timeouts)
    running = await reloading.router()
    async with client.post(f"{running.url}/v1/chat/completions", json=CHAT) as response:
        await response.content.readany()
        replica = running.parts.fleet.replicas["r0"]
        reloading.write([two], timeouts=timeouts)
        await reload(running)
        await eventually(lambda: replica.is_removed)
        assert replica.in_flight == 1
        gate.set()
        assert b"[DONE]" in await response.read()
    await eventually(lambda: replica.in_flight == 0)
    await running.record()
    assert (
        'warmroute_requests_total{endpoint="/v1/chat/completions",outcome="ok",replica="removed"'
        in (await metrics(client, running))
    )


async def test_one_that_comes_back_while_it_drains_stays(
    reloading: Reloading, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    one, two = await reloading.upstream(), await reloading.upstream()
    gate = asyncio.Event()
    one.will(stream(*chat_events("a", "b"), gates=(None, gate)), json_answer({"ok": True}))
    reloading.write([one, two])
    running = await reloading.router()
    async with client.post(f"{running.url}/v1/chat/completions", json=CHAT) as response:
        await response.content.readany()
        replica = running.parts.fleet.replicas["r0"]
        reloading.write([two])
        await reload(running)
        await eventually(lambda: replica.state is ReplicaState.DRAINING)
        reloading.write([one, two])
        await reload(running)
        await eventually(lambda: replica.state is ReplicaState.UP)
        gate.set()
        await response.read()
    assert running.parts.fleet.replicas["r0"] is replica


async def test_a_changed_replica_begins_anew_and_another_key_does_not(
    reloading: Reloading, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    one = await reloading.upstream()
    reloading.write([{"url": one.url, "api_key": "first"}])
    running = await reloading.router()
    (replica,) = running.parts.fleet.replicas.values()
    reloading.write([{"url": one.url, "api_key": "second"}])
    await reload(running)
    await eventually(lambda: replica.config.api_key == "second")
    assert await ask(client, running) == 200
    assert one.seen[-1].headers["Authorization"] == "Bearer second"
    assert list(running.parts.fleet.replicas.values()) == [replica]
    reloading.write([{"url": one.url, "instance_id": "other"}])
    await reload(running)
    await eventually(lambda: named(running) == {"other"})
    assert replica.is_removed
    assert await ask(client, running) == 200


async def test_replicas_that_exchange_their_names(
    reloading: Reloading, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    one, two = await reloading.upstream(), await reloading.upstream()
    pair = [(one.url, "a"), (two.url, "b")]
    reloading.write([{"url": url, "instance_id": name} for url, name in pair])
    running = await reloading.router()
    pair = [(one.url, "b"), (two.url, "a")]
    reloading.write([{"url": url, "instance_id": name} for url, name in pair])
    await reload(running)
    replicas = running.parts.fleet.replicas
    await eventually(
        lambda: {(each.config.url, each.id) for each in replicas.values()} == set(pair)
    )
    await eventually(lambda: all(each.state is ReplicaState.UP for each in replicas.values()))


async def test_a_name_goes_from_one_address_to_another(
    reloading: Reloading,
    client: aiohttp.ClientSession,
    eventually: Wait,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Though the old replica of that name still has a request."""
    one, two = await reloading.upstream(), await reloading.upstream()
    gate = asyncio.Event()
    one.will(stream(*chat_events("a", "b"), gates=(None, gate)))
    reloading.write([{"url": one.url, "instance_id": "a"}])
    running = await reloading.router()
    async with client.post(f"{running.url}/v1/chat/completions", json=CHAT) as response:
        await response.content.readany()
        reloading.write([{"url": two.url, "instance_id": "a"}])
        await reload(running)
        await eventually(lambda: running.parts.fleet.replicas["a"].config.url == two.url)
        gate.set()
        assert b"[DONE]" in await response.read()
    assert await ask(client, running) == 200
    assert len(two.seen) == 1
    assert "cannot join" not in caplog.text


async def test_a_name_that_is_another_s_cannot_join(
    reloading: Reloading, eventually: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once; and it joins when that one has left."""
    one, two = await reloading.upstream(), await reloading.upstream()
    reloading.write([one])
    running = await reloading.router()
    named_like = ReplicaConfig(url=two.url, instance_id="r0")
    running.parts.members.name(Source.DNS, [named_like])
    await eventually(lambda: "cannot join the fleet" in caplog.text)
    running.parts.members.name(Source.DNS, [named_like])
    reloading.write([{"url": one.url, "instance_id": "other"}])
    await reload(running)
    await eventually(lambda: named(running) == {"other", "r0"})
    assert running.parts.fleet.replicas["r0"].config.url == two.url
    assert caplog.text.count("cannot join the fleet") == 1


async def test_series_of_a_removed_replica_disappear(
    reloading: Reloading, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    one, two = await reloading.upstream(), await reloading.upstream()
    reloading.write([one, two])
    running = await reloading.router()
    for _ in range(2):
        assert await ask(client, running) == 200
    await running.record(2)
    before = await metrics(client, running)
    assert all(f'replica="{name}"' in before for name in ("r0", "r1"))
    reloading.write([two])
    await reload(running)
    await eventually(lambda: named(running) == {"r1"})
    after = await metrics(client, running)
    assert 'replica="r0"' not in after
    assert (
        'warmroute_requests_total{endpoint="/v1/chat/completions",outcome="ok",replica="r1"'
        in after
    )
    assert 'warmroute_config_reloads_total{result="applied"} 1.0' in after


async def test_a_bad_file_changes_nothing_and_says_why(
    reloading: Reloading,
    client: aiohttp.ClientSession,
    eventually: Wait,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = await reloading.upstream()
    reloading.write([one])
    running = await reloading.router()
    for text, why in (
        ("replicas: [{url: nonsense}]", "'nonsense' is not an HTTP base URL"),
        ("replicas: [", "not valid YAML"),
        ("", "is empty"),
    ):
        caplog.clear()
        reloading.path.write_text(text)
        await reload(running)
        (line,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
        assert "configuration not reloaded" in line
        assert why in line
        assert why in (await health(client, running))["configuration"]["problem"]
    reloading.path.unlink()
    await reload(running)
    assert "no such file" in (await health(client, running))["configuration"]["problem"]
    assert named(running) == {"r0"}
    assert await ask(client, running) == 200
    assert 'warmroute_config_reloads_total{result="refused"} 4.0' in await metrics(client, running)
    reloading.write([one])
    await reload(running)
    assert (await health(client, running))["configuration"]["problem"] is None


@contextmanager
def no_files() -> Iterator[None]:
    """Let this process open no more files while the block runs."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_file_that_a_router_without_descriptors_cannot_open_is_read_later(
    reloading: Reloading, eventually: Wait
) -> None:
    one, two = await reloading.upstream(), await reloading.upstream()
    reloading.write([one])
    running = await reloading.router()
    reloading.write([one, two])
    with no_files():
        await reload(running)
        assert running.parts.reload.problem is None and named(running) == {"r0"}
    await eventually(lambda: named(running) == {"r0", "r1"})
    assert running.parts.reload.counts["refused"] == 0


async def test_a_router_without_descriptors_does_not_take_its_file_for_changed(
    reloading: Reloading,
) -> None:
    reloading.write([await reloading.upstream()])
    config = await asyncio.to_thread(load_router_config, reloading.path)
    file = ConfigFile(path=reloading.path, read=lambda: load_router_config(reloading.path))
    nothing = dict.fromkeys(live_settings(RouterConfig), lambda _: None)
    looking = Reload(config, file, nothing, look_every_s=0.01)
    await looking.start()
    try:
        with no_files():
            await asyncio.sleep(0.3)  # some looks
    finally:
        await looking.stop()
    assert looking.counts == {"applied": 0, "refused": 0}


async def test_what_cannot_change_is_named_and_the_rest_is_used(
    reloading: Reloading,
    client: aiohttp.ClientSession,
    eventually: Wait,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = await reloading.upstream(), await reloading.upstream()
    reloading.write([one])
    running = await reloading.router()
    caplog.set_level(logging.INFO)
    reloading.write([two], retries=7, admission={"max_waiting": 3}, host="127.0.0.2")
    await reload(running)
    lines = [each.getMessage() for each in caplog.records if "reloaded" in each.getMessage()]
    assert lines == [
        "configuration reloaded; applied: replicas",
        "configuration reloaded; restart the router to apply: admission, host, retries",
    ]
    caplog.clear()
    reloading.write([two], retries=8, admission={"max_waiting": 3}, host="127.0.0.2")
    await reload(running)
    lines = [each.getMessage() for each in caplog.records if "reloaded" in each.getMessage()]
    assert lines == [
        "configuration reloaded; restart the router to apply: admission, host, retries"
    ]
    await eventually(lambda: named(running) == {"r1"})
    told = (await health(client, running))["configuration"]
    assert told == {"problem": None, "used_at_next_start": ["admission", "host", "retries"]}


def key_of(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **more}


async def test_keys_change_and_what_was_used_of_others_stays_used(
    reloading: Reloading, client: aiohttp.ClientSession, tmp_path: Path, eventually: Wait
) -> None:
    one = await reloading.upstream()
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [key_of("anna", requests_per_minute=2), key_of("bo")]}))
    reloading.write([one], access={"keys_file": str(keys)})
    running = await reloading.router()

    async def answers(name: str) -> int:
        return await ask(client, running, Authorization=f"Bearer {name}")

    assert [await answers(name) for name in ("anna", "bo", "carl")] == [200, 200, 401]
    keys.write_text(
        yaml.safe_dump({"keys": [key_of("anna", requests_per_minute=2), key_of("carl")]})
    )
    await eventually(lambda: running.parts.reload.counts["applied"] > 0)
    assert [await answers(name) for name in ("bo", "carl", "anna", "anna")] == [401, 200, 200, 429]


async def test_aliases_passed_paths_and_the_log_level_change(
    reloading: Reloading, client: aiohttp.ClientSession
) -> None:
    one = await reloading.upstream()
    reloading.write([one])
    running = await reloading.router()

    async def status(path: str, **body: Any) -> int:
        async with client.post(f"{running.url}{path}", json=body) as response:
            return response.status

    chat = {"messages": CHAT["messages"], "model": "short"}
    assert await status("/v1/chat/completions", **chat) == 404
    assert await status("/mine") == 404
    reloading.write([one], model_aliases={"short": "m"}, passthrough=["/mine"], log_level="error")
    await reload(running)
    assert logging.getLogger().level == logging.ERROR
    assert await status("/v1/chat/completions", **chat) == 200
    assert await status("/mine") == 200
    async with client.get(f"{running.url}/v1/models") as response:
        assert {each["id"] for each in (await response.json())["data"]} == {"m", "short"}


async def streamed_if_asked(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    act = stream(*chat_events("a", "b")) if asked["stream"] else json_answer({"ok": True})
    return await act(request)


async def test_no_request_is_lost_while_the_fleet_changes_all_the_time(
    reloading: Reloading, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """Twenty times other replicas of six, under constant traffic, a third of it streamed."""
    upstreams = [await reloading.upstream() for _ in range(6)]
    for each in upstreams:
        each.will(streamed_if_asked)
    # A busy machine must not look like replicas that are down.
    timeouts = {"health_interval_s": 0.05, "health_timeout_s": 60}
    reloading.write(upstreams[:3], timeouts=timeouts)
    running = await reloading.router()
    chosen, ended, answers = random.Random(7), asyncio.Event(), list[tuple[int, bool]]()

    async def traffic(is_streamed: bool) -> None:
        url, body = f"{running.url}/v1/chat/completions", CHAT | {"stream": is_streamed}
        while not ended.is_set():
            async with client.post(url, json=body) as response:
                is_whole = (b"[DONE]" if is_streamed else b'"ok": true') in await response.read()
                answers.append((response.status, is_whole))

    def has_gone_on(wanted: set[str], count: int) -> bool:
        return named(running) == wanted and len(answers) > count

    askers = [asyncio.create_task(traffic(number % 3 == 0)) for number in range(9)]
    for _ in range(20):
        names = chosen.sample(upstreams, chosen.randint(1, 4))
        reloading.write(names, timeouts=timeouts)
        asked = len(answers)
        await reload(running)
        wanted = {f"r{upstreams.index(each)}" for each in names}
        await eventually(partial(has_gone_on, wanted, asked + 20))
    ended.set()
    await asyncio.gather(*askers)
    assert set(answers) == {(200, True)}
    assert running.in_flight() == 0
    running.parts.fleet.replicas.check()
    running.parts.fleet.index.check()
