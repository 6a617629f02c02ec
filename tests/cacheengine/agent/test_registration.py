"""An agent and its controller: one that is there, away, forgetful, or refuses."""

import asyncio
import json
import logging
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from cacheengine.agent.agent import Agent
from cacheengine.agent.peers import AgentHttpClient, ControllerRegistration
from cacheengine.settings.engine_config import EngineConfig
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import wait_until
from tests.cacheengine.whole_replica import identity
from warmroute_common import agent_protocol as wire
from warmroute_common.fleet_secret import FleetSecret

SECRET = FleetSecret("known-to-the-fleet-alone")
REGISTRATION = wire.Registration(
    instance_id="one",
    incarnation="i",
    agent_url="http://127.0.0.1:8101",
    transfer_port=8004,
    heartbeat_s=7.0,
)


class Controller:
    """Answers what it is told to, and notes what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.shown: list[str | None] = []
        self.status = 200
        self.knows = False

    async def answer(self, request: web.Request) -> web.Response:
        self.shown.append(request.headers.get("Authorization"))
        self.calls.append((request.path, json.loads(await request.read())))
        if self.status != 200:
            return web.json_response({"error": {"message": "not now"}}, status=self.status)
        if request.path == "/register":
            self.knows = True
        return web.json_response({}, status=200 if self.knows else 404)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/{path}", self.answer)
        return app


class Turns:
    """Stands for time: the registrar's pauses end when the test says so."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self._paused = asyncio.Semaphore(0)
        self._go_on = asyncio.Semaphore(0)

    async def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self._paused.release()
        await self._go_on.acquire()

    async def next(self) -> None:
        """Let a pause end, and the registrar come to the next one."""
        self._go_on.release()
        await self.reach()

    async def reach(self) -> None:
        async with asyncio.timeout(20):
            await self._paused.acquire()


@asynccontextmanager
async def registrar(url: str) -> AsyncIterator[tuple[ControllerRegistration, Turns]]:
    turns = Turns()
    async with aiohttp.ClientSession() as session:
        registrar = ControllerRegistration(
            AgentHttpClient(session, None), url, REGISTRATION, sleep=turns.sleep
        )
        task = asyncio.create_task(registrar.run())
        await turns.reach()
        yield registrar, turns
        task.cancel()
        await asyncio.wait([task])


Serve = Callable[[], Awaitable[tuple[Controller, str]]]


@pytest.fixture
async def controller() -> AsyncIterator[tuple[Controller, str]]:
    controller = Controller()
    async with TestServer(controller.app()) as server:
        yield controller, str(server.make_url("/"))


async def test_registers_then_beats_then_leaves(controller: tuple[Controller, str]) -> None:
    heard, url = controller
    async with registrar(url) as (it, turns):
        await turns.next()
        await turns.next()
        assert turns.pauses == [7.0, 7.0, 7.0]
        await it.leave()
        await it.leave()
    assert heard.paths == ["/register", "/heartbeat", "/heartbeat", "/deregister"]
    assert heard.calls[0][1] == {
        "instance_id": "one",
        "incarnation": "i",
        "agent_url": "http://127.0.0.1:8101",
        "transfer_port": 8004,
        "heartbeat_s": 7.0,
    }
    assert heard.calls[1][1] == heard.calls[3][1] == {"instance_id": "one", "incarnation": "i"}


async def test_a_controller_that_started_anew_is_told_again(
    controller: tuple[Controller, str],
) -> None:
    heard, url = controller
    async with registrar(url) as (_, turns):
        heard.knows = False
        await turns.next()
    assert heard.paths == ["/register", "/heartbeat", "/register"]


async def test_a_controller_that_is_away_is_tried_ever_less_often(
    controller: tuple[Controller, str], caplog: pytest.LogCaptureFixture
) -> None:
    heard, url = controller
    with caplog.at_level(logging.INFO, logger="vllm.warmroute"):
        async with registrar(url) as (_, turns):
            heard.status = 503
            for _ in range(8):
                await turns.next()
            assert turns.pauses[1:] == [0.5, 1, 2, 4, 8, 16, 30, 30]
            heard.status = 200
            await turns.next()
            assert turns.pauses[-1] == 7.0
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert "one is registered" in lines[0]
    assert "keeps trying" in lines[1] and "503: not now" in lines[1]
    assert "one is registered" in lines[2]


