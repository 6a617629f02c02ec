"""Each answer names its request, and each request that the router refuses has a record."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.api.access import new_key, sha256_of
from router.config.settings import (
    AccessConfig,
    CorsConfig,
    KeyConfig,
    ReplicaConfig,
    RequestLogConfig,
)
from router.record.prompt_hashes import session_hash
from router.record.records import Outcome, RequestRecord
from router.record.request_log import RequestLog
from router.ui.recent import Recent
from tests.router.conftest import Fleet
from tests.router.scripted import CHAT_ANSWER, chat_events, json_answer, stream

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
KEY = new_key()
TEAM = {"Authorization": f"Bearer {KEY}"}
PREFLIGHT = {"Origin": "https://a", "Access-Control-Request-Method": "POST"}


def keyed(**limits: Any) -> AccessConfig:
    return AccessConfig(keys=(KeyConfig(name="team", sha256=sha256_of(KEY), **limits),))


@pytest.mark.parametrize(
    "case",
    [
        ("POST", CHAT, TEAM, ASK, 200),
        ("POST", CHAT, TEAM, {**ASK, "stream": True}, 200),
        ("GET", "/v1/models", TEAM, None, 200),
        ("GET", "/health", {}, None, 200),
        ("GET", "/ui", {}, None, 200),
        ("OPTIONS", CHAT, PREFLIGHT, None, 204),
        ("POST", CHAT, {}, ASK, 401),
        ("GET", "/metrics", {}, None, 401),
        ("POST", CHAT, TEAM, {**ASK, "model": "other"}, 403),
        ("POST", CHAT, TEAM, {"model": "m", "messages": 1}, 400),
        ("GET", "/sleep", TEAM, None, 404),
        ("PUT", "/health", {}, None, 405),
        ("POST", CHAT, TEAM, {**ASK, "user": "x" * 5000}, 413),
        ("POST", CHAT, {**TEAM, "Expect": "miracles"}, ASK, 417),
    ],
)
@pytest.mark.parametrize("sent", ["mine", None])
async def test_every_answer_has_its_requests_id(
    fleet: Fleet,
    stranger: aiohttp.ClientSession,
    case: tuple[str, str, dict[str, str], Any, int],
    sent: str | None,
) -> None:
    method, path, headers, body, status = case
    is_stream = body is not None and "stream" in body
    fleet.one.will(stream(*chat_events("a")) if is_stream else json_answer(CHAT_ANSWER))
    router = await fleet.router(
        access=keyed(models=("m",)),
        cors=CorsConfig(allow_origins=("https://a",)),
        max_body_bytes=4096,
    )
    named = headers if sent is None else {**headers, "X-Request-Id": sent}
    async with stranger.request(method, router.url + path, headers=named, json=body) as response:
        await response.read()
        assert response.status == status
        [told] = response.headers.getall("X-Request-Id")
    assert told == sent if sent else len(told) == 32
    if (path == CHAT and status not in (204, 417)) or status == 404:
        assert (await router.record()).request_id == told


async def test_answers_of_a_fleet_that_is_down_or_busy(
    fleet: Fleet, stranger: aiohttp.ClientSession
) -> None:
    nowhere = (ReplicaConfig(url="http://127.0.0.1:1"),)
    router = await fleet.router(replicas=nowhere, access=keyed(requests_per_minute=1))
    for number, status in enumerate((503, 429)):
        async with stranger.post(router.url + CHAT, json=ASK, headers=TEAM) as response:
            assert response.status == status
            record = await router.record(number + 1)
            assert record.request_id == response.headers["X-Request-Id"]
    assert (record.status, record.outcome, record.rejected) == (
        429,
        Outcome.REFUSED,
        "key-requests",
    )
    assert (record.key, record.is_admitted, record.endpoint) == ("team", False, CHAT)
    text = (await router.parts.api.counted.render()).decode()
    assert f'endpoint="{CHAT}",outcome="refused",replica="none",status="429"}} 1.0' in text


async def test_bytes_that_are_not_http(fleet: Fleet) -> None:
    router = await fleet.router()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":")[-1]))
    writer.write(b"nothing of the kind\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert b" 400 " in answer and b"X-Request-Id: " in answer


@pytest.mark.parametrize("odd", ["x" * 257, "a\x9bb"])
async def test_an_id_that_cannot_be_logged_is_replaced(
    fleet: Fleet, stranger: aiohttp.ClientSession, odd: str
) -> None:
    fleet.one.will(json_answer(CHAT_ANSWER))
    router = await fleet.router()
    async with stranger.post(
        router.url + CHAT, json=ASK, headers={"X-Request-Id": odd}
    ) as response:
        assert response.status == 200
        told = response.headers["X-Request-Id"]
    assert told != odd and fleet.one.seen[0].headers["X-Request-Id"] == told


async def test_a_record_names_client_session_and_alias(
    fleet: Fleet, stranger: aiohttp.ClientSession, tmp_path: Path
) -> None:
    fleet.one.will(json_answer(CHAT_ANSWER))
    path = tmp_path / "log"
    router = await fleet.router(
        model_aliases={"short": "m"}, request_log=RequestLogConfig(format="json", path=str(path))
    )
    for body in (
        {**ASK, "model": "short", "user": "ann@example.com"},
        {**ASK, "model": "short", "messages": 1},
        {**ASK, "model": "none"},
    ):
        async with stranger.post(router.url + CHAT, json=body) as response:
            await response.read()
    await router.record(3)
    await router.runner.cleanup()
    first, second, third = (json.loads(each) for each in path.read_text().splitlines())
    assert (first["requested_model"], first["model"], first["client"]) == (
        *("short", "m", "127.0.0.1"),
    )
    assert first["session"] == session_hash("ann@example.com") and "ann" not in path.read_text()
    assert (second["status"], second["requested_model"], second["session"]) == (400, "short", None)
    assert (third["status"], third["requested_model"]) == (404, "none")


def test_a_flood_of_refusals_floods_neither_log_nor_page(tmp_path: Path) -> None:
    path = tmp_path / "log"
    request_log, recent = RequestLog(RequestLogConfig(format="json", path=str(path))), Recent(0.0)
    request_log.start()
    for number in range(1000):
        refused = RequestRecord(
            request_id=str(number),
            endpoint=CHAT,
            started_s=7.0,
            ended_s=7.0 + number / 1000,
            is_admitted=False,
            status=401,
        )
        request_log.write(refused)
        recent.observe(refused)
    request_log.write(RequestRecord(request_id="real", endpoint=CHAT, started_s=7.0, ended_s=7.9))
    request_log.stop()
    written = [json.loads(line)["request_id"] for line in path.read_text().splitlines()]
    assert written == [*map(str, range(10)), "real"]
    assert (request_log.dropped_refusals, request_log.dropped) == (990, 0)
    assert (len(recent.requests), recent.window.requests) == (0, 0)
