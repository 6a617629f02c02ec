"""Who lives, found by asking at intervals and by what requests meet."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp
import pytest

from router.config.settings import ReplicaConfig, TimeoutsConfig
from router.feeds.health import HealthMonitor, Listener
from router.prompt.readers import ServedModel
from router.proxy.upstream import client_session
from router.record.records import Cause
from tests.router.conftest import Wait
from tests.router.scripted import scripted


@dataclass
class Heard:
    """What a monitor told, in order."""

    states: list[str] = field(default_factory=list)
    served: list[list[ServedModel]] = field(default_factory=list)
    capacities: list[int] = field(default_factory=list)

    def listener(self) -> Listener:
        async def models(name: str, served: list[ServedModel]) -> None:
            self.served.append(served)

        return Listener(
            up=lambda name: self.states.append(f"{name} up"),
            down=lambda name, reason: self.states.append(f"{name} down: {reason}"),
            models=models,
            kv_capacity=lambda name, tokens: self.capacities.append(tokens),
        )


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with client_session() as session:
        yield session


@asynccontextmanager
async def monitoring(
    session: aiohttp.ClientSession, url: str, heard: Heard, **timeouts: float
) -> AsyncIterator[HealthMonitor]:
    monitor = HealthMonitor(
        [ReplicaConfig(url=url, instance_id="r")],
        session=session,
        timeouts=TimeoutsConfig(**timeouts),
        listener=heard.listener(),
    )
    await monitor.start()
    try:
        yield monitor
    finally:
        await monitor.stop()


async def test_all_is_known_once_it_has_started(session: aiohttp.ClientSession) -> None:
    heard = Heard()
    async with scripted() as replica, monitoring(session, replica.url, heard):
        assert heard.states == ["r up"]
        assert heard.served == [[ServedModel(id="m", root="m")]]


async def test_a_replica_whose_first_probe_takes_long_holds_up_nobody(
    session: aiohttp.ClientSession, eventually: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has answered that it is well, and takes its time to tell what it serves."""
    monkeypatch.setattr("router.feeds.health._FIRST_PROBES_S", 0.01)
    heard = Heard()
    told = asyncio.Event()

    async def models(name: str, served: list[ServedModel]) -> None:
        await told.wait()

    async with scripted() as replica:
        monitor = HealthMonitor(
            [ReplicaConfig(url=replica.url, instance_id="r")],
            session=session,
            timeouts=TimeoutsConfig(),
            listener=replace(heard.listener(), models=models),
        )
        async with asyncio.timeout(20):
            await monitor.start()
        assert heard.states == []
        told.set()
        await eventually(lambda: heard.states == ["r up"])
        await monitor.stop()


@pytest.mark.parametrize(
    ("page", "capacities"),
    [
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n', [1600]),
        ('vllm:cache_config_info{block_size="16" 1.0\n', []),
    ],
)
async def test_a_replica_tells_its_kv_memory_if_it_can(
    session: aiohttp.ClientSession, page: str, capacities: list[int]
) -> None:
    heard = Heard()
    async with scripted() as replica:
        replica.metrics = page
        async with monitoring(session, replica.url, heard):
            assert (heard.states, heard.capacities) == (["r up"], capacities)


async def test_a_replica_without_a_health_endpoint_is_up(session: aiohttp.ClientSession) -> None:
    heard = Heard()
    async with scripted() as replica, monitoring(session, replica.url + "/prefix", heard):
        assert heard.states == ["r up"]
        assert heard.served == [], "it does not tell its models either"


async def test_ill_and_well_again(session: aiohttp.ClientSession, eventually: Wait) -> None:
    heard = Heard()
    async with (
        scripted() as replica,
        monitoring(session, replica.url, heard, health_interval_s=0.01),
    ):
        replica.healthy = False
        await eventually(lambda: len(heard.states) == 2)
        replica.healthy = True
        await eventually(lambda: len(heard.states) == 3)
    assert heard.states == ["r up", "r down: /health answers 503", "r up"]
    assert len(heard.served) == 2, "who comes back may serve other models"


async def test_a_failed_request_is_believed_and_checked_at_once(
    session: aiohttp.ClientSession, eventually: Wait
) -> None:
    heard = Heard()
    async with (
        scripted() as replica,
        monitoring(session, replica.url, heard, health_interval_s=3600) as monitor,
    ):
        monitor.suspect("r", Cause.CONNECT)
        assert heard.states[1] == "r down: a request found nobody listening"
        await eventually(lambda: len(heard.states) == 3)
    assert heard.states[2] == "r up", "found well by the probe that the suspicion caused"


async def test_a_cut_request_is_only_a_reason_to_ask(
    session: aiohttp.ClientSession, eventually: Wait
) -> None:
    heard = Heard()
    async with (
        scripted() as replica,
        monitoring(session, replica.url, heard, health_interval_s=3600) as monitor,
    ):
        replica.healthy = False
        monitor.suspect("r", Cause.CUT)
        assert heard.states == ["r up"]
        await eventually(lambda: len(heard.states) == 2)


async def test_silence_is_believed_only_after_a_while(
    session: aiohttp.ClientSession, eventually: Wait
) -> None:
    """The server accepts and says nothing: first well, then stuck for good."""
    heard = Heard()
    asked = 0
    stuck = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        line = await reader.readline()
        if b"/health" in line:
            asked += 1
        if not stuck.is_set():
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with monitoring(session, url, heard, health_interval_s=0.01, health_timeout_s=0.05):
        assert heard.states == ["r up"]
        stuck.set()
        asked = 0
        await eventually(lambda: len(heard.states) == 2)
        assert asked >= 3
    assert heard.states[1] == "r down: /health does not answer within 0.05 s"
    server.close()
    await server.wait_closed()


async def test_a_probe_that_fails_unforeseen_is_not_the_last(
    session: aiohttp.ClientSession, eventually: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard()
    told: list[str] = []

    async def models(name: str, served: list[ServedModel]) -> None:
        told.append(name)
        if len(told) == 1:
            raise RuntimeError("nobody foresaw this")

    async with scripted() as replica:
        monitor = HealthMonitor(
            [ReplicaConfig(url=replica.url, instance_id="r")],
            session=session,
            timeouts=TimeoutsConfig(health_interval_s=0.01),
            listener=replace(heard.listener(), models=models),
        )
        await monitor.start()
        await eventually(lambda: heard.states == ["r up"])
        await monitor.stop()
    assert "probing it failed" in caplog.text


async def test_the_models_root_is_what_vllm_says(session: aiohttp.ClientSession) -> None:
    heard = Heard()
    async with scripted() as replica:
        replica.entries = [
            {"id": "served", "root": "/models/base", "parent": None},
            {"id": "adapter", "root": "/adapters/a", "parent": "served"},
            {"name": "no id"},
        ]
        async with monitoring(session, replica.url, heard):
            pass
    assert heard.served == [
        [
            ServedModel(id="served", root="/models/base"),
            ServedModel(id="adapter", root="/models/base", adapter_path="/adapters/a"),
        ]
    ]
