"""Accepting a request: when its turn comes, and what routing needs of its body and headers."""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any, Final

import orjson
import xxhash

from router.config import MAX_WAIT_HEADER
from warmroute_common.api_errors import BadRequestError

_SESSION_FIELDS: Final = ("prompt_cache_key", "session_id", "user")
_LONGEST_SESSION: Final = 128


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """What a client asks, as far as routing needs to know."""

    endpoint: str
    body: bytes
    """As it came, unless it names an alias of a model: this is what the replica gets."""
    fields: Mapping[str, Any] = field(repr=False)
    model: str | None
    session: str | None
    max_wait_s: float = inf
    """How long the client lets its request be held."""
    has_prompt: bool = True
    """Whether there is a prompt to match."""
    ids: tuple[str, ...] = ()
    """Names of what it is about: only the replica that keeps one of these can answer."""
    repeatable: bool = True
    """Whether another replica may be asked once one may have begun."""
    seeks: bool = False
    """Whether another replica is asked where one answers 404, and none is known to keep it."""

    @property
    def streamed(self) -> bool:
        """Whether the answer is to be streamed: else nothing of it is seen before its end."""
        return self.fields.get("stream") is True


def parse(
    endpoint: str,
    body: bytes,
    headers: Mapping[str, str],
    session_header: str,
    aliases: Mapping[str, str],
) -> ParsedRequest:
    """Check a JSON body and the headers for what routing needs; raise `BadRequestError`."""
    fields = json_object(body)
    model = _text(fields, "model")
    if model is not None and model in aliases:
        body = renamed(fields, model := aliases[model])
    before = _text(fields, "previous_response_id") if endpoint == "/v1/responses" else None
    return ParsedRequest(
        endpoint=endpoint,
        body=body,
        fields=fields,
        model=model,
        session=named_session(fields, headers.get(session_header)),
        ids=() if before is None else (before,),
        max_wait_s=_max_wait_s(headers.get(MAX_WAIT_HEADER)),
    )


def renamed(fields: dict[str, Any], model: str) -> bytes:
    """Return the body that asks another model, whose name ``fields`` get; raise `BadRequestError`."""
    fields["model"] = model
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError as error:  # it writes no such depths as it reads
        raise BadRequestError(
            f"the body cannot be written for the model '{model}', which its alias stands for: "
            f"{error}"
        ) from None


def json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; raise `BadRequestError` for anything else."""
    if not body:
        raise BadRequestError("the body is empty; send a JSON object", code="invalid_json")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequestError(
            f"the body must be a JSON object, not {_json_type(value)}", code="invalid_json"
        )
    return value


def _max_wait_s(said: str | None) -> float:
    """Return the seconds that a header says; infinite without it."""
    if said is None:
        return inf
    try:
        seconds = float(said)
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


def named_session(fields: Mapping[str, Any], named: str | None) -> str | None:
    """Return the session that a header names, else a body; None without one."""
    if named:
        return _short(named)
    for name in _SESSION_FIELDS:
        value = fields.get(name)
        if isinstance(value, str) and value:
            return _short(value)
    return None


def _short(session: str) -> str:
    """Return what a session is remembered by: a long name's hash, so that memory is bounded."""
    if len(session) <= _LONGEST_SESSION:
        return session
    return xxhash.xxh3_128_hexdigest(session.encode(errors="surrogatepass"))


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


class OnePerTick:
    """Lets one request through in each turn of the event loop, in the order of their arrival.

    To read and place a prompt takes a millisecond or two, to send it some turns of the loop.
    Without this, a hundred requests that arrive together would all be read and placed in one
    turn, before the first of them is sent and before any token under way is passed on.
    """

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def enter(self) -> None:
        """Return at once, or in a later turn if a request has been let through in this one."""
        if self._taken:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._line.append(turn)
            await turn
        else:
            self._take()

    def _take(self) -> None:
        self._taken = True
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._taken = False
        while self._line:
            turn = self._line.popleft()
            if not turn.done():  # else its client has gone, and its handler was cancelled
                turn.set_result(None)
                self._take()
                return
