"""The relay between LMCache's servers and two routers, over HTTP."""

from aiohttp import ClientSession, web

from bench.lmcache.event_relay import event_relay
from tests.router.agent_server import serving


async def test_every_router_gets_each_call_and_the_highest_status_is_answered() -> None:
    calls: list[tuple[int, str, str]] = []

    def router(status: int) -> web.Application:
        async def handle(request: web.Request) -> web.Response:
            calls.append((status, request.path_qs, await request.text()))
            return web.json_response({"by": status}, status=status)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        return app

    async with (
        serving(router(200)) as one,
        serving(router(404)) as two,
        serving(event_relay([one, two])) as url,
        ClientSession() as session,
        session.put(f"{url}/instances/a/heartbeat?x=1", data=b"{}") as answer,
    ):
        assert (answer.status, await answer.json()) == (404, {"by": 404})
    path = "/instances/a/heartbeat?x=1"
    assert calls == [(200, path, "{}"), (404, path, "{}")]
