"""A controller over real HTTP, with scripted agents, for its tests."""

import contextlib
import io
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from blockbuster import blockbuster_ctx

from router.access import Access
from router.controller.controller import Controller
from router.controller.registry import Configured
from router.proxy.upstream import client_session
from tests.router.agent_server import serving
from tests.router.controller.control_agent import CHUNK_TOKENS, ControlAgent
from warmroute_common.fleet_secret import FleetSecret

JSON = {"Content-Type": "application/json"}
TOKENS = list(range(5 * CHUNK_TOKENS + 7))


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(kw_only=True)
class Controlled:
    """A controller that runs, and who is in its configuration."""

    url: str
    monitor_url: str
    clock: Clock
    controller: Controller
    session: aiohttp.ClientSession
    configured: list[Configured] = field(default_factory=list)

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """POST to the API; return status and answer."""
        return await self._send("POST", self.url + path, body)

    async def get(self, path: str) -> tuple[int, Any]:
        return await self._send("GET", self.url + path, None)

    async def tell(self, path: str, body: object) -> tuple[int, Any]:
        """POST to the monitor."""
        return await self._send("POST", self.monitor_url + path, body)

    async def ok(self, path: str, body: object) -> Any:
        """POST to the API what must be answered with 200."""
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer

    async def _send(self, method: str, url: str, body: object) -> tuple[int, Any]:
        data = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        given: dict[str, Any] = {} if body is None else {**data, "headers": JSON}
        async with self.session.request(method, url, **given) as response:
            assert response.content_type == "application/json", await response.text()
            return response.status, await response.json()


@contextlib.asynccontextmanager
async def controlled(
    limit_bytes: int = 1 << 20,
    body_s: float = 60.0,
    access: Access | None = None,
    fleet_secret: FleetSecret | None = None,
) -> AsyncIterator[Controlled]:
    """Run a controller that knows nobody; its event loop must never block."""
    clock, configured = Clock(), list[Configured]()
    with blockbuster_ctx("router"):
        async with client_session() as session, client_session() as client:
            made = Controller(
                lambda: configured,
                session,
                limit_bytes=limit_bytes,
                body_s=body_s,
                access=access,
                fleet_secret=fleet_secret,
                clock=clock,
                wall_clock=lambda: clock() + 1e9,
            )
            async with serving(made.api()) as url, serving(made.monitor()) as monitor_url:
                yield Controlled(
                    url=url,
                    monitor_url=monitor_url,
                    clock=clock,
                    controller=made,
                    session=client,
                    configured=configured,
                )


@contextlib.asynccontextmanager
async def with_agents(
    control: Controlled, agents: Sequence[ControlAgent]
) -> AsyncIterator[list[str]]:
    """Serve agents, and configure them; gives their URLs."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(agent.app())) for agent in agents]
        control.configured[:] = [
            Configured(
                id=agent.info["instance_id"], agent_url=url, incarnation=agent.info["incarnation"]
            )
            for agent, url in zip(agents, urls, strict=True)
        ]
        yield urls


def move(**changes: object) -> dict[str, object]:
    """Return a call of ``/move``."""
    cpu = "LocalCPUBackend"
    return {"old_position": ["one", cpu], "new_position": ["two", cpu], "tokens": TOKENS} | changes
