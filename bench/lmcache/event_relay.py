"""Passes on what LMCache's servers report to several routers: a server knows one coordinator only.

    python -m bench.lmcache.event_relay PORT URL [URL ...]

The answer with the highest status is returned, so that a server registers again if any router wants
it to.
"""

import argparse
from collections.abc import AsyncIterator, Sequence
from typing import Final

import aiohttp
from aiohttp import web

_MOST_BYTES: Final = 64 << 20
_SESSION: Final = web.AppKey("session", aiohttp.ClientSession)


def event_relay(urls: Sequence[str]) -> web.Application:
    """Return an application that sends every request to all of ``urls``."""

    async def handle(request: web.Request) -> web.Response:
        body, session = await request.read(), request.app[_SESSION]
        headers = {"Content-Type": request.content_type}
        answers = []
        for url in urls:
            async with session.request(
                request.method, url + request.path_qs, data=body, headers=headers
            ) as answer:
                answers.append((answer.status, await answer.text()))
        status, text = max(answers)
        return web.Response(status=status, text=text, content_type="application/json")

    async def with_session(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession() as app[_SESSION]:
            yield

    app = web.Application(client_max_size=_MOST_BYTES)
    app.cleanup_ctx.append(with_session)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("urls", nargs="+")
    arguments = parser.parse_args()
    web.run_app(event_relay(arguments.urls), host="127.0.0.1", port=arguments.port, print=None)
