"""Requests that cannot be answered get an error in the client's own format."""

import asyncio
import json
from typing import Any
from unittest.mock import Mock

import aiohttp
import openai
import pytest

from router.prompt import chat_messages as messages
from tests.router.conftest import Fleet

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (CHAT, b"", 400, "the body is empty; send a JSON object"),
        (CHAT, b'{"model": ', 400, "the body is not valid JSON: "),
        (CHAT, b"\xff\xfe", 400, "the body is not valid JSON: "),
        (CHAT, b"[1]", 400, "the body must be a JSON object, not an array"),
        (CHAT, b"null", 400, "the body must be a JSON object, not null"),
        (CHAT, b'{"model": 5, "messages": []}', 400, "'model' must be a string, not a number"),
        (CHAT, b'{"model": "m", "messages": "x"}', 400, "messages"),
        ("/v1/completions", b'{"model": "m", "prompt": {}}', 400, "prompt"),
        ("/v1/responses", b'{"previous_response_id": []}', 400, "must be a string, not an array"),
        (
            CHAT,
            json.dumps({"model": "other", "messages": MESSAGES}).encode(),
            404,
            "no replica serves the model 'other'",
        ),
        ("/nothing", b"{}", 404, "POST /nothing is not forwarded to replicas"),
        ("/v1/models", b"{}", 405, "/v1/models takes GET, HEAD, not POST"),
    ],
)
async def test_refusals(  # noqa: PLR0917  (fixtures)
    fleet: Fleet,
    client: aiohttp.ClientSession,
    path: str,
    body: bytes,
    status: int,
    said: str,
) -> None:
    router = await fleet.router()
    async with client.post(router.url + path, data=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == status
    assert said in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert not fleet.one.seen and not fleet.two.seen
    assert router.in_flight() == 0


async def test_the_same_in_anthropics_shape(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    router = await fleet.router()
    async with client.post(f"{router.url}/v1/messages", data=b"[") as response:
        assert response.status == 400
        answer = await response.json()
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"


async def test_openais_client_understands(fleet: Fleet) -> None:
    router = await fleet.router()
    async with openai.AsyncOpenAI(
        base_url=f"{router.url}/v1", api_key="x", max_retries=0
    ) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(
                model="other", messages=[{"role": "user", "content": "x"}]
            )
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


LIMIT = 2048


def padded(size: int) -> bytes:
    body = json.dumps({"model": "m", "messages": MESSAGES}).encode()
    return body + b" " * (size - len(body))


@pytest.mark.parametrize("chunked", [False, True])
async def test_the_limit_is_inclusive(
    fleet: Fleet, client: aiohttp.ClientSession, chunked: bool
) -> None:
    router = await fleet.router(max_body_bytes=LIMIT)

    async def pieces(body: bytes) -> Any:
        yield body

    for size, status in ((LIMIT, 200), (LIMIT + 1, 413)):
        body = padded(size)
        async with client.post(
            router.url + CHAT, data=pieces(body) if chunked else body
        ) as response:
            assert response.status == status
            answer = await response.json()
    assert answer["error"]["code"] == "request_too_large"
    assert f"may have {LIMIT} bytes" in answer["error"]["message"]


async def test_an_announced_giant_is_refused_unread(fleet: Fleet) -> None:
    router = await fleet.router()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":")[-1]))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (1 << 40)
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_a_body_that_does_not_decompress_is_refused(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    router = await fleet.router()
    headers = {"Content-Encoding": "gzip"}
    async with client.post(router.url + CHAT, data=b"{}", headers=headers) as response:
        answer = await response.json()
        assert response.status == 400
    assert "Content-Encoding" in answer["error"]["message"]
    assert not fleet.one.seen


async def test_a_session_that_is_not_utf8_is_a_session(fleet: Fleet) -> None:
    """Also where there is no prompt, and the session alone decides."""
    router = await fleet.router(policy="session")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":")[-1]))
    body = b'{"model": "m", "prompt": "x"}'
    writer.write(
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-Session-Id: caf\xe9\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    status = await reader.readline()
    writer.close()
    assert status.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("said", ["soon", "-1", "nan"])
async def test_a_wait_that_is_no_number_is_refused_before_the_prompt_is_read(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    router = await fleet.router()
    read = Mock(side_effect=AssertionError("the prompt is read"))
    monkeypatch.setattr(router.parts.prompts, "reader_for", read)
    async with client.post(
        router.url + CHAT,
        json={"model": "m", "messages": MESSAGES},
        headers={"x-warmroute-max-wait-s": said},
    ) as response:
        answer = await response.json()
    assert response.status == 400
    assert "x-warmroute-max-wait-s" in answer["error"]["message"]
    assert not read.called


def _nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize("depth", [100, 300, 500, 900, 1000])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/v1/rerank", "/explain"])
async def test_values_in_each_other_are_no_defect(
    fleet: Fleet, client: aiohttp.ClientSession, path: str, depth: int
) -> None:
    router = await fleet.router(model_aliases={"alias": "m"})
    tool = b'{"type":"function","function":{"name":"f","parameters":%s}}' % _nested(depth)
    for model in (b"m", b"alias"):
        body = (
            b'{"model":"%s","max_tokens":1,"messages":[{"role":"user","content":"x"}],"input":"x",'
            b'"tools":[%s],"chat_template_kwargs":%s,"other":%s}'
            % (model, tool, _nested(depth), _nested(depth))
        )
        async with client.post(router.url + path, data=body) as response:
            assert response.status in (200, 400), await response.text()
    assert router.in_flight() == 0


@pytest.mark.parametrize("arguments", ["[" * 100_000, "9" * 5000, "-" + "9" * 5000, "NaN"])
async def test_arguments_of_a_call_that_cannot_be_read_are_no_defect(
    arguments: str,
) -> None:
    assert messages._arguments(arguments) == {}


async def test_an_expectation_that_is_no_text_is_refused(fleet: Fleet) -> None:
    router = await fleet.router()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":")[-1]))
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nExpect: \xf7\r\n\r\n")
    answer = await reader.readuntil(b"}")
    writer.close()
    assert answer.startswith(b"HTTP/1.1 417 "), answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2] + b"}")["error"]["type"]
