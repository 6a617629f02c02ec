"""Replicas that the file does not name: by DNS, by registration, by Kubernetes; and together."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from cacheengine.agent.peers import AgentHttpClient, ControllerRegistration
from router.config.loading import load_router_config
from router.config.settings import (
    ControllerConfig,
    DiscoveredConfig,
    DiscoveryConfig,
    DnsConfig,
    KubernetesConfig,
    ReplicaConfig,
)
from router.fleet.replica import ReplicaState
from router.membership.discovery import DnsWatch, addresses
from router.membership.membership import Source
from tests.router.conftest import Fleet, Running, Wait
from tests.router.host_names import resolve_hosts
from tests.router.membership.kubernetes_api import endpoint, kubernetes_api, slice_of
from warmroute_common.agent_protocol import Registration
from warmroute_common.config_reader import ConfigError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def urls(running: Running) -> set[str]:
    return {each.config.url for each in running.parts.fleet.replicas.values()}


async def ask(client: aiohttp.ClientSession, running: Running) -> int:
    async with client.post(f"{running.url}/v1/chat/completions", json=CHAT) as response:
        await response.read()
        return response.status


# --- DNS


class Names:
    """Answers look-ups, or fails."""

    def __init__(self) -> None:
        self.hosts: list[str] | None = []
        self.asked = 0
        self.told: list[tuple[str, set[str]]] = []

    async def resolve(self, name: str, port: int) -> list[str]:
        assert (name, port) == ("vllm.here", 8000)
        self.asked += 1
        if self.hosts is None:
            raise OSError("no such name")
        return self.hosts

    def name(self, source: Source, replicas: Iterable[ReplicaConfig], *, part: str = "") -> None:
        assert source is Source.DNS
        self.told.append((part, {each.url for each in replicas}))


@asynccontextmanager
async def looking_up(names: Names, **each: Any) -> AsyncIterator[None]:
    config = DnsConfig(name="vllm.here", interval_s=0.01)
    watch = DnsWatch(config, DiscoveredConfig(**each), names.name, resolve=names.resolve)
    task = asyncio.create_task(watch.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_every_address_of_a_name_is_a_replica(eventually: Wait) -> None:
    names = Names()
    names.hosts = ["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.1"]
    part = "vllm.here:8000"
    async with looking_up(names):
        await eventually(lambda: len(names.told) > 1)
        ten = {"http://10.0.0.1:8000", "http://10.0.0.2:8000"}
        assert names.told[-1] == (part, ten | {"http://[fd00::1]:8000"})
        names.hosts = ["10.0.0.2"]
        await eventually(lambda: names.told[-1] == (part, {"http://10.0.0.2:8000"}))


async def test_a_look_up_that_fails_keeps_the_last_answer_and_is_said_once(
    eventually: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    names = Names()
    names.hosts = ["10.0.0.1"]
    async with looking_up(names):
        await eventually(lambda: bool(names.told))
        names.hosts = None
        await eventually(lambda: names.asked > 5)
        names.hosts = []
        await eventually(lambda: names.asked > 10)
    assert {part for _, each in names.told for part in each} == {"http://10.0.0.1:8000"}
    assert [each.getMessage() for each in caplog.records] == [
        "vllm.here:8000 cannot be resolved: no such name"
    ]


async def test_this_machine_s_resolver_is_asked() -> None:
    assert "127.0.0.1" in await addresses("localhost", 8000)


async def test_what_can_be_no_name_is_said_once(
    eventually: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    names = Names()
    config = DnsConfig(name="no..name", interval_s=0.01)
    watch = DnsWatch(config, DiscoveredConfig(), names.name)
    task = asyncio.create_task(watch.run())
    await eventually(lambda: bool(caplog.records))
    await asyncio.wait({task}, timeout=0.1)
    task.cancel()
    assert ["no..name:8000 cannot" in each.getMessage() for each in caplog.records] == [True]


async def test_a_router_without_configured_replicas_finds_them(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    eventually: Wait,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # "localhost" has a second address on many machines.
    resolve_hosts(monkeypatch, {"vllm.here": "127.0.0.1"})
    port = urlsplit(fleet.one.url).port
    assert port is not None
    discovery = DiscoveryConfig(
        dns=(DnsConfig(name="vllm.here", port=port, interval_s=0.1),),
        each=DiscoveredConfig(api_key="theirs"),
    )
    running = await fleet.router(replicas=(), discovery=discovery)
    await eventually(
        lambda: [each.state for each in running.parts.fleet.replicas.values()] == [ReplicaState.UP]
    )
    assert await ask(client, running) == 200
    assert fleet.one.seen[0].headers["Authorization"] == "Bearer theirs"


async def test_before_any_was_found_requests_are_told_to_come_again(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    discovery = DiscoveryConfig(dns=(DnsConfig(name="no..name"),))
    running = await fleet.router(replicas=(), discovery=discovery)
    async with client.post(f"{running.url}/v1/chat/completions", json=CHAT) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert (await response.json())["error"]["code"] == "no_replica"
    for path in ("/health", "/v1/models"):
        async with client.get(f"{running.url}{path}") as response:
            assert response.status == 503


# --- registration


@asynccontextmanager
async def monitor(running: Running) -> AsyncIterator[str]:
    controller = running.parts.controller
    assert controller is not None
    async with TestServer(controller.monitor()) as server:
        yield f"http://127.0.0.1:{server.port}"


def registration(openai_url: str | None, **more: Any) -> Registration:
    values: dict[str, Any] = {
        "instance_id": "joining",
        "incarnation": "i",
        "agent_url": "http://127.0.0.1:1",
        "transfer_port": None,
        "heartbeat_s": 60.0,
        "openai_url": openai_url,
    }
    return Registration(**(values | more))


@asynccontextmanager
async def registered(
    client: aiohttp.ClientSession, url: str, told: Registration
) -> AsyncIterator[ControllerRegistration]:
    registrar = ControllerRegistration(AgentHttpClient(client, None), url, told)
    task = asyncio.create_task(registrar.run())
    try:
        yield registrar
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


CONTROLLED = {
    "controller": ControllerConfig(secret="s3cret"),
    "discovery": DiscoveryConfig(registration=True),
}


async def test_an_agent_brings_its_replica_and_takes_it_away(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    running = await fleet.router(replicas=(), **CONTROLLED)
    port = urlsplit(fleet.two.url).port
    async with monitor(running) as url:
        known = url.replace("http://", "http://any:s3cret@")
        async with registered(client, known, registration(f"http://:{port}")) as registrar:
            await eventually(lambda: urls(running) == {fleet.two.url})
            (replica,) = running.parts.fleet.replicas.values()
            assert replica.config.agent_url == "http://127.0.0.1:1"
            await eventually(lambda: replica.state is ReplicaState.UP)
            assert await ask(client, running) == 200
            await registrar.leave()
            await eventually(lambda: urls(running) == set())


async def test_a_silent_agent_takes_its_replica_away(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    eventually: Wait,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without another call to the controller that would show it."""
    running = await fleet.router(replicas=(), **CONTROLLED)
    async with monitor(running) as url:
        told = {"Authorization": "Bearer s3cret"}
        body = {
            "instance_id": "joining",
            "incarnation": "i",
            "agent_url": "http://127.0.0.1:1",
            "transfer_port": None,
            "heartbeat_s": 60.0,
            "openai_url": fleet.two.url,
        }
        async with client.post(f"{url}/register", json=body, headers=told) as response:
            assert response.status == 200
        await eventually(lambda: urls(running) == {fleet.two.url})
        monkeypatch.setattr(running.parts.controller, "_clock", lambda: time.monotonic() + 3600.0)
        await eventually(lambda: urls(running) == set())


