"""Which pages in browsers may ask the router, where they are of another origin (CORS)."""

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from router.config import CorsConfig
from router.policy import METHODS

_PREFLIGHT_MAX_AGE_S: Final = 7200
"""So long may a browser remember what it was allowed; none remembers it for longer."""


def allow_origins(app: web.Application, config: CorsConfig) -> None:
    """Let pages of the configured origins ask an application, and read all of its answers.

    Written by the Fetch standard's section 3.3 (CORS protocol); cookies are not allowed for.
    """
    is_any = "*" in config.allow_origins

    async def tell(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("Origin")
        if not is_any:
            response.headers.add("Vary", "Origin")
        if origin is not None and (is_any or origin in config.allow_origins):
            response.headers["Access-Control-Allow-Origin"] = "*" if is_any else origin
            response.headers["Access-Control-Expose-Headers"] = "*"

    app.on_response_prepare.append(tell)
    # Outermost: a preflight has no key, and an error is read by the page too.
    app.middlewares.insert(0, _preflights_answered)


@web.middleware
async def _preflights_answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    asked = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
    if request.method != "OPTIONS" or not asked:
        return await handler(request)
    allowed = {
        "Access-Control-Allow-Methods": ", ".join(METHODS),
        # By name: a * would leave out Authorization.
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "*"),
        "Access-Control-Max-Age": str(_PREFLIGHT_MAX_AGE_S),
    }
    return web.Response(status=204, headers=allowed)
