"""The process of a replica: ``python -m bench.crowds.replica``, until SIGTERM.

It answers at once, or, where `UNREAD_TOKENS` are wanted, as long as something takes its bytes.
``GET /sent`` tells how many bytes of such answers it has got rid of.
"""

import asyncio
import json
import signal
import socket
import sys
import time
from typing import Final

import orjson
import uvloop
from aiohttp import web

from bench.crowds.kinds import PATH, UNREAD_TOKENS

_EVENT: Final = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'
_EVENTS: Final = _EVENT % b"word" * 8 + b"data: [DONE]\n\n"
_PIECE: Final = _EVENT % (b"x" * (16 << 10))
_SEND_BYTES: Final = 64 << 10
"""Of its sockets: what a replica's own machine keeps is not what is measured."""
_BYTES_PER_S: Final = 100e6
"""Of all answers without end together, or they would take all of this machine until they rest."""


class Replica:
    """Answers, and counts what it has sent without end."""

    def __init__(self) -> None:
        self._sent_bytes = 0
        self._due_s = 0.0

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._well),
                web.get("/v1/models", self._models),
                web.get("/sent", self._sent),
                web.post(PATH, self._answer),
            ]
        )
        return app

    async def _turn(self) -> None:
        """Wait until one more piece may go: all streams together have a bounded rate."""
        now_s = time.monotonic()
        self._due_s = max(self._due_s, now_s) + len(_PIECE) / _BYTES_PER_S
        await asyncio.sleep(self._due_s - now_s)

    async def _well(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "sim", "object": "model"}]})

    async def _sent(self, request: web.Request) -> web.Response:
        return web.json_response({"sent_bytes": self._sent_bytes})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = orjson.loads(await request.read())
        assert request.transport is not None
        connection = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while asked["max_tokens"] == UNREAD_TOKENS:
                await self._turn()
                await response.write(_PIECE)
                self._sent_bytes += len(_PIECE)
            await response.write(_EVENTS)
        except ConnectionResetError:
            pass  # whoever asked has gone
        return response


async def _serve() -> None:
    runner = web.AppRunner(Replica().app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1).start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
    await stop.wait()
    await runner.cleanup()


def main() -> int:
    """Serve; return the exit code."""
    uvloop.run(_serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
