"""What the controller is asked: LMCache's requests, checked.

Names and shapes are LMCache's; ``cache_salt`` is vLLM's, for prompts that were
salted. Unknown fields are refused, since a misspelled ``tokens`` would make a
``/clear`` of some chunks one of all.
"""

import asyncio
from typing import Annotated, Final, TypeVar

import msgspec
from aiohttp import web

from cacheengine.wire import TierName
from router.config import BadRequest
from router.http import read_body

LOCATIONS: Final[dict[str, TierName]] = {
    "LocalCPUBackend": "cpu",
    "LocalDiskBackend": "disk",
    "RemoteBackend": "remote",
}
"""LMCache's names of the tiers, fastest first."""

LOCATION_OF: Final[dict[str, str]] = {tier: name for name, tier in LOCATIONS.items()}

BODY_S: Final = 60.0
"""So long may a request's body take: who sends none must not keep others out for ever."""

Token = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Tokens = list[Token]
Position = tuple[str, str]
"""An instance's id, and a location."""

_T = TypeVar("_T", bound=msgspec.Struct)


class _Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any request."""


class LookupCall(_Call, frozen=True, kw_only=True):
    """``POST /lookup``."""

    tokens: Tokens
    cache_salt: str | None = None


class PinCall(_Call, frozen=True, kw_only=True):
    """``POST /pin`` and ``/unpin``."""

    instance_id: str
    location: str
    tokens: Tokens
    cache_salt: str | None = None


class ClearCall(_Call, frozen=True, kw_only=True):
    """``POST /clear``: one location (as LMCache's code has it), several (as its page), or all."""

    instance_id: str
    location: str | None = None
    locations: list[str] | None = None
    tokens: Tokens | None = None
    cache_salt: str | None = None


class MoveCall(_Call, frozen=True, kw_only=True):
    """``POST /move``."""

    old_position: Position
    new_position: Position
    tokens: Tokens | None = None
    copy: bool | None = False
    cache_salt: str | None = None


class CheckFinishCall(_Call, frozen=True, kw_only=True):
    """``POST /check_finish``."""

    event_id: str


class HealthCall(_Call, frozen=True, kw_only=True):
    """``POST /health``."""

    instance_id: str


class WorkerInfoCall(_Call, frozen=True, kw_only=True):
    """``POST /query_worker_info``."""

    instance_id: str
    worker_ids: list[int] = []


async def read_call(request: web.Request, kind: type[_T], limit_bytes: int) -> _T:
    """Return a request's body; raise `BadRequest` or `TooLarge`."""
    try:
        async with asyncio.timeout(BODY_S):
            body = await read_body(request, limit_bytes)
    except TimeoutError:
        raise BadRequest(f"the body did not come whole within {BODY_S:g} s") from None
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"{request.path}: {error}; it takes {_fields_text(kind)}") from None


def tier_of(location: str, field: str) -> TierName:
    """Return the tier that a location names; raise `BadRequest`, naming the known ones."""
    tier = LOCATIONS.get(location)
    if tier is None:
        raise BadRequest(
            f"'{location}' is no location; choose from {', '.join(LOCATIONS)}", param=field
        )
    return tier


def required_tokens(tokens: Tokens | None, to_do: str) -> Tokens:
    """Return the tokens; raise `BadRequest` when there are none."""
    if not tokens:
        raise BadRequest(
            f"give 'tokens', the prompt's token ids from the first one on: {to_do} (vLLM's "
            "POST /tokenize has them)",
            param="tokens",
        )
    return tokens


def cleared_tiers(call: ClearCall) -> list[TierName] | None:
    """Return the tiers that a ``/clear`` names, None for all; raise `BadRequest`."""
    if call.location is not None and call.locations is not None:
        raise BadRequest("give either 'location' or 'locations', one of them", param="location")
    if call.location is not None:
        return [tier_of(call.location, "location")]
    if call.locations is None:
        return None
    if not call.locations:
        raise BadRequest(
            "'locations' is empty: name some, or leave it out to clear every one",
            param="locations",
        )
    return list(dict.fromkeys(tier_of(each, "locations") for each in call.locations))


def _fields_text(kind: type[msgspec.Struct]) -> str:
    """Return the fields of a request as a person reads them."""
    fields = msgspec.structs.fields(kind)
    required = [each.name for each in fields if each.required]
    optional = [each.name for each in fields if not each.required]
    text = f"a JSON object with {', '.join(required)}"
    return f"{text} and, if wanted, {', '.join(optional)}" if optional else text
