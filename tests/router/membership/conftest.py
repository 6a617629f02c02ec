"""A router whose configuration file a test rewrites, in front of scripted upstreams."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from blockbuster import blockbuster_ctx

from router.config.loading import load_router_config
from router.membership.reload import ConfigFile
from tests.router.conftest import Running, run_router
from tests.router.scripted import Scripted, scripted


@dataclass(kw_only=True)
class Reloading:
    """Upstreams, the file that names some of them, and the router that reads it."""

    path: Path
    stack: AsyncExitStack
    upstreams: list[Scripted] = field(default_factory=list)

    async def upstream(self) -> Scripted:
        started = await self.stack.enter_async_context(scripted())
        self.upstreams.append(started)
        return started

    def write(self, replicas: Sequence[Scripted | dict[str, Any]], **settings: Any) -> None:
        """Write the file; replicas are named r0, r1, ... after their place among the upstreams."""
        made = [
            {"url": each.url, "instance_id": f"r{self.upstreams.index(each)}"}
            if isinstance(each, Scripted)
            else each
            for each in replicas
        ]
        settings = {
            "port": 0,
            "policy": "round-robin",
            # A busy machine must not look like replicas that are down.
            "timeouts": {"health_interval_s": 0.05, "health_timeout_s": 60, "drain_s": 60},
            "replicas": made,
        } | settings
        self.path.write_text(yaml.safe_dump(settings), encoding="utf-8")

    async def router(self) -> Running:
        config = await asyncio.to_thread(load_router_config, self.path)
        file = ConfigFile(path=self.path, read=lambda: load_router_config(self.path))
        return await run_router(self.stack, config, file=file)


@pytest.fixture(autouse=True)
def patient_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas stay until their replacements were probed, on a slow machine too."""
    monkeypatch.setattr("router.membership.membership._FIRST_PROBES_S", 60.0)


@pytest.fixture
async def reloading(tmp_path: Path) -> AsyncIterator[Reloading]:
    level = logging.getLogger().level
    with blockbuster_ctx("router"):
        async with AsyncExitStack() as stack:
            yield Reloading(path=tmp_path / "router.yaml", stack=stack)
    logging.getLogger().setLevel(level)
