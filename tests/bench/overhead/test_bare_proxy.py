"""The bare proxy: what goes in comes out, byte for byte, when it comes."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.overhead.bare_proxy import BareProxy, application

ODD_BYTES = bytes(range(256)) * 300


@asynccontextmanager
async def proxied(*handlers: web.RequestHandler | object) -> AsyncIterator[str]:
    """Run a proxy before one server for each handler; yield its URL."""
    servers = []
    for handler in handlers:
        app = web.Application(client_max_size=1 << 20)
        app.router.add_route("*", "/{path:.*}", handler)  # type: ignore[arg-type]
        servers.append(TestServer(app))
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        for each in servers:
            await each.start_server()
        urls = itertools.cycle(str(each.make_url("")).rstrip("/") for each in servers)
        async with TestServer(application(BareProxy(session, urls))) as proxy:
            yield str(proxy.make_url("")).rstrip("/")
        for each in servers:
            await each.close()


async def test_body_and_answer_go_through_byte_for_byte() -> None:
    async def echo(request: web.Request) -> web.Response:
        body = await request.read()
        text = f"{request.method} {request.path_qs} {request.headers['x-own']}"
        return web.Response(body=body[::-1], status=418, headers={"x-seen": text})

    async with proxied(echo) as url, aiohttp.ClientSession() as http:
        asked = http.post(f"{url}/a/b?c=1", data=ODD_BYTES, headers={"x-own": "mine"})
        async with asked as answer:
            assert await answer.read() == ODD_BYTES[::-1]
            assert answer.status == 418
            assert answer.headers["x-seen"] == "POST /a/b?c=1 mine"
            assert answer.headers["Content-Length"] == str(len(ODD_BYTES))


async def test_a_stream_is_passed_on_piece_by_piece_and_not_kept_to_its_end() -> None:
    read_first = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        # Were the stream kept to its end, nobody would ever read the first piece.
        await read_first.wait()
        await response.write(ODD_BYTES)
        return response

    async with (
        proxied(stream) as url,
        aiohttp.ClientSession() as http,
        http.post(url, data=b"{}") as answer,
    ):
        assert await answer.content.readexactly(9) == b"data: 1\n\n"
        read_first.set()
        assert await answer.read() == ODD_BYTES
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.headers["Transfer-Encoding"] == "chunked"


async def test_replicas_get_requests_in_turn() -> None:
    def named(name: str) -> object:
        async def handler(request: web.Request) -> web.Response:
            return web.Response(text=name)

        return handler

    async with proxied(named("a"), named("b")) as url, aiohttp.ClientSession() as http:
        answers = [await (await http.get(url)).text() for _ in range(4)]
    assert answers == ["a", "b", "a", "b"]
