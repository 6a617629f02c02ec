"""Limits of keys over real connections: what clients are told, and when a request ends."""

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web

from router.api.access import new_key, sha256_of
from router.config.settings import AccessConfig, KeyConfig
from tests.router.conftest import Fleet, Running, Wait
from tests.router.scripted import CHAT_ANSWER, chat_events, json_answer, stream

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
KEY, NEXT = new_key(), new_key()


def one_key(**changes: Any) -> AccessConfig:
    return AccessConfig(keys=(KeyConfig(name="team", sha256=sha256_of(KEY), **changes),))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(
    client: aiohttp.ClientSession, router: Running, key: str = KEY, path: str = CHAT
) -> tuple[int, dict[str, str], Any]:
    async with client.post(router.url + path, json=ASK, headers=bearer(key)) as response:
        is_json = response.content_type == "application/json"
        answer = await (response.json() if is_json else response.text())
        limits = {
            name.lower().removeprefix("x-ratelimit-"): value
            for name, value in response.headers.items()
            if name.lower().startswith("x-ratelimit-")
        }
        return response.status, limits, answer


@pytest.mark.parametrize("streamed", [False, True])
async def test_each_answer_says_what_is_left(
    fleet: Fleet, stranger: aiohttp.ClientSession, streamed: bool
) -> None:
    """Refusals too, by the router or by the replica; a replica's own headers do not count."""
    router = await fleet.router(access=one_key(requests_per_minute=2, tokens_per_day=10_000))
    theirs: dict[str, Any] = {"x-ratelimit-remaining-requests": "77"}
    answer = stream(*chat_events("a", "b")) if streamed else json_answer(CHAT_ANSWER, **theirs)
    fleet.one.will(answer)
    status, limits, _ = await ask(stranger, router)
    assert (status, limits["limit-requests"], limits["remaining-requests"]) == (200, "2", "1")
    assert limits["limit-tokens"] == "10000" and int(limits["remaining-tokens"]) < 10_000
    assert limits["reset-requests"].endswith("s") and limits["reset-tokens"].endswith("s")
    status, limits, _ = await ask(stranger, router, path="/v1/completions")
    assert (status, limits["remaining-requests"]) == (400, "0"), "it has no prompt"
    status, limits, _ = await ask(stranger, router)
    assert (status, limits["remaining-requests"]) == (429, "0")


async def test_a_key_without_limits_gets_no_such_headers(
    fleet: Fleet, stranger: aiohttp.ClientSession
) -> None:
    router = await fleet.router(access=one_key())
    fleet.one.will(json_answer(CHAT_ANSWER))
    assert (await ask(stranger, router))[:2] == (200, {})


async def test_openais_client_reads_a_used_up_budget(fleet: Fleet) -> None:
    router = await fleet.router(access=one_key(tokens_per_day=5))
    told = {**CHAT_ANSWER, "usage": {"prompt_tokens": 5, "completion_tokens": 60}}
    fleet.one.will(json_answer(told))
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=KEY, max_retries=0) as ours:
        await ours.chat.completions.create(**ASK)
        await router.record()
        with pytest.raises(openai.RateLimitError) as caught:
            await ours.chat.completions.create(**ASK)
    assert caught.value.code == "insufficient_quota"
    assert "00:00 UTC" in caught.value.message
    assert caught.value.response.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_anthropics_client_reads_what_is_left(fleet: Fleet) -> None:
    router = await fleet.router(access=one_key(requests_per_minute=2))
    told = {"content": [], "usage": {"input_tokens": 5, "output_tokens": 6}}
    fleet.one.will(json_answer({"type": "message", "role": "assistant", **told}))
    async with anthropic.AsyncAnthropic(base_url=router.url, api_key=KEY, max_retries=0) as ours:
        answer = await ours.messages.with_raw_response.create(**ASK, max_tokens=5)
    assert answer.headers["anthropic-ratelimit-requests-remaining"] == "1"
    assert not any(name.startswith("x-ratelimit-") for name in answer.headers)


@pytest.mark.parametrize("end", ["answered", "client-gone", "refused"])
async def test_a_request_counts_until_its_answer_has_ended(
    fleet: Fleet, stranger: aiohttp.ClientSession, eventually: Wait, end: str
) -> None:
    router = await fleet.router(access=one_key(max_parallel_requests=1))
    go, begun = asyncio.Event(), asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse:
        begun.set()
        await go.wait()
        return web.json_response(CHAT_ANSWER, status=400 if end == "refused" else 200)

    fleet.one.will(hold)
    first = asyncio.create_task(ask(stranger, router))
    await begun.wait()
    status, _, answer = await ask(stranger, router)
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    assert "max_parallel_requests" in answer["error"]["message"]
    if end == "client-gone":
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await eventually(lambda: bool(router.records))
        go.set()
    else:
        go.set()
        await first
    fleet.two.will(json_answer(CHAT_ANSWER))
    assert (await ask(stranger, router))[0] == 200


async def test_a_key_has_two_secrets_while_it_is_replaced(
    fleet: Fleet, stranger: aiohttp.ClientSession
) -> None:
    """They share its limits, and what was used stays used when the first one goes."""
    router = await fleet.router(
        access=one_key(second_sha256=sha256_of(NEXT), requests_per_minute=3)
    )
    fleet.one.will(json_answer(CHAT_ANSWER))
    fleet.two.will(json_answer(CHAT_ANSWER))
    assert (await ask(stranger, router))[1]["remaining-requests"] == "2"
    assert (await ask(stranger, router, NEXT))[1]["remaining-requests"] == "1"
    (before,) = one_key(requests_per_minute=3).keys
    access = AccessConfig(keys=(replace(before, sha256=sha256_of(NEXT)),))
    assert [each.key for each in router.records] == ["team", "team"]
    router.parts.api.access.change(access)
    assert (await ask(stranger, router))[0] == 401
    fleet.one.will(json_answer(CHAT_ANSWER))
    assert (await ask(stranger, router, NEXT))[1]["remaining-requests"] == "0"


@pytest.mark.parametrize(("routers", "passed"), [(1, 8), (2, 4)])
async def test_two_routers_let_twice_the_limit_pass_unless_each_enforces_its_half(
    fleet: Fleet, stranger: aiohttp.ClientSession, routers: int, passed: int
) -> None:
    """What the documentation says of limits over several routers."""
    keys = one_key(requests_per_minute=4).keys
    several = [await fleet.router(access=AccessConfig(keys=keys, routers=routers)) for _ in "ab"]
    fleet.one.will(*[json_answer(CHAT_ANSWER)] * 8)
    fleet.two.will(*[json_answer(CHAT_ANSWER)] * 8)
    statuses = [(await ask(stranger, each))[0] for _ in range(5) for each in several]
    assert statuses.count(200) == passed
    assert statuses.count(429) == 10 - passed


async def test_an_expired_key_is_told_so(fleet: Fleet, stranger: aiohttp.ClientSession) -> None:
    router = await fleet.router(access=one_key(valid_until="2020-02-29"))
    status, _, answer = await ask(stranger, router)
    assert (status, answer["error"]["code"]) == (401, "expired_api_key")
    assert "2020-02-29" in answer["error"]["message"]
    assert not fleet.one.seen
