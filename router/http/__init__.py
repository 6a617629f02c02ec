"""HTTP of any of the router's applications: reading a body, and errors as answers.

`read_body` keeps to the limit of a body, `read_body_soon` to one of time too; `errors_answered` is
the middleware that gives every error the shape that the path's clients parse (OpenAI's or
Anthropic's); `as_json` makes an answer.

Called by proxy, controller, lmcache and the application. Imports config.
"""

from router.http.boundary import (
    as_json,
    error_body,
    errors_answered,
    is_anthropic,
    read_body,
    read_body_soon,
)

__all__ = [
    "as_json",
    "error_body",
    "errors_answered",
    "is_anthropic",
    "read_body",
    "read_body_soon",
]
