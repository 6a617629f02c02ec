"""The crowds: what each of their connections sends, and what it may cost."""

import json
from dataclasses import dataclass
from typing import Final

PATH: Final = "/v1/chat/completions"
UNREAD_TOKENS: Final = 1_000_000
"""Of an answer that has no end: the replica sends as long as something takes it."""
_BODY_BYTES: Final = 16 << 10
_KIB: Final = 1 << 10


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One crowd."""

    name: str
    what: str
    connections: int
    first: bytes
    """What each connection sends at once."""
    later: bytes = b""
    """What it sends from time to time, a byte at a time, in turns."""
    reads: bool = True
    most_bytes: int
    """What the router's memory may grow by for each connection."""


def _post(body: bytes, *, length: int | None = None) -> bytes:
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: crowd\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def _asked(tokens: int) -> bytes:
    messages = [{"role": "user", "content": "word " * 100}]
    return json.dumps(
        {"model": "sim", "stream": True, "max_tokens": tokens, "messages": messages}
    ).encode()


KINDS: Final = (
    Kind(
        name="idle",
        what="connections over which nothing comes",
        connections=5_000,
        first=b"",
        most_bytes=32 * _KIB,
    ),
    Kind(
        name="bodies",
        what="requests whose bodies come a byte at a time",
        connections=2_000,
        first=_post(b'{"x":"' + b"x" * (_BODY_BYTES // 2), length=_BODY_BYTES),
        later=b"x",
        most_bytes=2 * _BODY_BYTES + 32 * _KIB,
    ),
    Kind(
        name="unread",
        what="clients that read nothing of an answer without end",
        connections=200,
        first=_post(_asked(UNREAD_TOKENS)),
        reads=False,
        most_bytes=1024 * _KIB,
    ),
)
