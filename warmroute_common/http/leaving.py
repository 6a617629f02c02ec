"""Leaving: told to stop, a router tells so to load balancers and clients before it listens no more.

Between two requests a client's connection may be closed at any time; a request that is just being
sent into it is lost, and its client cannot know whether it was read. So clients are told with their
last answers (``Connection: close``), and load balancers by the health endpoint.
"""

from dataclasses import dataclass
from typing import Final

from aiohttp import web


@dataclass(kw_only=True)
class Leaving:
    """Whether an application's server leaves its service."""

    has_begun: bool = False


LEAVING: Final = web.AppKey("leaving", Leaving)
"""Of every application with `announce_leaving`."""


def announce_leaving(app: web.Application) -> None:
    """Let an application's answers say so, once its server leaves."""
    leaving = app[LEAVING] = Leaving()

    async def tell(_: web.Request, response: web.StreamResponse) -> None:
        if leaving.has_begun:
            response.force_close()
            response.headers["Connection"] = "close"

    app.on_response_prepare.append(tell)
