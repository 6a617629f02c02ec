"""What a request's body tells of its prompt by itself: no template, no tokenizer."""

import json
from collections.abc import Mapping
from typing import Any, Final

from router.config import BadRequest
from router.prompt import media

# What a token id counts for in characters.
_CHARS_PER_TOKEN: Final = 4

# Settings of a request that change what its media become.
_MEDIA_SETTINGS: Final = ("mm_processor_kwargs", "media_io_kwargs")

Body = Mapping[str, Any]


def cache_salt(body: Body) -> str | None:
    """Return what keeps a tenant's prompts apart, or None; raise `BadRequest` for no string."""
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise BadRequest("'cache_salt' must be a string that is not empty", param="cache_salt")
    return salt


def media_settings(body: Body) -> str:
    """Return how the request wants its media processed; empty for no wish."""
    given = {name: body[name] for name in _MEDIA_SETTINGS if body.get(name)}
    return json.dumps(given, sort_keys=True) if given else ""


def rough_chars(body: Body) -> int:
    """Return about how many characters of prompt a body has."""
    size = 0
    for key in ("messages", "input", "prompt", "system", "tools"):
        waiting = [body.get(key)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, dict):
                waiting.extend(value.values())
            elif isinstance(value, list):
                if value and isinstance(value[0], int):
                    size += _CHARS_PER_TOKEN * len(value)
                else:
                    waiting.extend(value)
    return size


def stand_in(body: Body) -> str:
    """Return a text that begins alike for requests whose prompts begin alike."""
    lines: list[Any] = [body.get(key) for key in ("tools", "instructions", "system")]
    for key in ("messages", "input", "prompt"):
        value = body.get(key)
        value = media.shortened(value)
        lines += value if isinstance(value, list) else [value]
    return "\n".join(json.dumps(line, ensure_ascii=False) for line in lines if line is not None)