async def test_nobody_there_at_the_start_is_no_reason_to_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    controller, port = Controller(), unused_port()
    with caplog.at_level(logging.INFO, logger="vllm.warmroute"):
        async with registrar(f"http://127.0.0.1:{port}") as (it, turns):
            await turns.next()
            assert turns.pauses == [0.5, 1]
            assert len(caplog.records) == 1
            await it.leave()  # nothing to leave
            async with TestServer(controller.app(), port=port):
                await turns.next()
    assert controller.paths == ["/register"]


async def test_a_server_that_knows_no_registration_is_a_failure(
    controller: tuple[Controller, str],
) -> None:
    heard, url = controller
    heard.status = 404
    async with registrar(url) as (_, turns):
        assert turns.pauses == [0.5]
    assert heard.paths == ["/register"]


@pytest.mark.parametrize(
    ("host", "told"), [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://:")]
)
async def test_an_agent_registers_while_it_serves(
    make_bench: MakeBench,
    controller: tuple[Controller, str],
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    told: str,
) -> None:
    # At its end it takes its leave, however busy the machine is.
    monkeypatch.setattr("cacheengine.agent.peers._DEREGISTER_S", 60.0)
    heard, url = controller
    config = EngineConfig(
        lmcache_worker_port=0,
        agent_host=host,
        fleet_secret=SECRET,
        enable_controller=True,
        controller_url=url.rstrip("/"),
        lmcache_worker_heartbeat_time=0.01,
        openai_url="http://:8000",
    )
    agent = Agent(make_bench(2).engine, identity("two"), config)
    await asyncio.to_thread(agent.start)
    assert agent.address is not None
    await asyncio.to_thread(wait_until, lambda: "/heartbeat" in heard.paths)
    await asyncio.to_thread(agent.stop, 60.0)
    registered = heard.calls[0][1]
    assert registered["agent_url"] == f"{told}{agent.address[1]}"
    assert (registered["instance_id"], registered["heartbeat_s"]) == ("two", 0.01)
    assert registered["openai_url"] == "http://:8000"
    assert heard.paths[-1] == "/deregister"
    assert set(heard.shown) == {f"Bearer {SECRET.token}"}


async def test_an_agent_that_a_controller_elsewhere_cannot_reach_says_so(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(
        lmcache_worker_port=0, enable_controller=True, controller_url="192.0.2.1:9001"
    )
    agent = Agent(make_bench(2).engine, identity("two"), config)
    await asyncio.to_thread(agent.start)
    await asyncio.to_thread(agent.stop)
    assert "http://192.0.2.1:9001 cannot reach this agent at 127.0.0.1:" in caplog.text
    assert "set agent_host" in caplog.text


async def test_an_agent_starts_and_stops_without_its_controller(make_bench: MakeBench) -> None:
    config = EngineConfig(
        lmcache_worker_port=0,
        enable_controller=True,
        controller_url=f"localhost:{unused_port()}",
    )
    agent = Agent(make_bench(2).engine, identity("two"), config)
    await asyncio.to_thread(agent.start)
    async with asyncio.timeout(5):
        await asyncio.to_thread(agent.stop)


async def test_a_secret_is_sent_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Authorization"))
        return web.json_response({}, status=401 if len(asked) < 2 else 200)

    app = web.Application()
    app.router.add_post("/register", answer)
    caplog.set_level(logging.INFO)
    async with TestServer(app) as server:
        url = f"http://any:s3cret@127.0.0.1:{server.port}"
        async with registrar(url) as (_, turns):
            await turns.next()
    assert asked == [f"Basic {b64encode(b'any:s3cret').decode()}"] * 2
    assert "is registered" in caplog.text
    assert "401" in caplog.text
    assert "s3cret" not in caplog.text
