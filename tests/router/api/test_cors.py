"""A browser's preflights and requests from pages of another origin."""

import aiohttp
import pytest
from aiohttp import web

from router.config.settings import CorsConfig
from tests.router.conftest import Fleet
from tests.router.scripted import chat_events, stream

PAGE = "https://chat.example.com"
ASK = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
ALLOW = "Access-Control-Allow-Origin"


@pytest.mark.parametrize(("allowed", "told"), [(PAGE, PAGE), ("*", "*"), ("https://b", None)])
async def test_pages_of_these_origins_may_ask(
    fleet: Fleet, client: aiohttp.ClientSession, allowed: str, told: str | None
) -> None:
    fleet.one.will(stream(*chat_events("a")))
    router = await fleet.router(cors=CorsConfig(allow_origins=(allowed,)))
    url = f"{router.url}/v1/chat/completions"
    async with client.options(url, headers=PREFLIGHT) as response:
        assert (response.status, response.headers.get(ALLOW)) == (204, told)
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    async with client.post(url, json=ASK, headers={"Origin": PAGE}) as response:
        assert (response.status, response.headers.get(ALLOW)) == (200, told)
        assert response.headers.get("Vary") == (None if allowed == "*" else "Origin")
    async with client.post(url, data=b"[", headers={"Origin": PAGE}) as response:
        assert (response.status, response.headers.get(ALLOW)) == (400, told)


async def allowing_all(request: web.Request) -> web.Response:
    return web.json_response({}, headers={ALLOW: "*"})


async def test_without_the_section_no_page_may_whatever_a_replica_says(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """By default vLLM allows all."""
    fleet.one.will(allowing_all)
    router = await fleet.router()
    url = f"{router.url}/v1/chat/completions"
    for method in ("POST", "OPTIONS"):
        async with client.request(method, url, json=ASK, headers=PREFLIGHT) as response:
            assert response.status == 200
            assert ALLOW not in response.headers
