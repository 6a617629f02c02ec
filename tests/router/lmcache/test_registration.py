"""Registering with the controller, over HTTP."""

import logging
from typing import Any

import pytest

from router.lmcache.controller import MAX_REQUESTS
from router.lmcache.instance_registry import ConfiguredInstance
from tests.router.agent_server import until
from tests.router.lmcache.helpers import TOKENS, Controlled, FakeAgent, with_agents

AGENT = {
    "instance_id": "a",
    "incarnation": "one",
    "agent_url": "http://10.0.0.1:8101",
    "transfer_port": 8201,
    "heartbeat_s": 5.0,
}
BEAT = {"instance_id": "a", "incarnation": "one"}


async def known(control: Controlled) -> list[dict[str, Any]]:
    _, answer = await control.get("/instances")
    instances: list[dict[str, Any]] = answer["instances"]
    return instances


async def test_register_heartbeat_deregister(control: Controlled) -> None:
    assert (await control.tell("/heartbeat", BEAT))[0] == 404
    assert (await control.tell("/register", AGENT))[0] == 200
    control.clock.now_s += 4.0
    assert (await control.tell("/heartbeat", BEAT))[0] == 200
    control.clock.now_s += 1.5
    assert await known(control) == [
        {
            "instance_id": "a",
            "agent_url": "http://10.0.0.1:8101",
            "configured": False,
            "registered": True,
            "registered_as": "a",
            "incarnation": "one",
            "transfer_port": 8201,
            "heartbeat_s": 5.0,
            "heartbeat_age_s": 1.5,
        }
    ]
    assert (await control.tell("/deregister", BEAT))[0] == 200
    assert await known(control) == []
    assert (await control.tell("/deregister", BEAT))[0] == 404


async def test_missed_heartbeats_are_logged_once(
    control: Controlled, caplog: pytest.LogCaptureFixture
) -> None:
    await control.tell("/register", AGENT)
    control.clock.now_s += 15.1
    assert await known(control) == []
    assert (await control.tell("/heartbeat", BEAT))[0] == 404
    assert caplog.text.count("a (http://10.0.0.1:8101) has missed its heartbeats") == 1
    assert (await control.tell("/register", AGENT))[0] == 200


async def test_the_agents_host_may_be_where_it_called_from(control: Controlled) -> None:
    for number, url in enumerate(("http://:8101", "http://0.0.0.0:8101", "http://[::]:8101/")):
        await control.tell("/register", {**AGENT, "instance_id": str(number), "agent_url": url})
    assert {each["agent_url"] for each in await known(control)} == {"http://127.0.0.1:8101"}


async def test_two_agents_of_one_name(
    control: Controlled, caplog: pytest.LogCaptureFixture
) -> None:
    await control.tell("/register", AGENT)
    other = {**AGENT, "agent_url": "http://10.0.0.2:8101", "incarnation": "two"}
    assert (await control.tell("/register", other))[0] == 200
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "the agent at http://10.0.0.2:8101 has registered as a" in warning.getMessage()
    assert "was the agent at http://10.0.0.1:8101" in warning.getMessage()
    (only,) = await known(control)
    assert only["agent_url"] == "http://10.0.0.2:8101"


async def test_a_restart_logs_no_warning(
    control: Controlled, caplog: pytest.LogCaptureFixture
) -> None:
    await control.tell("/register", AGENT)
    await control.tell("/register", {**AGENT, "incarnation": "two"})
    await control.tell("/register", {**AGENT, "incarnation": "two"})
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_a_configured_name_is_refused_to_others(control: Controlled) -> None:
    control.configured.append(
        ConfiguredInstance(id="a", agent_url="http://10.0.0.9:8101", incarnation=None)
    )
    status, answer = await control.tell("/register", AGENT)
    assert status == 409
    assert answer["error"]["code"] == "name_taken"
    assert "change lmcache_instance_id there" in answer["error"]["message"]
    assert "http://10.0.0.9:8101" in answer["error"]["message"]


async def test_a_registered_instance_is_asked(control: Controlled) -> None:
    agent = FakeAgent("late")
    agent.hold(cpu=range(2))
    async with with_agents(control, [agent]) as (url,):
        control.configured.clear()
        registered = {**AGENT, "instance_id": "late", "incarnation": "late-1", "agent_url": url}
        await control.tell("/register", registered)
        answer = await control.ok("/lookup", {"tokens": TOKENS})
    assert answer["layout_info"] == {"late": ["LocalCPUBackend", 128]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instance_id": ""}, "Expected `str` matching regex"),
        ({"instance_id": "a\nb"}, "Expected `str` matching regex"),
        ({"instance_id": "a\n"}, "Expected `str` matching regex"),
        ({"instance_id": "x" * 257}, "Expected `str` matching regex"),
        ({"heartbeat_s": 0}, "Expected `float` > 0.0 - at `$.heartbeat_s`"),
        ({"heartbeat_s": 1e9}, "Expected `float` <= 3600.0 - at `$.heartbeat_s`"),
        ({"transfer_port": 0}, "Expected `int` >= 1 - at `$.transfer_port`"),
        ({"transfer_port": 70000}, "Expected `int` <= 65535 - at `$.transfer_port`"),
        ({"agent_url": "10.0.0.1:8101"}, "write it like http://host:port"),
        ({"agent_url": "http://h"}, "write it like http://host:port"),
        ({"agent_url": "http://h:x"}, "write it like http://host:port"),
        ({"agent_url": "http://u:p@h:1"}, "write it like http://host:port"),
        ({"agent_url": "http://h:1?q"}, "write it like http://host:port"),
        ({"agent_url": 7}, "Expected `str`, got `int` - at `$.agent_url`; it takes a JSON"),
        ({"more": 1}, "unknown field `more`; it takes a JSON object with instance_id, inc"),
    ],
)
async def test_bad_registrations_are_refused(
    control: Controlled, change: dict[str, Any], message: str
) -> None:
    status, answer = await control.tell("/register", {**AGENT, **change})
    assert status == 400
    assert message in answer["error"]["message"]
    assert await known(control) == []


@pytest.mark.parametrize("path", ["/register", "/heartbeat", "/deregister"])
async def test_a_body_that_is_not_json_is_refused(control: Controlled, path: str) -> None:
    for body in (b"", b"{", b"[]", b"\xff"):
        status, answer = await control.tell(path, body)
        assert status == 400, answer
        assert answer["error"]["message"].startswith(path)
    assert (await control.tell(path, b"x" * (1 << 17)))[0] == 413
    assert (await control.tell("/nothing", {}))[0] == 404


async def test_too_many_concurrent_requests_are_refused(control: Controlled) -> None:
    agent = FakeAgent("slow")
    agent.silent = True
    async with with_agents(control, [agent]):
        import asyncio

        body = {"instance_id": "slow"}
        waiting = [
            asyncio.create_task(control.post("/health", body)) for _ in range(MAX_REQUESTS + 1)
        ]
        await until(lambda: any(each.done() for each in waiting))
        (refused,) = [each.result() for each in waiting if each.done()]
        assert refused[0] == 503
        assert "requests are under way; ask again later" in refused[1]["error"]["message"]
        assert (await control.tell("/register", AGENT))[0] == 200, "the monitor has its own count"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
