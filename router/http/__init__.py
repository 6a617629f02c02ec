"""HTTP of any of the router's applications: reading a body, and errors as answers.

`read_body` keeps to the limit of a body; `errors_answered` is the middleware that gives
every error the shape that the path's clients parse (OpenAI's or Anthropic's).

Called by proxy, controller and the application. Imports config.
"""

from router.http.boundary import error_body, errors_answered, is_anthropic, read_body

__all__ = ["error_body", "errors_answered", "is_anthropic", "read_body"]
