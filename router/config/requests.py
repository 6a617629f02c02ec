"""Of clients' requests: the paths that have a prompt, and headers of the router's own."""

from typing import Final

PROMPTED: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"}
)
"""Endpoints, all POST, whose prompt's KV is worth looking for."""

MAX_WAIT_HEADER: Final = "x-warmroute-max-wait-s"
