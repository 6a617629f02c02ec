"""Which requests the controller's ports take, by secret; what agents are shown."""

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from tests.router.lmcache.helpers import (
    JSON,
    TOKENS,
    Controlled,
    FakeAgent,
    controlled,
    with_agents,
)
from warmroute_common.fleet_secret import FleetSecret

SECRET = FleetSecret("known-to-the-fleet-alone")
REGISTRATION = {
    "instance_id": "one",
    "incarnation": "1",
    "agent_url": "http://127.0.0.1:9",
    "transfer_port": None,
    "heartbeat_s": 1.0,
}


async def status(control: Controlled, url: str, **headers: str) -> int:
    async with control.session.post(url, json=REGISTRATION, headers=JSON | headers) as answer:
        return answer.status


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer nothing"}, {"Authorization": "Basic nothing"}]
)
async def test_a_fleet_secret_is_asked_for_at_both_ports(headers: dict[str, str]) -> None:
    async with controlled(fleet_secret=SECRET) as control:
        assert await status(control, f"{control.url}/clear", **headers) == 401
        assert await status(control, f"{control.monitor_url}/register", **headers) == 401
        assert control.controller.registrations() == []


async def test_agents_register_by_it() -> None:
    async with controlled(fleet_secret=SECRET) as control:
        shown = SECRET.headers(control.monitor_url)
        assert await status(control, f"{control.monitor_url}/register", **shown) == 200
        assert [each.instance_id for each in control.controller.registrations()] == ["one"]


async def test_agents_are_shown_it() -> None:
    shown: list[str | None] = []

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown.append(request.headers.get("Authorization"))
        return await handler(request)

    class Noting(FakeAgent):
        def app(self) -> web.Application:
            app = super().app()
            app.middlewares.append(note)
            return app

    async with (
        controlled(fleet_secret=SECRET) as control,
        with_agents(control, [Noting("one")]),
    ):
        body, headers = {"tokens": TOKENS}, JSON | SECRET.headers(control.url)
        url = f"{control.url}/lookup"
        async with control.session.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200
    assert set(shown) == {f"Bearer {SECRET.token}"}


@pytest.mark.parametrize("path", ["/clear", "/move", "/pin", "/lookup"])
async def test_what_a_form_can_send_is_not_taken(path: str) -> None:
    async with controlled() as control:
        headers = {"Content-Type": "text/plain"}
        async with control.session.post(control.url + path, data=b"{}", headers=headers) as answer:
            assert answer.status == 400
            assert "send 'Content-Type: application/json'" in await answer.text()


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example:9000"}, {"Origin": "https://evil.example"}]
)
async def test_pages_of_other_sites_reach_neither_port(headers: dict[str, str]) -> None:
    async with controlled() as control:
        assert await status(control, f"{control.url}/clear", **headers) == 403
        assert await status(control, f"{control.monitor_url}/register", **headers) == 403
