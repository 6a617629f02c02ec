"""Requests of which a replica gets every byte and the router reads only where they go.

All but the endpoints in `PROMPTED`: rerank, audio, files, what else a replica offers.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import orjson

from router.config import PROMPTED
from router.proxy.parsed_request import ParsedRequest, named_session, renamed
from warmroute_common.api_errors import NotFoundError, NotSupportedError

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_COMPUTED: Final = frozenset(
    {
        *("/classify", "/detokenize", "/generative_scoring", "/inference/v1/generate", "/pooling"),
        *("/rerank", "/score", "/tokenize", "/v1/audio/speech", "/v1/audio/transcriptions"),
        *("/v1/audio/translations", "/v1/chat/completions/batch", "/v1/images/edits"),
        *("/v1/images/generations", "/v1/images/variations", "/v1/messages/count_tokens"),
        *("/v1/moderations", "/v1/rerank", "/v1/score", "/v2/embed", "/v2/rerank"),
    }
)
"""They leave nothing behind: another replica may be asked although one has begun."""

_PASSED: Final = (
    *("/v1/*", "/v2/*", "/cohere/v2/chat", "/invocations", "/ping", "/tokenizer_info", "/version"),
    *_COMPUTED,
)
"""Of vLLM's routes (0.32) those of its APIs; the others control or show the server."""
_ADMIN: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})

_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS"})
_JSON_OBJECT: Final = re.compile(rb"\s*\{")
_BOUNDARY: Final = re.compile(r'multipart/form-data\s*;.*?boundary="?([^";]+)', re.IGNORECASE)
# Bounds keep the search for the field linear, whatever the body.
_MOST_PARTS: Final = 256
_MODEL_PART: Final = re.compile(
    rb"\r\n(?:[^\r\n]{1,1024}\r\n){0,8}?"
    rb'content-disposition:[^\r\n]{0,64};\s?name=(?:"model"|model)\s?(?:;[^\r\n]{0,64})?\r\n'
    rb"(?:[^\r\n]{1,1024}\r\n){0,8}?\r\n([^\r\n]{1,1024})\r\n--",
    re.IGNORECASE,
)


def check_passes(
    method: str, path: str, headers: Mapping[str, str], allowed: Sequence[str]
) -> None:
    """Raise `NotFoundError` for what replicas are not asked, `NotSupportedError` for a WebSocket.

    ``path`` is decoded. ``allowed`` are paths that pass beside those of vLLM's APIs; a ``*`` at
    the end stands for any.
    """
    # Servers and proxies behind the router may resolve dots and empty segments: to any path.
    plain = not any(each in ("", ".", "..") for each in path[1:].split("/"))
    by_default = path not in _ADMIN and _matches(path, _PASSED)
    if not plain or not (by_default or _matches(path, allowed)):
        raise NotFoundError(
            f"the router passes no {method} {path} to replicas; where clients may reach "
            "it there, its operator allows it with 'passthrough' in the router's configuration"
        )
    if headers.get("upgrade", "").lower() == "websocket":
        raise NotSupportedError(f"the router has no WebSockets, which {path} was asked for")


def passed(
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    session_header: str,
    aliases: Mapping[str, str],
) -> ParsedRequest:
    """Return what routing needs of such a request; a body that cannot be read is the replica's.

    ``path`` is decoded; ``headers`` find theirs by names in lower case.
    """
    fields: dict[str, Any] = {}
    boundary = _BOUNDARY.match(headers.get("content-type", ""))
    if boundary:
        model, body = _form_model(body, boundary[1].encode(errors="surrogateescape"), aliases)
    else:
        fields = _json_fields(body)
        named = fields.get("model")
        model = named if isinstance(named, str) else None
        if model is not None and model in aliases:
            body = renamed(fields, model := aliases[model])
    return ParsedRequest(
        endpoint=path,
        body=body,
        fields=fields,
        model=model,
        session=named_session(fields, headers.get(session_header)),
        has_prompt=False,
        ids=(*path.split("/")[3:], *_named_ids(fields)),
        repeatable=method in _IDEMPOTENT or path in _COMPUTED,
        seeks=not body,
    )


def keeps(method: str, path: str) -> bool:
    """Whether a replica may keep what such a request makes, to be asked for by its id."""
    return method == "POST" and path not in PROMPTED and path not in _COMPUTED


def label(path: str) -> str:
    """Return what requests to a path are counted as: paths are the clients', and unbounded."""
    return path if path in PROMPTED or path in _PASSED else "other"


def _matches(path: str, patterns: Collection[str]) -> bool:
    return any(
        path.startswith(each[:-1]) if each.endswith("*") else path == each for each in patterns
    )


def _json_fields(body: bytes) -> dict[str, Any]:
    if not _JSON_OBJECT.match(body):
        return {}
    try:
        fields: dict[str, Any] = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return fields


def _named_ids(fields: Mapping[str, Any]) -> list[str]:
    """Return the ids by which a body names what a replica may keep: ``input_file_id`` and such."""
    named = (value for key, value in fields.items() if key.endswith(("_id", "_file")))
    return [each for each in named if isinstance(each, str)]


def _form_model(
    body: bytes, boundary: bytes, aliases: Mapping[str, str]
) -> tuple[str | None, bytes]:
    """Return the form's field ``model``, and the form with its alias replaced."""
    delimiter, at = b"--" + boundary, 0
    for _ in range(_MOST_PARTS):
        at = body.find(delimiter, at)
        if at < 0:
            break
        at += len(delimiter)
        if found := _MODEL_PART.match(body, at):
            model = found[1].decode(errors="replace")
            if (real := aliases.get(model)) is not None:
                body = body[: found.start(1)] + real.encode() + body[found.end(1) :]
            return real or model, body
    return None, body
