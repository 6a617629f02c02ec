"""The rules for clients' requests, shared by both data planes: the embedded proxy and the gateway.

`Policy` decides which paths and methods reach a replica, how a request is read, which name stands
for which model, how many replicas may be asked, and which limits hold. The proxy and the picker
ask it for each request; the Envoy configuration is generated from its `Policy.routes` and
`Policy.limits`. `check_gateway` refuses settings that a gateway would silently ignore. The keys of
clients, their models and their rates are in `router.api.access`.

This module does no I/O and reads no clock.
"""

import hmac
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from math import inf, nan
from typing import Any, Final
from urllib.parse import quote

import xxhash

from router.config.settings import RouterConfig
from router.priority import Priority, PriorityRules
from router.prompt.long_strings import LongStrings
from router.prompt.request_body import (
    BodyBytes,
    may_split,
    parsed_bytes,
    prompt_fields,
    short_members,
    with_members,
    with_new_member,
)
from router.waste.outline import NO_OUTLINE, Outline
from warmroute_common.addresses import is_loopback
from warmroute_common.api_errors import BadRequestError, NotFoundError, NotSupportedError
from warmroute_common.config_reader import ConfigLocation

PROMPTED: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"}
)
"""Endpoints, all POST, that compute KV for a prompt."""
MAX_WAIT_HEADER: Final = "x-warmroute-max-wait-s"
"""A client's limit for the time that its request is held, in seconds."""

PREFILLER_HEADER: Final = "x-prefiller-host-port"
"""Where llm-d's routing sidecar has a prompt prefilled; the picker's to set, not a client's."""

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_IDEMPOTENT: Final = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS")
_NOT_IDEMPOTENT: Final = ("POST", "PATCH")

