"""What Envoy bounds, with the router's own settings: bodies, waits, memory of slow clients."""

import asyncio
import io
import json
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.config.settings import AdmissionConfig, PrefetchConfig, TimeoutsConfig
from tests.router.conftest import Wait
from tests.router.gateway.conftest import CHAT, Gateway, Settings, chat
from tests.router.scripted import CHAT_ANSWER, json_answer

MIB = 1 << 20
PIECE = b"x" * (64 << 10)
SOCKET_BYTES = 64 << 10
MOST_IN_BUFFERS = 4 * MIB
"""Of Envoy, which has 1 MiB for each connection, and of four sockets that do not grow."""


def short(**changes: float) -> TimeoutsConfig:
    return TimeoutsConfig(health_interval_s=60.0, drain_s=1.0, **changes)


async def test_a_body_that_does_not_come_whole_is_refused(gateway: Gateway) -> None:
    gateway.timeouts = short(body_s=0.3)
    soon: dict[str, Any] = {
        "admission": AdmissionConfig(max_wait_s=0.1),
        "prefetch": PrefetchConfig(wait_cap_s=0.1),
    }
    picker, _ = await gateway.both(**soon)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(picker.url.rpartition(":")[2]))
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{" % CHAT.encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    writer.close()
    assert picker.in_flight() == 0


async def test_a_replica_that_does_not_begin_in_time_is_made_good_by_the_next(
    gateway: Gateway, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    never = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    # The second one answers within this time, on a busy machine too.
    gateway.timeouts = short(first_byte_s=3.0)
    gateway.one.will(hang)
    gateway.two.will(json_answer(CHAT_ANSWER))
    picker, _ = await gateway.both()
    async with client.post(picker.url + CHAT, json=chat()) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["x-warmroute-replica"] == "two"
    await eventually(lambda: picker.in_flight() == 0)


async def test_a_large_body_is_sent_again_to_the_next(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    gateway.one.will(json_answer({}, status=503))
    gateway.two.will(json_answer(CHAT_ANSWER))
    picker, _ = await gateway.both()
    asked = chat("x" * (20 * MIB))
    body = io.BytesIO(json.dumps(asked).encode())
    async with client.post(picker.url + CHAT, data=body) as answer:
        assert answer.status == 200, await answer.text()
    assert len(gateway.one.seen) == 1
    assert len(gateway.two.seen[0].body) > 20 * MIB


def with_small_sockets(settings: Settings) -> Settings:
    """Have the kernel keep little for Envoy: by itself, buffers grow to tens of megabytes."""

    def fixed(option: int) -> dict[str, Any]:
        return {
            "socket_options": [
                {
                    "level": socket.SOL_SOCKET,
                    "name": option,
                    "int_value": SOCKET_BYTES,
                    "state": "STATE_PREBIND",
                }
            ]
        }

    (listener,) = settings["static_resources"]["listeners"]
    listener |= fixed(socket.SO_SNDBUF)
    replicas = settings["static_resources"]["clusters"][0]
    replicas["upstream_bind_config"] = fixed(socket.SO_RCVBUF)
    return settings


@pytest.mark.slow
async def test_a_client_that_never_reads_makes_its_replica_wait(
    gateway: Gateway, eventually: Wait
) -> None:
    sent_bytes = 0
    waits = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent_bytes
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        assert request.transport is not None
        made = request.transport.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        while True:
            write = asyncio.ensure_future(response.write(PIECE))
            try:
                await asyncio.wait_for(asyncio.shield(write), 1.0)
            except TimeoutError:
                waits.set()
                await write
            sent_bytes += len(PIECE)

    gateway.one.will(endless)
    picker, _ = await gateway.both(with_small_sockets)

    def small(address: aiohttp.AddrInfoType) -> socket.socket:
        made = socket.socket(*address[:3])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        return made

    connector = aiohttp.TCPConnector(socket_factory=small)
    async with aiohttp.ClientSession(connector=connector) as client:
        answer = await client.post(picker.url + CHAT, json=chat(stream=True))
        await waits.wait()
        assert sent_bytes < MOST_IN_BUFFERS
        answer.close()
        await gateway.one.aborted.wait()
        await eventually(lambda: picker.in_flight() == 0)
