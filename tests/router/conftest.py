"""A router in front of scripted upstreams, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from blockbuster import blockbuster_ctx

from router.app import PARTS, Parts, create_app
from router.config.settings import ReplicaConfig, RouterConfig, TimeoutsConfig
from router.membership.reload import ConfigFile
from router.record.records import RequestRecord
from tests.cacheengine.conftest import make_bench  # noqa: F401  (a fixture)
from tests.router.scripted import Scripted, scripted
from warmroute_common.admin_token import HEADER as ADMIN_HEADER
from warmroute_common.admin_token import remove_admin_token, write_admin_token
from warmroute_common.http_server import Site

ADMIN_TOKEN = "the-token-of-these-tests"


@dataclass(kw_only=True)
class Running:
    """A router that runs, and what it has recorded."""

    url: str
    parts: Parts
    runner: web.AppRunner
    records: list[RequestRecord]
    recorded: asyncio.Condition

    async def record(self, count: int = 1) -> RequestRecord:
        """Wait for the ``count``-th record and return it."""
        async with self.recorded:
            await self.recorded.wait_for(lambda: len(self.records) >= count)
        return self.records[count - 1]

    async def record_of(self, request_id: str) -> RequestRecord:
        """Wait for the record of one request and return it."""
        async with self.recorded:
            await self.recorded.wait_for(
                lambda: any(each.request_id == request_id for each in self.records)
            )
        return next(each for each in self.records if each.request_id == request_id)

    def in_flight(self) -> int:
        return sum(each.in_flight for each in self.parts.fleet.replicas.values())


@dataclass(kw_only=True)
class Fleet:
    """Two upstreams, and a way to put a router in front of them."""

    one: Scripted
    two: Scripted
    stack: AsyncExitStack
    timeouts: TimeoutsConfig = field(
        default_factory=lambda: TimeoutsConfig(
            health_interval_s=0.05, health_timeout_s=30.0, drain_s=60.0
        )
    )

    async def router(self, **changes: Any) -> Running:
        """Run a router; by default round-robin, so that the first request goes to ``one``."""
        config = RouterConfig(
            port=0,
            policy="round-robin",
            replicas=(
                ReplicaConfig(url=self.one.url, instance_id="one"),
                ReplicaConfig(url=self.two.url, instance_id="two"),
            ),
            timeouts=self.timeouts,
        )
        return await run_router(self.stack, replace(config, **changes))


@pytest.fixture(autouse=True)
def patient_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router's first request finds the replicas compared and what their agents hold, on a slow
    machine too."""
    monkeypatch.setattr("router.feeds.health_monitor._FIRST_PROBES_S", 30.0)
    monkeypatch.setattr("router.feeds.feeds._START_WAIT_S", 30.0)


async def run_router(
    stack: AsyncExitStack, config: RouterConfig, *, file: ConfigFile | None = None
) -> Running:
    records: list[RequestRecord] = []
    recorded = asyncio.Condition()
    waking: set[asyncio.Task[None]] = set()

    async def wake() -> None:
        async with recorded:
            recorded.notify_all()

    class Reader:
        def observe(self, record: RequestRecord) -> None:
            records.append(record)
            task = asyncio.get_running_loop().create_task(wake())
            waking.add(task)
            task.add_done_callback(waking.discard)

    app = create_app(config, reader=Reader(), file=file, admin_token=ADMIN_TOKEN)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=config.timeouts.drain_s)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await Site(runner, config.host, config.port, idle_s=config.timeouts.idle_s).start()
    path = await asyncio.to_thread(write_admin_token, ADMIN_TOKEN, runner.addresses[0][1])
    stack.callback(remove_admin_token, path, ADMIN_TOKEN)
    return Running(
        url=f"http://127.0.0.1:{runner.addresses[0][1]}",
        parts=app[PARTS],
        runner=runner,
        records=records,
        recorded=recorded,
    )


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port where nobody listens, nor will while the test runs: this process has it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """The router's event loop must never block: blockbuster fails the test if it does."""
    with blockbuster_ctx("router"):
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(scripted())
            two = await stack.enter_async_context(scripted())
            yield Fleet(one=one, two=two, stack=stack)


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that may administer each router of `run_router`."""
    async with aiohttp.ClientSession(headers={ADMIN_HEADER: ADMIN_TOKEN}) as session:
        yield session


@pytest.fixture
async def stranger() -> AsyncIterator[aiohttp.ClientSession]:
    """A client on this machine that knows no key."""
    async with aiohttp.ClientSession() as session:
        yield session


Wait = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture
def eventually() -> Wait:
    """Wait for a condition that another task brings about, as long as the test may take."""

    async def wait(condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110  (the state has no event to wait for)
            await asyncio.sleep(0.005)

    return wait