_STATELESS: Final = frozenset(
    {
        *("/classify", "/detokenize", "/generative_scoring", "/inference/v1/generate", "/pooling"),
        *("/rerank", "/score", "/tokenize", "/v1/audio/speech", "/v1/audio/transcriptions"),
        *("/v1/audio/translations", "/v1/chat/completions/batch", "/v1/images/edits"),
        *("/v1/images/generations", "/v1/images/variations", "/v1/messages/count_tokens"),
        *("/v1/moderations", "/v1/rerank", "/v1/score", "/v2/embed", "/v2/rerank"),
    }
)
"""Endpoints that store nothing: another replica may be asked after one has begun."""
_COMPUTING: Final = frozenset(
    {
        *("/classify", "/cohere/v2/chat", "/generative_scoring", "/inference/v1/generate"),
        *("/invocations", "/pooling", "/rerank", "/score", "/v1/chat/completions/batch"),
        *("/v1/rerank", "/v1/score", "/v2/embed", "/v2/rerank"),
    }
)
"""Endpoints of vLLM, besides `PROMPTED`, that compute KV for JSON bodies."""
_FORWARDED: Final = (
    *("/v1/*", "/v2/*", "/cohere/v2/chat", "/invocations", "/ping", "/tokenizer_info", "/version"),
    *_STATELESS,
)
"""vLLM's API endpoints (0.32). Its other endpoints control the server or describe it."""
_CONTROL: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Below ``/v1/``, and yet endpoints that control the server."""
_HEALTH: Final = "/health"
"""Clients of a gateway may ask it, to see whether a request gets through to a replica."""

_DOT_SEGMENT: Final = r"(?:/|%2[fF])\.{0,2}(?:/|%2[fF]|$)"
_ODD: Final = r"[\x00-\x1f\x7f\\;]|%(?:[01][\da-fA-F]|2[5eEfF]|3[bB]|5[cC])"
"""In a decoded path: what servers cut off, take for a slash, or decode a second time."""
_ODD_ENCODED: Final = r"%(?:[01][\da-fA-F]|7[fF]|5[cC]|3[bB]|25)|[\\;]"
_NEEDLESS_ESCAPE: Final = r"%(?:2[dDeE]|3\d|[46][1-9a-fA-F]|[57][\daA]|5[fF]|7[eE])"

_SESSION_FIELDS: Final = ("prompt_cache_key", "session_id", "user")
_LONGEST_SESSION: Final = 128
_OUTPUT_FIELDS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")

_JSON_OBJECT: Final = re.compile(rb"\s*\{")
_URLENCODED: Final = "application/x-www-form-urlencoded"
_PARAMETERS: Final = r"(?:\s*;\s*[\w*-]+=(?:\"[^\"\\]*\"|[^\s\";,\\]+))*"
_PARAMETER: Final = re.compile(r';\s*([\w*-]+)=(?:"([^"]*)"|([^\s";]+))')
_FORM_TYPE: Final = re.compile(rf"multipart/form-data({_PARAMETERS})\s*;?\s*", re.IGNORECASE)
_DISPOSITION: Final = re.compile(rf"\s*form-data({_PARAMETERS})\s*", re.IGNORECASE)
_TOKEN: Final = re.compile(r"[\w-]+", re.ASCII)
_MOST_PARTS: Final = 1000
_MOST_HEADER_BYTES: Final = 4096
_LONGEST_MODEL: Final = 1024


class Plane(Enum):
    """The process that carries the bytes of a request."""

    PROXY = "proxy"
    """The router itself (``warmroute serve``)."""
    GATEWAY = "gateway"
    """Envoy, or a gateway built on it; the router is its picker (``warmroute picker``)."""


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A client's request, as far as routing needs it."""

    endpoint: str
    body: BodyBytes
    """The body for the replica: the client's, with an alias of a model replaced."""
    fields: dict[str, Any] = field(repr=False)
    """Those of the body that routing needs; cleared when the prompt has been read."""
    parsed_bytes: int
    """About how much memory ``fields`` take until then."""
    is_cut: bool = False
    """Whether a text in ``fields`` is only the beginning of that in the body."""
    media_bytes: int = 0
    """Media in the body that are not in ``fields``."""
    model: str | None
    """With an alias replaced."""
    requested_model: str | None = None
    """As the client named it."""
    session: str | None
    streamed: bool = False
    """Whether the client wants a streamed answer."""
    output_tokens: int = 0
    """How long the answer may become, if the client says that."""
    max_wait_s: float = inf
    """How long the router may hold the request, as the client asked."""
    has_prompt: bool = True
    """Whether there is a prompt to match."""
    is_form: bool = False
    """Whether the body is a form, which mostly holds audio or an image."""
    ids: tuple[str, ...] = ()
    """Ids of stored responses, files and such in the request. Only the replica that stores one of
    them can answer."""
    repeatable: bool = True
    """Whether the request may be sent to another replica after one may have begun with it."""
    priority: Priority = Priority.NORMAL
    vllm_priority: int = 0
    """The number that the replica gets as the request's ``priority``."""
    may_split: bool = False
    """Whether one replica may prefill its prompt for another one."""
    outline: Outline = NO_OUTLINE
    """What shows later which field the client has changed; empty unless ``uncached_causes``."""
    seeks: bool = False
    """Whether a 404 sends the request to the next replica, if the owner of its ids is unknown."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits for each request, in bytes and seconds."""

    body_bytes: int
    body_s: float
    """For the body to arrive."""
    held_s: float
    """Longest time that admission and prefetches hold a request."""
    connect_s: float
    first_byte_s: float | None
    """For an answer to begin, at each replica; None for no limit."""
    idle_s: float | None
    """For the next part of an answer; None for no limit."""
    replicas: int
    """How many replicas a gateway may send a repeatable request to, one after another."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """Requests that reach replicas: those to a path, or below a prefix, with these methods."""

    path: str
    """Percent-encoded."""
    is_prefix: bool
    methods: tuple[str, ...]
    repeatable: bool


class Policy:
    """The rules of one configuration. ``passthrough`` and ``aliases`` can change while it runs."""

    def __init__(self, config: RouterConfig) -> None:
        self.passthrough: Collection[str] = config.passthrough
        """Paths that reach replicas in addition to those of vLLM's API; ``/x/*``: all below."""
        self.aliases: Mapping[str, str] = config.model_aliases
        self._session_header = config.sessions.header
        self._keyless = Priority.named(config.admission.keyless_priority)
        self._replica_priorities = config.admission.replica_priorities
        self._makes_outlines = config.uncached_causes
        self._gateway_splits = config.picker is not None and config.picker.prefiller_header
        self.limits = Limits(
            body_bytes=config.max_body_bytes,
            body_s=config.timeouts.body_s,
            held_s=config.admission.max_wait_s + config.prefetch.wait_cap_s,
            connect_s=config.timeouts.connect_s,
            first_byte_s=config.timeouts.first_byte_s,
            idle_s=config.timeouts.stream_idle_s,
            # A gateway does not tell a broken connection, after which one more replica is tried at
            # most, from a refused one.
            replicas=min(config.retries, 1) + 1,
        )

    def check(self, plane: Plane, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raise `NotFoundError` for what is not forwarded, `NotSupportedError` for a WebSocket.

        ``path`` is decoded.
        """
        allowed = self._allowed(plane)
        # Servers and proxies behind the router may resolve dots and empty segments: to any path.
        has_dots = any(each in ("", ".", "..") for each in path[1:].split("/"))
        is_plain = not has_dots and re.search(_ODD, path) is None
        by_default = path.lower() not in self.refused() and _matches(path, _FORWARDED)
        if method not in METHODS or not is_plain or not (by_default or _matches(path, allowed)):
            raise not_forwarded(f"{method} {path}")
        if headers.get("upgrade", "").lower() == "websocket":
            raise NotSupportedError(f"WebSockets are not supported; {path} was asked for one")

    def parse(
        self,
        plane: Plane,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: BodyBytes,
        *,
        salt_key: bytes | None = None,
        best: Priority | None = None,
        most_chars: Callable[[str | None], int | None] = lambda _: None,
    ) -> ParsedRequest:
        """Return what routing needs of a request; raise `BadRequestError`.

        Endpoints with a prompt are checked here. Other bodies are the replica's to check. ``path``
        is decoded; ``headers`` is looked up by names in lower case. Aliases are replaced by the
        proxy only, and so is the ``priority``: a gateway has the body. With a ``salt_key``, the
        prompt's ``cache_salt`` is replaced by one that only this key's requests have. ``best`` is
        the priority class of the request's key, if it has one. ``most_chars`` returns how long a
        text a model may take; of a longer one only the beginning is read (``is_cut``).
        """
        aliases = self.aliases if plane is Plane.PROXY else {}
        session = headers.get(self._session_header.lower())
        priorities = PriorityRules(
            best=self._keyless if best is None else best,
            replicas_take_numbers=self._replica_priorities,
        )
        if has_prompt(method, path):
            return _prompted(
                *(path, headers, body, session, aliases),
                salt_key=salt_key,
                priorities=priorities,
                rewrites=plane is Plane.PROXY,
                most_chars=most_chars,
                splits=plane is Plane.PROXY or self._gateway_splits,
                makes_outline=self._makes_outlines,
            )
        content_type = headers.get("content-type", "")
        computes = method == "POST" and path in _COMPUTING
        salt_key = salt_key if computes else None
        rewriting = priorities if computes and plane is Plane.PROXY else None
        fields, named, body = _model_of(
            *(content_type, headers, body, aliases), salt_key=salt_key, priorities=rewriting
        )
        return ParsedRequest(
            endpoint=path,
            body=body,
            fields={},
            parsed_bytes=0,
            model=None if named is None else aliases.get(named, named),
            requested_model=named,
            vllm_priority=priorities.of(fields, headers).vllm_number if computes else 0,
            streamed=fields.get("stream") is True,
            session=_session(fields, session),
            has_prompt=False,
            is_form=_is_multipart(content_type),
            ids=(*path.split("/")[3:], *_named_ids(fields)),
            repeatable=is_repeatable(method, path),
            seeks=not body,
        )

    def replicas(self, request: ParsedRequest) -> int:
        """Return how many replicas may be asked after one may have begun, that one included."""
        return self.limits.replicas if request.repeatable else 1

    def routes(self) -> tuple[Route, ...]:
        """Return what a gateway forwards, the most specific first; it refuses everything else.

        Requests whose path is not canonical (`NOT_CANONICAL`) must be refused before.
        """
        exact = [
            Route(path=each, is_prefix=False, methods=("POST",), repeatable=True)
            for each in sorted(PROMPTED)
        ]
        exact += [
            Route(path=each, is_prefix=False, methods=METHODS, repeatable=True)
            for each in sorted(_STATELESS)
        ]
        others = [each for each in _FORWARDED if each not in _STATELESS]
        others += [each for each in self._allowed(Plane.GATEWAY) if each not in others]
        others.sort(key=lambda each: each.endswith("*"))
        return (
            *exact,
            *(
                Route(
                    path=quote(each.removesuffix("*")),
                    is_prefix=each.endswith("*"),
                    methods=methods,
                    repeatable=repeatable,
                )
                for each in others
                for methods, repeatable in ((_IDEMPOTENT, True), (_NOT_IDEMPOTENT, False))
            ),
        )

    def refused(self) -> tuple[str, ...]:
        """Return the paths that `routes` would forward by a prefix, and that must be refused.

        In lower case; they must be refused in any case.
        """
        return tuple(each for each in _CONTROL if each not in self.passthrough)

    def _allowed(self, plane: Plane) -> Collection[str]:
        return self.passthrough if plane is Plane.PROXY else (_HEALTH, *self.passthrough)


NOT_CANONICAL: Final = f".*(?:{_DOT_SEGMENT}|{_NEEDLESS_ESCAPE}|{_ODD_ENCODED}).*"
"""Matches a whole encoded path that could be another spelling of a path that is refused."""


def not_forwarded(request: str) -> NotFoundError:
    """Return the error for what does not reach replicas."""
    return NotFoundError(
        f"{request} is not forwarded to replicas; to allow it, add its path to 'passthrough' in "
        "the router's configuration"
    )


def has_prompt(method: str, path: str) -> bool:
    """Whether the prompt of such a request is matched with what replicas hold."""
    return method == "POST" and path in PROMPTED


def is_repeatable(method: str, path: str) -> bool:
    """Whether such a request may be sent to another replica after one may have begun with it."""
    return method in _IDEMPOTENT or path in _STATELESS or has_prompt(method, path)


def stores(method: str, path: str) -> bool:
    """Whether a replica may store the result of such a request, to be asked for by its id."""
    return method == "POST" and path not in PROMPTED and path not in _STATELESS


def endpoint_label(path: str) -> str:
    """Return the name under which requests to a path are counted: clients may send any path."""
    return path if path in PROMPTED or path in _FORWARDED else "other"


def _matches(path: str, patterns: Collection[str]) -> bool:
    return any(
        path.startswith(each[:-1]) if each.endswith("*") else path == each for each in patterns
    )


# --- reading a request


def _prompted(
    path: str,
    headers: Mapping[str, str],
    body: BodyBytes,
    session: str | None,
    aliases: Mapping[str, str],
    *,
    salt_key: bytes | None,
    priorities: PriorityRules,
    rewrites: bool,
    most_chars: Callable[[str | None], int | None],
    splits: bool,
    makes_outline: bool,
) -> ParsedRequest:
    long_strings = LongStrings(body)
    read = long_strings.rest
    size_bytes = parsed_bytes(read, long_strings.listed)
    fields = prompt_fields(read)
    named = _text(fields, "model")
    long_strings.restore(fields, most_chars(aliases.get(named or "", named)))
    size_bytes += long_strings.text_bytes
    requested = model = _text(fields, "model")
    rated = priorities.of(fields, headers)
    changed: dict[str, str | int] = {**rated.changed} if rewrites else {}
    if model is not None and model in aliases:
        changed["model"] = model = aliases[model]
    given = fields.get("cache_salt")
    # What cannot be a salt is not replaced, but refused.
    if salt_key is not None and (given is None or (isinstance(given, str) and given)):
        salt = _own_salt(salt_key, given)
        if "cache_salt" in fields:
            changed["cache_salt"] = salt
        else:
            body = with_new_member(body, "cache_salt", salt)
            read = with_new_member(read, "cache_salt", salt)
        fields["cache_salt"] = salt
    if changed:
        body = long_strings.put_back(with_members(read, changed))
    before = _text(fields, "previous_response_id") if path == "/v1/responses" else None
    return ParsedRequest(
        endpoint=path,
        body=body,
        fields=fields,
        parsed_bytes=size_bytes,
        is_cut=long_strings.is_cut,
        media_bytes=long_strings.media_bytes,
        model=model,
        requested_model=requested,
        streamed=fields.get("stream") is True,
        session=_session(fields, session),
        output_tokens=_output_tokens(fields),
        ids=() if before is None else (before,),
        max_wait_s=_max_wait_s(headers.get(MAX_WAIT_HEADER)),
        priority=rated.priority,
        vllm_priority=rated.vllm_number,
        may_split=splits and may_split(path, fields),
        outline=Outline.of(fields) if makes_outline and not long_strings.is_cut else NO_OUTLINE,
    )


def _own_salt(salt_key: bytes, given: str | None) -> str:
    """Return a salt that nobody without the key can make, for a client's own salt or none."""
    # A prefix keeps a client's salt "" apart from none, should vLLM ever take it.
    text = "" if given is None else f"/{given}"
    return hmac.digest(salt_key, text.encode(errors="surrogatepass"), "sha256").hex()


def _model_of(
    content_type: str,
    headers: Mapping[str, str],
    body: BodyBytes,
    aliases: Mapping[str, str],
    *,
    salt_key: bytes | None,
    priorities: PriorityRules | None,
) -> tuple[Mapping[str, object], str | None, BodyBytes]:
    """Return a body's short JSON fields, the model that it names, and the body as the replica gets
    it: alias, salt and ``priority`` are replaced in it.
    """
    if _is_multipart(content_type):
        named_in_form, body = _form_model(content_type, body, aliases)
        return {}, named_in_form, body
    # A form may be JSON as well, and name another model to a reader of forms.
    if _kind(content_type) == _URLENCODED or not _JSON_OBJECT.match(body):
        return {}, None, body
    long_strings = LongStrings(body)
    read = long_strings.rest
    parsed_bytes(read, long_strings.listed)
    fields = {
        name: each for name, each in short_members(read).items() if not long_strings.is_mark(each)
    }
    named = fields.get("model")
    changed: dict[str, str | int] = {}
    if priorities is not None:
        changed |= priorities.of(fields, headers).changed
    if isinstance(named, str) and named in aliases:
        changed["model"] = aliases[named]
    if salt_key is not None:
        given = fields.get("cache_salt")
        changed["cache_salt"] = _own_salt(salt_key, given if isinstance(given, str) else None)
    if changed:
        with suppress(BadRequestError):  # the replica refuses it
            body = long_strings.put_back(with_members(read, changed))
    return fields, named if isinstance(named, str) else None, body


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _is_multipart(content_type: str) -> bool:
    return _kind(content_type).startswith("multipart/")


def _named_ids(fields: Mapping[str, Any]) -> list[str]:
    """Return the ids by which a body names stored things: ``input_file_id`` and such."""
    named = (value for key, value in fields.items() if key.endswith(("_id", "_file")))
    return [each for each in named if isinstance(each, str)]


def _form_model(
    content_type: str, body: BodyBytes, aliases: Mapping[str, str]
) -> tuple[str | None, BodyBytes]:
    """Return the form's field ``model``, and the form with its alias replaced.

    No model is found in a form that the replica might read in another way. Raises
    `BadRequestError` for several fields ``model``: parsers differ in which of them counts.
    """
    spans = []
    for start, end in _form_parts(content_type, body):
        head = body.find(b"\r\n\r\n", start, min(end, start + _MOST_HEADER_BYTES))
        name = None if head < 0 else _field_name(body[start:head])
        if name is None:
            return None, body
        if name == "model":
            spans.append((head + 4, end))
    if len(spans) > 1:
        raise BadRequestError("the form has several parts 'model'; send one", param="model")
    if not spans:
        return None, body
    start, end = spans[0]
    try:
        model = body[start:end].decode()
    except UnicodeDecodeError:
        return None, body
    if not model or end - start > _LONGEST_MODEL:
        return None, body
    if (real := aliases.get(model)) is not None:
        body = body[:start] + real.encode() + body[end:]
    return model, body


def _form_parts(content_type: str, body: BodyBytes) -> list[tuple[int, int]]:
    """Return where each part of a form begins and ends; none if anything about it is unusual."""
    known = _FORM_TYPE.fullmatch(content_type)
    parameters = None if known is None else _parameters(known[1])
    if parameters is None or parameters.get("charset", "utf-8").lower() != "utf-8":
        return []
    boundary = parameters.get("boundary", "")
    if not boundary.isascii() or not boundary or len(parameters) > 1 + ("charset" in parameters):
        return []
    delimiter = b"--" + boundary.encode()
    parts: list[tuple[int, int]] = []
    at = 0
    while body.startswith(delimiter, at) and len(parts) <= _MOST_PARTS:
        at += len(delimiter)
        if body.startswith(b"--", at):
            return parts if body[at + 2 : at + 5] in (b"", b"\r\n") else []
        found = body.find(delimiter, at)
        if not body.startswith(b"\r\n", at) or body[found - 2 : found] != b"\r\n":
            return []
        parts.append((at + 2, found - 2))
        at = found
    return []


def _field_name(head: BodyBytes) -> str | None:
    """Return the field's name in a part's headers; None if it could be read in two ways.

    A field ``model`` that is a file, or encoded, has no name either.
    """
    name: str | None = None
    is_encoded = False
    for line in head.decode("latin-1").split("\r\n"):
        header, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(header) or "\n" in value or "\r" in value:
            return None
        is_encoded |= header.lower() == "content-transfer-encoding"
        if header.lower() != "content-disposition":
            continue
        known = _DISPOSITION.fullmatch(value)
        parameters = None if known is None else _parameters(known[1])
        if name is not None or not parameters or "name" not in parameters:
            return None
        if parameters.keys() - {"name", "filename", "filename*"}:
            return None
        name = parameters["name"]
        is_encoded |= len(parameters) > 1
    return None if name == "model" and is_encoded else name


def _parameters(text: str) -> dict[str, str] | None:
    """Return a header's parameters by their names in lower case; None if one stands twice."""
    found = _PARAMETER.findall(text)
    named = {name.lower(): quoted or plain for name, quoted, plain in found}
    return named if len(named) == len(found) else None


def _max_wait_s(header: str | None) -> float:
    """Return a header's seconds; infinite without the header."""
    if header is None:
        return inf
    try:
        seconds = float(header)
    except ValueError:
        seconds = nan
    if not seconds >= 0:
        raise BadRequestError(f"the header {MAX_WAIT_HEADER} must be a number of seconds, like 2.5")
    return seconds


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequestError(
            f"'{name}' must be a string, not {_json_type(value)}", param=name, code="invalid_type"
        )
    return value


def _output_tokens(fields: Mapping[str, Any]) -> int:
    """Return how long the answer may become; 0 if the body does not say that, or wrongly."""
    given = next((fields[each] for each in _OUTPUT_FIELDS if fields.get(each) is not None), 0)
    return given if isinstance(given, int) and given > 0 else 0


def _session(fields: Mapping[str, Any], named: str | None) -> str | None:
    """Return the session named by the header, or else by the body."""
    if named:
        return _short(named)
    for name in _SESSION_FIELDS:
        value = fields.get(name)
        if isinstance(value, str) and value:
            return _short(value)
    return None


def _short(session: str) -> str:
    """Return the name, or the hash of a long one, so that memory is bounded."""
    if len(session) <= _LONGEST_SESSION:
        return session
    return xxhash.xxh3_128_hexdigest(session.encode(errors="surrogatepass"))


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


# --- what a gateway does not enforce


def check_gateway(config: RouterConfig, at: ConfigLocation) -> None:
    """Raise `ConfigError` for a setting that would not hold behind a gateway.

    ``picker.waive`` names the settings that the gateway enforces itself, or that need not hold.
    """
    picker = config.picker
    waived = () if picker is None else picker.waive
    host = "127.0.0.1" if picker is None else picker.host
    is_open = not is_loopback(host) and (picker is None or picker.client_ca is None)
    with_key = [
        *(
            at.at("replicas").item(index)
            for index, each in enumerate(config.replicas)
            if each.api_key is not None
        ),
        *([] if config.discovery.each.api_key is None else [at.at("discovery.each")]),
    ]
    serve = "run 'warmroute serve' instead"
    if config.access.keys and "access" not in waived:
        found = "are not checked behind a gateway: any client could use the replicas"
        fix = f"check keys in the gateway and add 'access' to picker.waive, or {serve}"
        raise at.at("access.keys").error(found, fix)
    if config.tls is not None and "tls" not in waived:
        found = "is not used behind a gateway: clients connect to the gateway"
        fix = f"set the certificate there and add 'tls' to picker.waive, or {serve}"
        raise at.at("tls").error(found, fix)
    if config.model_aliases and "model_aliases" not in waived:
        found = "are not replaced behind a gateway: replicas would get the alias"
        fix = (
            "let vLLM serve these names (--served-model-name), or rewrite bodies in the gateway "
            f"and add 'model_aliases' to picker.waive, or {serve}"
        )
        raise at.at("model_aliases").error(found, fix)
    if config.cors is not None and "cors" not in waived:
        found = "is not applied behind a gateway"
        fix = f"configure it in the gateway and add 'cors' to picker.waive, or {serve}"
        raise at.at("cors").error(found, fix)
    if with_key and is_open:
        found = f"would be sent to every program that can reach the picker at {host}"
        fix = (
            "set picker.host to 127.0.0.1, or let the gateway add the key, or set "
            "picker.certificate, key and client_ca, so that only your gateway is answered"
        )
        raise with_key[0].at("api_key").error(found, fix)
