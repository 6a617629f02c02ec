"""A whole router before agents that ask for the fleet's secret, and pages that ask the router."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from router.app import PARTS, create_app
from router.config.loading import router_config
from simulator.simulated_fleet import fleet as simulated
from simulator.simulator_settings import SimulatorSettings
from tests.router.agent_server import until
from warmroute_common.fleet_secret import VARIABLE, FleetSecret

SECRET = "known-to-the-fleet-alone"
TOKENS = list(range(300))


def config(where: dict[str, Any], **more: Any) -> dict[str, Any]:
    names = ("url", "agent_url", "instance_id")
    replicas = [{name: each[name] for name in names} for each in where["replicas"]]
    return {"port": 0, "replicas": replicas, **more}


@pytest.mark.parametrize("known", [True, False])
async def test_a_router_follows_agents_by_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    settings = SimulatorSettings(
        directory=tmp_path, replicas=2, disk_tokens=0, fleet_secret=FleetSecret(SECRET)
    )
    if known:
        monkeypatch.setenv(VARIABLE, SECRET)
    async with simulated(settings) as where:
        given = config(where, controller={"port": 0, "monitor_port": 0})
        app = create_app(router_config(given, path="router.yaml"))
        async with TestServer(app), aiohttp.ClientSession() as session:
            parts = app[PARTS]
            assert parts.controller is not None
            if known:
                replicas = parts.fleet.replicas.values()
                await until(lambda: all(each.incarnation is not None for each in replicas))
            async with TestServer(parts.controller.api()) as server:
                shown = FleetSecret(SECRET).headers("") if known else {}
                url, body = server.make_url("/lookup"), {"tokens": TOKENS}
                async with session.post(url, json=body, headers=shown) as answer:
                    told = await answer.json()
            if known:
                assert told["layout_info"] == {}
                assert "errors" not in told
            else:
                assert "this agent requires the fleet secret" in told["error"]["message"]
                assert all(each.incarnation is None for each in parts.fleet.replicas.values())
