"""A request's body is released once it can no longer be sent to another replica."""

import asyncio
import gc
import json
import tracemalloc
import weakref
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.config.settings import ReplicaConfig, TimeoutsConfig
from router.policy import ParsedRequest, Policy
from router.prompt.prompt import Prompt
from router.prompt.prompt_reader import PromptReader
from router.proxy.first_byte_waits import FirstByteWaits
from router.proxy.upstream import AttemptFailedError
from router.record.records import Cause
from tests.router.conftest import Fleet
from tests.router.scripted import (
    Act,
    chat_events,
    cut_before_headers,
    json_answer,
    raw_server,
    stream,
)

CHAT = "/v1/chat/completions"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[object]]:
    """What was parsed of requests, and the prompts that were read."""
    seen: list[weakref.ref[object]] = []
    read, parse = PromptReader.read, Policy.parse

    def parsed(*given: Any, **named: Any) -> ParsedRequest:
        asked = parse(*given, **named)
        seen.append(weakref.ref(asked))
        return asked

    async def reads(*given: Any, **named: Any) -> Prompt:
        prompt = await read(*given, **named)
        seen.append(weakref.ref(prompt))
        return prompt

    monkeypatch.setattr(Policy, "parse", parsed)
    monkeypatch.setattr(PromptReader, "read", reads)
    return seen


@pytest.mark.parametrize("retried", [False, True])
async def test_a_stream_keeps_neither_fields_nor_prompt(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    held: list[weakref.ref[object]],
    retried: bool,
) -> None:
    end = asyncio.Event()
    answer = stream(*chat_events("a", "b"), gates=(None, end))
    fleet.one.will(cut_before_headers if retried else answer)
    fleet.two.will(answer)
    router = await fleet.router()
    ask = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    async with client.post(router.url + CHAT, json=ask) as response:
        await response.content.readany()
        gc.collect()
        assert len(held) == 2
        assert [each() for each in held] == [None, None]
        end.set()
        assert b"[DONE]" in await response.read()


OK = stream(*chat_events("a", "b"))
CUT_BEFORE_BYTES = stream(cut=True)


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    "act", [OK, cut_before_headers, CUT_BEFORE_BYTES, json_answer({}, status=503), silent, "hung"]
)
@pytest.mark.parametrize("reused", [False, True])
async def test_a_request_is_released_without_the_garbage_collector(  # noqa: PLR0917  (fixtures)
    fleet: Fleet,
    client: aiohttp.ClientSession,
    held: list[weakref.ref[object]],
    act: Act | str,
    reused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exception that a frame of its own traceback names would keep the body."""
    ask = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    router = await fleet.router(timeouts=TimeoutsConfig(first_byte_s=0.2))
    for replica in (fleet.one, fleet.two):
        replica.will(OK)
        if reused:
            async with client.post(router.url + CHAT, json=ask) as response:
                await response.read()
        replica.will(silent if isinstance(act, str) else act)
    if isinstance(act, str):
        # All waits are given up as they begin.
        monkeypatch.setattr(
            FirstByteWaits,
            "_look_at",
            lambda _, each: each.wait.give_up(AttemptFailedError(Cause.HUNG, "hung")),
        )
    held.clear()
    gc.collect()
    gc.disable()
    try:
        async with client.post(router.url + CHAT, json=ask) as response:
            await response.read()
        await router.record()
        assert len(held) == 2
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


async def discarding(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a request whose body is thrown away with the beginning of a stream."""
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"POST"):
        length = next(line for line in head.lower().split(b"\r\n") if b"content-length" in line)
        await reader.readexactly(int(length.split(b":")[1]))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: x\n\n")
        await reader.read()
    else:
        writer.write(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")


async def test_a_stream_does_not_keep_its_body(fleet: Fleet) -> None:
    async with raw_server(discarding) as url:
        router = await fleet.router(replicas=(ReplicaConfig(url=url),))
        size = 1_000_000
        ask = {
            "stream": True,
            "messages": [{"role": "user", "content": "hello"}],
            "kept": "x" * size,
        }
        body = json.dumps(ask).encode()
        host, port = router.url.removeprefix("http://").split(":")
        tracemalloc.start()
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\n" % CHAT.encode())
            writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert b"data: x" in await reader.readuntil(b"data: x\n\n")
            gc.collect()
            kept, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        writer.close()
        await router.record()
    assert most > size, "the body was there"
    assert kept < size / 2
