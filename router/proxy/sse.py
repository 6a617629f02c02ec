"""Server-sent events, as far as a proxy reads them: where they end, and what the first ones say.

An answer has begun with its first event that carries content. Keep-alives may come before it, and
an error as the first such event is a failed try and not an answer.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

import orjson

_ENDS: Final = (b"\n\n", b"\n\r\n", b"\r\r")
"""Ends of an event: a line's end and an empty line."""
_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_MOST_HELD_BYTES: Final = 1 << 20
"""A longer event is passed on in pieces."""
_MOST_OPENING_BYTES: Final = 64 << 10
"""An answer has begun with this many bytes, whatever they say."""
KEEP_ALIVE_STARTS: Final = b":er"
"""First bytes that a keep-alive may have."""
_FINAL: Final = re.compile(
    rb"^(?:data: ?\[DONE\]|event: ?(?:message_stop|response\.(?:completed|incomplete|failed)))\r?$",
    re.MULTILINE,
)
_BEFORE_CONTENT: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
"""Types of events that a server sends before it computes anything."""
_STATUS_BY_TYPE: Final = {
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "NotFoundError": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "overloaded_error": 503,
}


class WholeEvents:
    """Passes a stream on in whole events, so that it can be ended with one more at any time."""

    __slots__ = ("_held", "is_split")

    def __init__(self) -> None:
        self._held = bytearray()
        self.is_split = False
        """Whether a part of an event was passed on, because the event is very long."""

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; return all events that are whole and were not returned."""
        held = self._held
        if not held and chunk.endswith(_ENDS):
            self.is_split = False
            return chunk
        searched = max(0, len(held) - 3)
        held += chunk
        end = max(
            (at + len(each) for each in _ENDS if (at := held.rfind(each, searched)) >= 0), default=0
        )
        if end:
            self.is_split = False
        elif len(held) > _MOST_HELD_BYTES:
            end, self.is_split = len(held), True
        return self._take(end)

    def rest(self) -> bytes:
        """Return what follows the last whole event; for a stream that has ended regularly."""
        return self._take(len(self._held))

    def _take(self, end: int) -> bytes:
        taken = bytes(self._held[:end])
        del self._held[:end]
        return taken


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error that a stream reports instead of content."""

    status: int
    """The HTTP status that it stands for."""
    body: bytes | None
    """The body of an answer with that status; None if the event has no JSON object."""

    @property
    def is_servers(self) -> bool:
        """Whether another server may do better; not so for a mistake in the request."""
        return self.status == 429 or self.status >= 500


class StreamOpening:
    """Reads a stream until its first event that carries content, or an error."""

    def __init__(self) -> None:
        self.has_begun = False
        self.error: StreamError | None = None
        """What the stream reports instead of content; also set if ``has_begun``."""
        self.held = bytearray()
        """All bytes so far, without keep-alives."""
        self._read = 0

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; return the keep-alives among them, to be passed on at once."""
        self.held += chunk
        keep_alives = b""
        while not self.has_begun and (found := _END.search(self.held, self._read)):
            event = bytes(self.held[self._read : found.end()])
            kind, self.error = _read(event)
            if kind is _Kind.KEEP_ALIVE:
                keep_alives += event
                del self.held[self._read : found.end()]
            else:
                self._read = found.end()
                self.has_begun = kind is _Kind.CONTENT
        self.has_begun = self.has_begun or len(self.held) > _MOST_OPENING_BYTES
        return keep_alives


def is_keep_alive(chunk: bytes) -> bool:
    """Whether bytes from the beginning of an event on are keep-alives only.

    False for a ``ping`` that has no name; its bytes begin as content does.
    """
    if not chunk.startswith((b":", b"event: ping", b"event:ping", b"retry:")):
        return False
    opening = StreamOpening()
    opening.feed(chunk)
    return not opening.held


def is_final(chunk: bytes) -> bool:
    """Whether whole events contain the one that completes an answer."""
    return _FINAL.search(chunk) is not None


class _Kind(Enum):
    KEEP_ALIVE = auto()
    BEFORE_CONTENT = auto()
    CONTENT = auto()


def _read(event: bytes) -> tuple[_Kind, StreamError | None]:
    name, lines = b"", []
    for line in event.splitlines():
        field, _, text = line.partition(b":")
        if field == b"event":
            name = text.strip()
        elif field == b"data":
            lines.append(text.removeprefix(b" "))
    if not lines or name == b"ping":
        return _Kind.KEEP_ALIVE, None
    data = b"\n".join(lines)
    value: Any = None
    with suppress(orjson.JSONDecodeError):
        value = orjson.loads(data)
    if not isinstance(value, dict):
        return _Kind.CONTENT, StreamError(500, None) if name == b"error" else None
    kind = value.get("type")
    if kind == "ping":
        return _Kind.KEEP_ALIVE, None
    if kind in _BEFORE_CONTENT:
        return _Kind.BEFORE_CONTENT, None
    failed = value.get("response") if kind == "response.failed" else value
    error = failed.get("error") if isinstance(failed, dict) else None
    if error or name == b"error" or kind in ("error", "response.failed"):
        return _Kind.CONTENT, StreamError(_status(error or value), _body(error, value, data))
    return _Kind.CONTENT, None


def _status(error: Any) -> int:
    if isinstance(error, dict):
        for each in (error.get("code"), error.get("status"), error.get("status_code")):
            if isinstance(each, int | str) and str(each).isdecimal() and 400 <= int(each) < 600:
                return int(each)
        for each in (error.get("code"), error.get("type")):
            if isinstance(each, str) and each in _STATUS_BY_TYPE:
                return _STATUS_BY_TYPE[each]
    return 500


def _body(error: Any, value: dict[str, Any], data: bytes) -> bytes:
    """Return an error in the shape of an answer that is not streamed."""
    if "error" in value:
        return data
    return orjson.dumps({"error": error or value})
