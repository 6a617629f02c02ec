"""The doctor's checks of the router's own machine and of a router that already runs."""

import resource
import socket
from dataclasses import replace
from typing import Any

import pytest

from router.api.access import sha256_of
from router.config.settings import AccessConfig
from router.doctor.findings import Level
from tests.router.conftest import Fleet
from tests.router.doctor.replicas import examined, found

NOWHERE = {"url": "http://127.0.0.1:1", "instance_id": "gone"}


async def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        report = await examined(NOWHERE, port=port)
        assert f"port: 127.0.0.1:{port} is in use by another program" in _port(report)
        report = await examined(NOWHERE, controller={"port": port, "monitor_port": 0})
        assert f"controller.port: 127.0.0.1:{port} is in use" in _port(report)
        picker = {"port": port, "http_port": 0}
        assert f"picker.port: 127.0.0.1:{port} is in use" in _port(
            await examined(NOWHERE, picker=picker)
        )
    report = await examined(NOWHERE, port=port)
    assert f"free: {port} (port)" in found(report, Level.OK)["the router", "port"]


async def test_an_address_that_is_not_this_machines() -> None:
    report = await examined(NOWHERE, host="192.0.2.1", port=9)
    assert "192.0.2.1:9 cannot be listened on here" in _port(report)


def _port(report: Any) -> str:
    return found(report)["the router", "port"]


async def test_who_may_reach_it() -> None:
    async def notes(**settings: Any) -> dict[tuple[str, str], str]:
        return found(await examined(NOWHERE, **settings), Level.NOTE)

    assert not {check for _, check in await notes()} & {"keys", "admin-key", "tls"}
    open_to_all = await notes(host="0.0.0.0")
    assert "listens on 0.0.0.0 without keys" in open_to_all["the router", "keys"]
    assert "warmroute key --admin" in open_to_all["the router", "admin-key"]
    access = {"keys": [{"name": "team", "sha256": 64 * "a"}], "admin_sha256": [64 * "b"]}
    keyed = await notes(host="0.0.0.0", access=access)
    assert {check for _, check in keyed} & {"keys", "admin-key", "tls"} == {"tls"}


async def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    report = await examined(NOWHERE)
    line = found(report, Level.NOTE)["the router", "open-files"]
    assert "enough for about 384 requests at once; raise the limit" in line
    report = await examined(NOWHERE, admission={"max_waiting": 300})
    assert ("the router", "open-files") in found(report, Level.OK)


# --- a router that runs


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that runs is found on a slow machine, too."""
    monkeypatch.setattr("router.doctor.examination._ANSWER_S", 30.0)


@pytest.mark.usefixtures("patient")
async def test_a_router_that_runs_is_asked(fleet: Fleet) -> None:
    router = await fleet.router()
    port = int(router.url.rpartition(":")[2])
    one = {"url": fleet.one.url, "instance_id": "one"}
    new = {"url": fleet.two.url + "/other", "instance_id": "new"}
    router.parts.fleet.drain("one")
    report = await examined(one, new, port=port)
    problems = found(report)
    assert ("the router", "port") not in problems, "it is the router's own"
    assert "the running router does not know it" in problems["new", "running"]
    assert f"a replica at {fleet.two.url}, which" in problems["the router", "running"]
    assert "drains it" in found(report, Level.NOTE)["one", "running"]


@pytest.mark.usefixtures("patient")
async def test_a_replica_that_the_running_router_holds_for_down(fleet: Fleet) -> None:
    fleet.timeouts = replace(fleet.timeouts, health_interval_s=3600.0)
    router = await fleet.router()
    port = int(router.url.rpartition(":")[2])
    router.parts.fleet.down("one")
    report = await examined({"url": fleet.one.url, "instance_id": "one"}, port=port)
    assert "the running router says that it is down" in found(report)["one", "running"]


@pytest.mark.usefixtures("patient")
async def test_a_running_routers_admin_key(fleet: Fleet) -> None:
    router = await fleet.router(access=AccessConfig(admin_sha256=(sha256_of("secret"),)))
    port = int(router.url.rpartition(":")[2])
    replicas = [
        {"url": each.url, "instance_id": name}
        for name, each in (("one", fleet.one), ("two", fleet.two))
    ]
    without = await examined(*replicas, port=port, key="wrong")
    assert "--admin-key" in found(without, Level.NOTE)["the router", "running"]
    for key in ("secret", None):
        known = found(await examined(*replicas, port=port, key=key), Level.OK)
        assert known["the router", "running"] == "a router runs at its port: ok"


@pytest.mark.usefixtures("patient")
async def test_a_port_that_the_running_router_has_not(fleet: Fleet) -> None:
    router = await fleet.router()
    port = int(router.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    controller = {"port": free, "monitor_port": 0}
    report = await examined(NOWHERE, port=port, controller=controller)
    assert f"it does not listen on {free} (controller.port)" in _port(report)
