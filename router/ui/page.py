"""Answering for the page: its files, and the state that it shows."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from aiohttp import web

from router.fleet import Fleet
from router.ui.recent import Recent
from router.ui.state import state
from warmroute_common.http import as_json

_DIRECTORY: Final = Path(__file__).parent / "static"

FILES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "/ui": "index.html",
        **{
            f"/ui/{name}": name
            for name in (
                *("style.css", "icon.svg"),
                *("main.js", "elements.js", "words.js", "fleet.js", "requests.js"),
                *("chart.js", "sessions.js", "explain.js"),
            )
        },
    }
)
"""The page's files by their paths; none of them holds data."""

_HEADERS: Final = {
    # Scripts, styles and data from here alone, and nothing inline: whatever a replica calls its
    # model, it cannot run in the page.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Asked for again each time, so that the page of a new version is shown at once.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, kw_only=True)
class Page:
    """Answers with what the page shows."""

    fleet: Fleet
    recent: Recent
    waiting: Callable[[], int]
    """How many requests are held back in the router."""

    async def state(self, request: web.Request) -> web.Response:
        """``GET /ui/state``."""
        shown = state(
            self.fleet,
            self.recent,
            waiting=self.waiting(),
            now_s=time.monotonic(),
            wall_s=time.time(),
        )
        answer = as_json(shown)
        answer.headers["Cache-Control"] = "no-store"
        return answer

    async def file(self, request: web.Request) -> web.StreamResponse:
        """One of `FILES`."""
        return web.FileResponse(_DIRECTORY / FILES[request.path], headers=_HEADERS)
