"""What the router does not read itself reaches a replica, and comes back, byte for byte."""

import asyncio
import io
import json
import random
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from router.config.settings import ReplicaConfig, TimeoutsConfig
from router.record.records import Cause, Outcome
from tests.router.conftest import Fleet
from tests.router.scripted import Act, cut_before_headers, json_answer, stream

BYTES = random.Random(5).randbytes(3_000_000)
"""Of any content type, and more than aiohttp sends at once."""


def answer(status: int, body: bytes, headers: Sequence[tuple[str, str]]) -> Act:
    async def act(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers=CIMultiDict(headers))

    return act


# --- byte for byte


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_every_byte_of_both_directions(
    fleet: Fleet, client: aiohttp.ClientSession, method: str
) -> None:
    told = [
        ("Content-Type", "application/x-odd; v=1"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("X-Custom", "kept"),
    ]
    fleet.one.will(answer(207, BYTES, told))
    router = await fleet.router()
    target = "/v1/things/a%2Fb%20c%E9?x=%2F&y=1+2&y=%zz&empty"
    body = BYTES if method in ("POST", "PUT", "PATCH") else b""
    headers = [("Content-Type", "audio/x-raw"), ("X-Twice", "1"), ("X-Twice", "2")]
    async with client.request(
        method,
        URL(router.url + target, encoded=True),
        data=io.BytesIO(body),
        headers=CIMultiDict(headers),
    ) as response:
        got = await response.read()
    (seen,) = fleet.one.seen
    assert (seen.method, seen.path, seen.body) == (method, target, body)
    assert seen.headers["Content-Type"] == "audio/x-raw"
    assert seen.headers.getall("X-Twice") == ["1", "2"]
    assert response.status == 207
    assert got == (b"" if method == "HEAD" else BYTES)
    assert response.headers["Content-Length"] == str(len(BYTES))
    assert [each for each in response.headers.items() if each in told] == told
    assert response.headers["x-warmroute-replica"] == "one"
    record = await router.record()
    assert (record.outcome, record.endpoint) == (Outcome.OK, "other")
    assert record.path == "/v1/things/a%2Fb%20c%E9"
    assert router.in_flight() == 0


@pytest.mark.parametrize("body", [b'{"model": "m", "half', b"[1, 2]", b"", b"\xff\xfe"])
async def test_a_replica_itself_says_what_is_wrong(
    fleet: Fleet, client: aiohttp.ClientSession, body: bytes
) -> None:
    wrong = b'{"detail":  [{"type":"json_invalid"}]}\n'
    fleet.one.will(answer(422, wrong, [("Content-Type", "application/json")]))
    router = await fleet.router()
    async with client.post(f"{router.url}/v1/rerank", data=body) as response:
        assert (response.status, await response.read()) == (422, wrong)
    assert fleet.one.seen[0].body == body


async def test_a_stream_of_another_kind_is_not_buffered(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    gate = asyncio.Event()
    fleet.one.will(stream(b"\x00one", b"\xfftwo", content_type="audio/mpeg", gates=(None, gate)))
    router = await fleet.router()
    async with client.post(f"{router.url}/v1/audio/speech", json={"model": "m"}) as response:
        assert await response.content.readany() == b"\x00one"
        assert router.in_flight() == 1, "it is work of its replica"
        gate.set()
        assert await response.read() == b"\xfftwo"
    await router.record()
    assert router.in_flight() == 0


async def test_an_upload_over_the_limit_is_refused(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    router = await fleet.router(max_body_bytes=2048)
    async with client.post(f"{router.url}/v1/files", data=BYTES[:2049]) as response:
        assert response.status == 413
    assert not fleet.one.seen and not fleet.two.seen


# --- to the replica that has the model


def form(*fields: tuple[str, str | bytes]) -> aiohttp.FormData:
    data = aiohttp.FormData()
    for name, value in fields:
        if isinstance(value, str):
            data.add_field(name, value)
        else:
            data.add_field(name, io.BytesIO(value), filename="f.wav")
    return data


@pytest.mark.parametrize("first", [True, False])
async def test_a_forms_model_says_where_it_goes(
    fleet: Fleet, client: aiohttp.ClientSession, first: bool
) -> None:
    """Some clients send the file before the fields."""
    fleet.two.models = ["whisper"]
    router = await fleet.router(model_aliases={"whisper-1": "whisper"})
    fields: list[tuple[str, str | bytes]] = [("model_size", "m"), ("model", "whisper")]
    file: list[tuple[str, str | bytes]] = [("file", BYTES), ("mask", b'name="model"\r\n\r\nm')]
    for _ in range(2):
        data = form(*fields, *file) if first else form(*file, *fields)
        async with client.post(f"{router.url}/v1/audio/transcriptions", data=data) as response:
            assert response.headers["x-warmroute-replica"] == "two"
    assert all(BYTES in each.body for each in fleet.two.seen)
    fields[1] = ("model", "whisper-1")
    async with client.post(
        f"{router.url}/v1/audio/transcriptions", data=form(*file, *fields)
    ) as response:
        assert response.headers["x-warmroute-replica"] == "two"
    assert b"\r\n\r\nwhisper\r\n--" in fleet.two.seen[-1].body


async def test_a_form_without_end_is_the_replicas_to_judge(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    router = await fleet.router()
    body = b"--x" * 100_000
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    async with client.post(f"{router.url}/v1/files", data=body, headers=headers) as response:
        assert response.status == 200
    assert fleet.one.seen[0].body == body


async def test_an_alias_is_asked_for_by_the_models_own_name(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.two.models = ["org/large"]
    router = await fleet.router(model_aliases={"gpt-4o": "org/large", "gone": "away"})
    for path in ("/v1/chat/completions", "/v1/messages", "/score"):
        ask: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "model": "gpt-4o"}
        async with client.post(router.url + path, json=ask) as response:
            assert response.headers["x-warmroute-replica"] == "two"
        assert json.loads(fleet.two.seen[-1].body) == {**ask, "model": "org/large"}
    async with client.get(f"{router.url}/v1/models") as response:
        listed = {each["id"]: each for each in (await response.json())["data"]}
    assert set(listed) == {"m", "org/large", "gpt-4o"}
    async with client.get(f"{router.url}/v1/models/gpt-4o") as response:
        assert await response.json() == listed["gpt-4o"]
    async with client.post(
        f"{router.url}/v1/completions", json={"model": "gone", "prompt": "x"}
    ) as response:
        assert response.status == 404
        error = (await response.json())["error"]
    assert error["code"] == "model_not_found"
    assert error["message"] == ("no replica serves the model 'away'; served: gpt-4o, m, org/large")


# --- to the replica that keeps what it is about


async def test_what_a_replica_keeps_is_asked_for_there(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    for upstream, name in ((fleet.one, "file-1"), (fleet.two, "file-2")):
        upstream.will(json_answer({"id": name, "object": "file"}))
    router = await fleet.router()
    for _ in range(2):
        async with client.post(f"{router.url}/v1/files", data=form(("file", b"x"))) as response:
            assert response.status == 200
    for name, replica in (("file-2", "two"), ("file-2", "two"), ("file-1", "one")):
        async with client.get(f"{router.url}/v1/files/{name}/content") as response:
            assert response.headers["x-warmroute-replica"] == replica
        ask = {"input_file_id": name, "endpoint": "/v1/chat/completions"}
        async with client.post(f"{router.url}/v1/batches", json=ask) as response:
            assert response.headers["x-warmroute-replica"] == replica


async def test_what_none_is_known_to_keep_is_looked_for(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """As after a restart of the router, or where another router passed it on."""
    absent = b'{"error": "theirs"}'
    fleet.one.will(answer(404, absent, [("Content-Type", "application/json")]))
    router = await fleet.router()
    async with client.get(f"{router.url}/v1/responses/resp_9") as response:
        assert (response.status, response.headers["x-warmroute-replica"]) == (200, "two")
    async with client.post(f"{router.url}/v1/responses/resp_9/cancel") as response:
        assert (response.status, response.headers["x-warmroute-replica"]) == (200, "two")
    fleet.two.will(answer(404, absent, [("Content-Type", "application/json")]))
    async with client.delete(f"{router.url}/v1/responses/resp_9") as response:
        assert (response.status, await response.read()) == (404, absent)
    assert [each.cause for each in (await router.record()).failed_tries] == [Cause.ABSENT]
    assert router.in_flight() == 0


# --- again, or not


@pytest.mark.parametrize(
    ("method", "path", "again"),
    [("POST", "/v1/rerank", True), ("GET", "/v1/files", True), ("POST", "/v1/files", False)],
)
async def test_what_may_have_begun_is_repeated_only_where_that_does_no_harm(
    fleet: Fleet, client: aiohttp.ClientSession, method: str, path: str, again: bool
) -> None:
    fleet.one.will(cut_before_headers)
    router = await fleet.router()
    async with client.request(method, router.url + path) as response:
        assert response.status == (200 if again else 502)
    assert len(fleet.two.seen) == again
    assert router.in_flight() == 0


async def test_what_reached_no_replica_is_sent_to_another(
    fleet: Fleet, client: aiohttp.ClientSession, dead_port: int
) -> None:
    # The request finds that out, and no probe before it.
    router = await fleet.router(timeouts=TimeoutsConfig(health_interval_s=3600.0))
    dead = router.parts.fleet.replicas["one"]
    dead.config = ReplicaConfig(url=f"http://127.0.0.1:{dead_port}", instance_id="one")
    async with client.post(f"{router.url}/v1/files", data=b"x") as response:
        assert (response.status, response.headers["x-warmroute-retries"]) == (200, "1")


# --- what does not pass


async def test_what_controls_a_replica_does_not_pass(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    router = await fleet.router(passthrough=("/extra/*",))
    for path in (
        *("/sleep", "/reset_prefix_cache", "/collective_rpc", "/server_info", "/docs", "/"),
        *("/v1/load_lora_adapter", "/inference/v1/abort_requests", "/v1/../sleep", "/v1//sleep"),
        *("/v1/%2e%2e/sleep", "/v1/..%2Fsleep", "/v1/files/"),
    ):
        async with client.post(URL(router.url + path, encoded=True)) as response:
            assert response.status == 404, path
            error = (await response.json())["error"]
        assert error["code"] == "not_found" and "'passthrough'" in error["message"]
    assert not fleet.one.seen and not fleet.two.seen


async def test_what_the_operator_allows_passes(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    router = await fleet.router(passthrough=("/v1/load_lora_adapter", "/extra/*"))
    for path in ("/v1/load_lora_adapter", "/extra/a/b"):
        async with client.post(router.url + path) as response:
            assert response.status == 200
    async with client.post(f"{router.url}/v1/unload_lora_adapter") as response:
        assert response.status == 404


async def test_a_websocket_is_refused_in_words(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    router = await fleet.router()
    with pytest.raises(aiohttp.WSServerHandshakeError, match="501"):
        await client.ws_connect(f"{router.url}/v1/realtime?model=m")
    headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
    async with client.get(f"{router.url}/v1/realtime", headers=headers) as response:
        assert (await response.json())["error"]["code"] == "not_supported"