async def test_without_the_secret_none_joins_nor_takes_another_s_name(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    running = await fleet.router(replicas=(), **CONTROLLED)
    controller = running.parts.controller
    assert controller is not None
    async with monitor(running) as url:
        for path in ("/register", "/heartbeat", "/deregister"):
            async with client.post(f"{url}{path}", json={}) as response:
                assert response.status == 401
    assert controller.registrations() == []


async def test_an_agent_joins_only_where_that_is_permitted(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    running = await fleet.router(controller=ControllerConfig(secret="s3cret"))
    controller = running.parts.controller
    assert controller is not None
    before = urls(running)
    told = registration("http://127.0.0.1:3")
    async with monitor(running) as url, registered(client, url, told):
        await eventually(lambda: len(controller.registrations()) == 1)
        assert not running.parts.discovery.sources
        assert urls(running) == before


async def test_a_registration_completes_what_another_source_knows(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """Two sources of one URL make one replica, and the file's settings win."""
    async with kubernetes_api() as api:
        port = urlsplit(fleet.two.url).port
        assert port is not None
        await api.put(slice_of("a", endpoint("127.0.0.1", "pod"), port=port))
        kubernetes = KubernetesConfig(service="vllm", namespace="here", api_url=api.url)
        discovery = DiscoveryConfig(registration=True, kubernetes=kubernetes)
        running = await fleet.router(
            replicas=(ReplicaConfig(url=fleet.one.url, instance_id="one"),),
            controller=ControllerConfig(),
            discovery=discovery,
        )
        replicas = running.parts.fleet.replicas
        await eventually(lambda: set(replicas) == {"one", "pod"})
        async with monitor(running) as url:
            async with registered(client, url, registration(fleet.two.url)) as registrar:
                async with registered(
                    client, url, registration(fleet.one.url, instance_id="other")
                ):
                    await eventually(
                        lambda: (
                            {(each.config.url, each.config.agent_url) for each in replicas.values()}
                            == {(fleet.one.url, None), (fleet.two.url, "http://127.0.0.1:1")}
                        )
                    )
                await registrar.leave()
            await eventually(lambda: set(replicas) == {"one", "pod"})
        await api.delete("a")
        await eventually(lambda: set(replicas) == {"one"})


# --- the configuration


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("discovery: {}", "replicas: names no replica"),
        ("discovery: {registration: true}", "discovery.registration: is on, but there is no contr"),
        (
            "discovery: {kubernetes: {}}",
            "discovery.kubernetes: needs either a service or a selector",
        ),
        (
            "discovery: {kubernetes: {service: a, selector: b=c}}",
            "discovery.kubernetes: needs either",
        ),
        ("discovery: {kubernetes: {service: a, api_url: x}}", "discovery.kubernetes.api_url: 'x'"),
        ("discovery: {dns: [{name: a}, {name: a}]}", "discovery.dns[1]: a:8000 is also discov"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_router_config(path)
    assert str(caught.value).startswith(f"{path}: {problem}")


def test_a_file_that_finds_all_its_replicas_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("discovery: {dns: [{name: vllm}]}\n")
    assert load_router_config(path).discovery.is_on
