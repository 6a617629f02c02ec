"""CORS: pages of other origins that may call the router from a browser."""

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from router.config.settings import CorsConfig
from router.policy import METHODS

_PREFLIGHT_MAX_AGE_S: Final = 7200
"""How long a browser may cache a preflight's answer; browsers cap it at this."""


def allow_origins(app: web.Application, config: CorsConfig) -> None:
    """Let pages of the configured origins call an application and read its answers.

    Source: section 3.3 of the Fetch standard. Cookies are not allowed.
    """
    is_any = "*" in config.allow_origins

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("Origin")
        if not is_any:
            response.headers.add("Vary", "Origin")
        if origin is not None and (is_any or origin in config.allow_origins):
            response.headers["Access-Control-Allow-Origin"] = "*" if is_any else origin
            response.headers["Access-Control-Expose-Headers"] = "*"

    app.on_response_prepare.append(add_headers)
    # Outermost: a preflight has no key, and the page must be able to read errors.
    app.middlewares.insert(0, _preflights_answered)


@web.middleware
async def _preflights_answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    asked = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
    if request.method != "OPTIONS" or not asked:
        return await handler(request)
    allowed = {
        "Access-Control-Allow-Methods": ", ".join(METHODS),
        # By name: a * does not include Authorization.
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "*"),
        "Access-Control-Max-Age": str(_PREFLIGHT_MAX_AGE_S),
    }
    return web.Response(status=204, headers=allowed)
