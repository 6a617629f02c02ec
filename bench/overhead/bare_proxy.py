"""The least that a proxy in Python does: aiohttp and uvloop, and nothing else.

It takes a request whole, sends it to the next replica, and passes the answer's
bytes on as they come. No routing, no retries, no health, no metrics: what a
router costs beyond this is its own.

    python -m bench.overhead.bare_proxy --port 8080 http://127.0.0.1:8001 ...
"""

import argparse
import asyncio
import itertools
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
import uvloop
from aiohttp import web
from multidict import CIMultiDict

_OF_THE_CONNECTION: Final = frozenset(
    {"host", "connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer"}
)
_MAX_BODY_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class BareProxy:
    """Forwards to one replica after the other."""

    session: aiohttp.ClientSession
    urls: Iterator[str]

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Answer a request with what the next replica answers."""
        body = await request.read()
        async with self.session.request(
            request.method,
            next(self.urls) + request.path_qs,
            headers=_passed_on(request.headers),
            data=body,
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    every = headers.items()
    return CIMultiDict(each for each in every if each[0].lower() not in _OF_THE_CONNECTION)


def application(proxy: BareProxy) -> web.Application:
    """Return what serves every path by a proxy."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", proxy.forward)
    return app


async def serve(port: int, urls: Sequence[str]) -> None:
    """Serve until SIGTERM or SIGINT."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )
    async with session:
        app = application(BareProxy(session, itertools.cycle(urls)))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.overhead.bare_proxy")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("urls", nargs="+", metavar="URL", help="of a replica")
    arguments = parser.parse_args(argv)
    uvloop.run(serve(arguments.port, arguments.urls))
    return 0


if __name__ == "__main__":
    sys.exit(main())
