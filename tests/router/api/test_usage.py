"""``GET /usage`` and ``warmroute usage`` over real connections: who sees what."""

import asyncio
from typing import Any

import aiohttp
from click.testing import CliRunner

from router.api.access import new_key, sha256_of
from router.cli.commands import main
from router.config.settings import AccessConfig, KeyConfig
from tests.router.conftest import ADMIN_TOKEN, Fleet, Running
from tests.router.scripted import CHAT_ANSWER, json_answer
from warmroute_common.admin_token import HEADER as ADMIN_HEADER

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
KEY, OTHER = new_key(), new_key()
USAGE = {
    "prompt_tokens": 1000,
    "completion_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 960},
}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def asked_router(fleet: Fleet, client: aiohttp.ClientSession, **limits: Any) -> Running:
    """Return a router that one key has asked once and another one twice."""
    keys = (
        KeyConfig(name="team", sha256=sha256_of(KEY), **limits),
        KeyConfig(name="other", sha256=sha256_of(OTHER)),
    )
    router = await fleet.router(access=AccessConfig(keys=keys))
    answer = json_answer({**CHAT_ANSWER, "usage": USAGE})
    fleet.one.will(answer, answer)
    fleet.two.will(answer)
    for key in (KEY, OTHER, OTHER):
        async with client.post(router.url + CHAT, json=ASK, headers=bearer(key)) as response:
            assert response.status == 200, await response.text()
    await router.record(3)
    return router


async def usage(
    client: aiohttp.ClientSession, router: Running, headers: dict[str, str]
) -> tuple[int, Any]:
    async with client.get(f"{router.url}/usage", headers=headers) as response:
        return response.status, await response.json()


async def test_the_administration_sees_all_keys(
    fleet: Fleet, stranger: aiohttp.ClientSession
) -> None:
    router = await asked_router(fleet, stranger, tokens_per_day=5000)
    status, answer = await usage(stranger, router, {ADMIN_HEADER: ADMIN_TOKEN})
    assert status == 200
    found = {each["key"]: each["today"] for each in answer["usage"]}
    assert found["team"]["input_tokens"] == 1000 and found["other"]["input_tokens"] == 2000
    assert found["other"]["cached_tokens"] == 1920 and found["other"]["computed_tokens"] == 80
    team, other = answer["limits"]
    assert (team["key"], team["tokens_per_day"]["remaining"]) == ("team", 5000 - 1007)
    assert "tokens_per_day" not in other


async def test_a_key_sees_itself_also_when_it_is_used_up(
    fleet: Fleet, stranger: aiohttp.ClientSession
) -> None:
    router = await asked_router(fleet, stranger, tokens_per_day=1000, requests_per_minute=1)
    for _ in range(2):
        status, answer = await usage(stranger, router, bearer(KEY))
        assert status == 200
        assert [each["key"] for each in answer["usage"]] == ["team"]
        assert [each["key"] for each in answer["limits"]] == ["team"]
    async with stranger.post(router.url + CHAT, json=ASK, headers=bearer(KEY)) as response:
        assert response.status == 429


async def test_nobody_else_sees_anything(fleet: Fleet, stranger: aiohttp.ClientSession) -> None:
    with_keys = await asked_router(fleet, stranger)
    without = await fleet.router()
    for router, headers in ((with_keys, {}), (with_keys, bearer("x")), (without, bearer(KEY))):
        status, answer = await usage(stranger, router, headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


async def test_the_command_shows_tables(fleet: Fleet, stranger: aiohttp.ClientSession) -> None:
    router = await asked_router(fleet, stranger, requests_per_minute=600)
    command = ["usage", "--router", router.url]
    shown = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert shown.exit_code == 0, shown.output
    today, since, limits = shown.output.split("\n\n")
    rows = [line.split() for line in today.splitlines()[1:]]
    assert rows[0][:3] == ["key", "model", "requests"] and rows[0][-4:-2] == ["TTFT", "ms"]
    assert ["other", "m", "2", "0", "2,000", "14", "1,920", "80"] in [row[:8] for row in rows]
    assert since.startswith("since the start, ")
    assert "599 of 600" in limits or "600 of 600" in limits
    as_json = await asyncio.to_thread(CliRunner().invoke, main, [*command, "--json"])
    assert '"computed_tokens": 80' in as_json.output


async def test_metrics_have_the_usage(fleet: Fleet, stranger: aiohttp.ClientSession) -> None:
    router = await asked_router(fleet, stranger)
    headers = {ADMIN_HEADER: ADMIN_TOKEN}
    async with stranger.get(f"{router.url}/metrics", headers=headers) as response:
        text = await response.text()
    assert 'warmroute_usage_tokens_total{key="other",kind="cached",model="m"} 1920.0' in text
    assert 'warmroute_table_entries{table="usage"} 2.0' in text
