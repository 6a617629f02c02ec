"""Reading what an answer says of itself, from the bytes that pass by.

Only the answer's first and last few KB are kept and looked at once, at the end:
an id stands first in it and ``usage`` last, in every API that is proxied.
"""

import json
import re
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

_HEAD_BYTES: Final = 4 << 10
_TAIL_BYTES: Final = 16 << 10
# In a JSON string the quotes would be escaped, so text that a model has
# written about "usage" does not match.
_USAGE: Final = re.compile(rb'"usage"\s*:\s*(?=\{)')
_RESPONSE_ID: Final = re.compile(rb'"id"\s*:\s*"(resp_[^"\\\x80-\xff]+)"')
_ANY_ID: Final = re.compile(rb'"id"\s*:\s*"([^"\\\x80-\xff]{1,256})"')
_CACHED: Final = (
    ("prompt_tokens_details", "cached_tokens"),
    ("input_tokens_details", "cached_tokens"),
    ("cache_read_input_tokens",),
)
_DECODER: Final = json.JSONDecoder()
_OUTPUT: Final = (("completion_tokens",), ("output_tokens",))


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What an answer told; None where it told nothing."""

    cached_tokens: int | None = None
    output_tokens: int | None = None
    kept_id: str | None = None
    """Of what the replica keeps: a response, for a later ``previous_response_id``, or a file."""


NO_USAGE: Final = Usage()


class UsageReader:
    """Keeps an answer's beginning and end while it is passed on."""

    __slots__ = ("_head", "_ids", "_tail", "_tail_bytes")

    def __init__(self, *, any_id: bool = False) -> None:
        """``any_id``: whether more than responses is kept."""
        self._ids = _ANY_ID if any_id else _RESPONSE_ID
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Take note of the next bytes of the body."""
        if len(self._head) < _HEAD_BYTES:
            self._head += chunk[: _HEAD_BYTES - len(self._head)]
        self._tail.append(chunk)
        self._tail_bytes += len(chunk)
        while self._tail_bytes - len(self._tail[0]) >= _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    def read(self) -> Usage:
        """Return what the bytes fed so far tell."""
        usage = _last_usage(b"".join(self._tail)[-_TAIL_BYTES:])
        found = self._ids.search(self._head)
        return Usage(
            cached_tokens=_first_count(usage, _CACHED),
            output_tokens=_first_count(usage, _OUTPUT),
            kept_id=found[1].decode() if found else None,
        )


def _last_usage(tail: bytes) -> dict[str, Any]:
    matches = list(_USAGE.finditer(tail))
    if not matches:
        return {}
    text = tail[matches[-1].end() :].decode(errors="replace")
    try:
        value, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _first_count(usage: dict[str, Any], paths: tuple[tuple[str, ...], ...]) -> int | None:
    for path in paths:
        value: Any = usage
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None
