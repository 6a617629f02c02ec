"""HTTP of any of the router's applications: connections, bodies, and errors as answers.

`Site` listens: what is no HTTP is answered, idle connections are closed. `read_body` keeps to the
limits of a body, and to those of all `Bodies` together; `errors_answered` is the middleware that
gives every error the shape that the path's clients parse (OpenAI's or Anthropic's); `as_json`
makes an answer. `announce_leaving` tells clients that the server is about to stop.

Called by access, proxy, controller, lmcache and the application. Imports config.
"""

from warmroute_common.http.boundary import (
    BODIES,
    Bodies,
    as_json,
    defect,
    error_body,
    errors_answered,
    is_anthropic,
    leaves_body,
    read_body,
    release_body,
)
from warmroute_common.http.connections import Site
from warmroute_common.http.leaving import LEAVING, Leaving, announce_leaving

__all__ = [
    "BODIES",
    "LEAVING",
    "Bodies",
    "Leaving",
    "Site",
    "announce_leaving",
    "as_json",
    "defect",
    "error_body",
    "errors_answered",
    "is_anthropic",
    "leaves_body",
    "read_body",
    "release_body",
]
