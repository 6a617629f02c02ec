"""A picker behind a real Envoy, before scripted replicas."""

import asyncio
import gc
import importlib.util
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from cacheengine.launch.vllm_launch import free_ports
from router.config.settings import PickerConfig, ReplicaConfig, RouterConfig, TimeoutsConfig
from router.gateway.envoy_config import envoy_configuration, envoy_program
from tests.processes import ServerProcess
from tests.router.conftest import Running, run_router
from tests.router.scripted import Scripted, scripted
from tests.servers import missing
from warmroute_common.config_reader import ConfigLocation

CHAT = "/v1/chat/completions"
RARELY = TimeoutsConfig(health_interval_s=60.0, drain_s=1.0)
Settings = dict[str, Any]
Change = Callable[[Settings], Settings]


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


class Envoy(ServerProcess):
    """One Envoy, with our configuration and what a test adds."""

    def __init__(self, directory: Path, settings: Settings, port: int) -> None:
        super().__init__(directory / "envoy.log")
        self._port = port
        self._path = directory / "envoy.json"
        self._path.write_text(json.dumps(settings))

    def start(self) -> None:
        options = ["--concurrency", "1", "--log-level", "warning", "--disable-hot-restart"]
        self.run(
            [envoy_program() or missing("envoy"), "-c", str(self._path), *options], self._answers
        )

    def _answers(self) -> bool:
        """Whether it listens, which it does once it knows its clusters."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0


@dataclass(kw_only=True)
class Picking(Running):
    """A picker that runs; ``url`` is where an Envoy that asks it will be."""

    picker: Any


@dataclass(kw_only=True)
class Gateway:
    """Two replicas, and ways to put pickers and Envoys in front of them."""

    one: Scripted
    two: Scripted
    stack: AsyncExitStack
    directory: Path
    timeouts: TimeoutsConfig = field(
        default_factory=lambda: TimeoutsConfig(
            health_interval_s=0.05, health_timeout_s=30.0, drain_s=1.0
        )
    )

    def config(self, **changes: Any) -> RouterConfig:
        """Return settings; by default round-robin, so that the first request goes to ``one``."""
        picker_port, http_port, port = free_ports(3)
        config = RouterConfig(
            port=port,
            policy="round-robin",
            replicas=(
                ReplicaConfig(url=self.one.url, instance_id="one"),
                ReplicaConfig(url=self.two.url, instance_id="two"),
            ),
            picker=PickerConfig(port=picker_port, http_port=http_port),
            timeouts=self.timeouts,
        )
        return replace(config, **changes)

    async def picker(self, config: RouterConfig) -> Picking:
        """Run a picker."""
        from router.gateway.picker_server import PickerServer

        running = await run_router(self.stack, replace(config, port=0))
        assert config.picker is not None
        picker = PickerServer(running.parts.lifecycle, config.picker)
        await picker.start()
        self.stack.push_async_callback(picker.stop, config.timeouts.drain_s)
        known = vars(running) | {"url": f"http://127.0.0.1:{config.port}"}
        return Picking(picker=picker, **known)

    async def envoy(self, config: RouterConfig, change: Change | None = None) -> Envoy:
        """Run an Envoy that asks a picker; a test may change its settings."""
        settings = envoy_configuration(config, ConfigLocation("test"))
        directory = self.directory / str(config.port)
        directory.mkdir()
        envoy = Envoy(directory, settings if change is None else change(settings), config.port)
        self.stack.callback(envoy.kill)
        await asyncio.to_thread(envoy.start)
        return envoy

    async def both(self, change: Change | None = None, **changes: Any) -> tuple[Picking, Envoy]:
        """Run a picker and an Envoy that asks it."""
        config = self.config(**changes)
        return await self.picker(config), await self.envoy(config, change)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """The picker's event loop must never block: blockbuster fails the test if it does."""
    if importlib.util.find_spec("grpc_health") is None:
        missing("grpcio-health-checking")
    with blockbuster_ctx("router"):
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(scripted())
            two = await stack.enter_async_context(scripted())
            yield Gateway(one=one, two=two, stack=stack, directory=tmp_path)
    # With the last server gRPC ends its thread, and waits for that: here, in its own event loop,
    # and not in that of whichever test comes to collect it.
    gc.collect()
