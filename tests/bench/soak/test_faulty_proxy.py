"""The proxy before a simulated replica: what it passes on, and each of its faults."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench.soak.faulty_proxy import (
    COMMENT,
    COMMENTED,
    COMMENTS_ONLY,
    ERROR_FIRST,
    ERROR_LATER,
    POISON,
    RESET,
    STREAM_ERROR,
    FaultyProxy,
)
from bench.soak.harness import HOST
from cacheengine.launch.vllm_launch import free_ports
from simulator.openai_server import serve_app

EVENTS = [b'data: {"n": %d}\n\n' % number for number in range(12)]
WHOLE = b'{"whole": true}'


@dataclass
class Setting:
    """A replica, the proxy before it, and a client of the proxy."""

    proxy: FaultyProxy
    client: aiohttp.ClientSession
    url: str
    runner: web.AppRunner
    never_asked: asyncio.Event
    """Set when the replica has a request that it never answers."""
    poisoned: int = 0

    async def ask(self, **body: Any) -> bytes:
        async with self.client.post(self.url, json=body) as response:
            return await response.read()

    async def broken_off(self, **body: Any) -> bytes:
        """Return what came of an answer that broke off; fail if it did not."""
        came = b""
        async with self.client.post(self.url, json=body) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                async for part in response.content.iter_any():
                    came += part
        return came


async def answer(request: web.Request) -> web.StreamResponse:
    if not (await request.json()).get("stream"):
        return web.Response(body=WHOLE, status=418, headers={"X-One": "1"})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for each in EVENTS:
        await response.write(each)
        await asyncio.sleep(0.001)
    return response


@asynccontextmanager
async def setting() -> AsyncIterator[Setting]:
    never_asked = asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        never_asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.add_routes([web.post("/", answer), web.post("/never", never)])
    runner, url = await serve_app(app, HOST, 0)
    (port,) = free_ports(1)

    async def poisoned() -> None:
        made.poisoned += 1

    proxy = FaultyProxy(port, url, seed=1, poisoned=poisoned)
    await proxy.open()
    async with aiohttp.ClientSession() as client:
        made = Setting(proxy, client, f"http://{HOST}:{port}/", runner, never_asked)
        try:
            yield made
        finally:
            proxy.close()
            proxy.end_connections()
            await runner.cleanup()


async def test_without_a_fault_all_is_passed_on() -> None:
    async with setting() as at:
        assert await at.ask(stream=True) == b"".join(EVENTS)
        async with at.client.post(at.url, json={}) as response:
            assert (response.status, response.headers["X-One"]) == (418, "1")
            assert await response.read() == WHOLE
        assert not at.proxy.effects


async def test_a_connection_ends_with_the_replica_s_and_a_closed_proxy_refuses() -> None:
    async with setting() as at:
        waiting = asyncio.create_task(at.client.post(f"{at.url}never", json={}))
        await at.never_asked.wait()
        await at.runner.cleanup()
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await waiting
        at.proxy.close()
        with pytest.raises(aiohttp.ClientConnectorError):
            await at.ask()


async def test_flapping_connections_are_refused_or_reset_and_some_work() -> None:
    async with setting() as at:
        found: set[str] = set()
        async with at.proxy.flapping():
            # How many fall into each phase depends on the machine.
            while len(found) < 3:
                try:
                    assert await at.ask() == WHOLE
                    found.add("works")
                except aiohttp.ClientConnectorError:
                    found.add("refused")
                except aiohttp.ClientError:
                    found.add("reset")
                await asyncio.sleep(0.02)
        assert found == {"works", "refused", "reset"}
        assert at.proxy.effects[RESET]
        assert {await at.ask() for _ in range(5)} == {WHOLE}


async def test_a_closing_proxy_answers_and_needs_a_new_connection_each_time() -> None:
    async with setting() as at:
        closes = []
        for closing in (at.proxy.closing(), nullcontext()):
            with closing:
                async with at.client.post(at.url, json={}) as response:
                    assert await response.read() == WHOLE
                    closes.append(response.headers.get("Connection") == "close")
        assert closes == [True, False]


async def test_comments_stand_between_events_and_some_streams_have_nothing_else() -> None:
    async with setting() as at:
        with at.proxy.sending_comments():
            assert await at.ask() == WHOLE
            assert await at.broken_off(stream=True) == 2 * COMMENT
            came = await at.ask(stream=True)
        assert came.startswith(2 * COMMENT) and came.count(COMMENT) > 5
        assert came.replace(COMMENT, b"") == b"".join(EVENTS)
        assert at.proxy.effects == {COMMENTED: 2, COMMENTS_ONLY: 1}
        assert await at.ask(stream=True) == b"".join(EVENTS)


async def test_streams_end_with_an_error_before_or_after_content() -> None:
    async with setting() as at:
        with at.proxy.breaking_streams():
            assert await at.ask() == WHOLE
            assert await at.ask(stream=True) == STREAM_ERROR
            came = await at.ask(stream=True)
        events = re.findall(rb"data: .+?\n\n", came.removesuffix(STREAM_ERROR))
        assert came.endswith(STREAM_ERROR)
        assert 0 < len(events) < len(EVENTS) and events == EVENTS[: len(events)]
        assert at.proxy.effects == {ERROR_FIRST: 1, ERROR_LATER: 1}


async def test_poison_calls_for_the_replica_s_death_and_gets_no_answer() -> None:
    async with setting() as at:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await at.ask(user=POISON)
        assert at.poisoned == 1
        assert await at.ask(user="somebody") == WHOLE
        assert at.poisoned == 1
