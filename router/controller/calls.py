"""What the controller is asked: LMCache's requests, and agents' registrations.

Names and shapes are LMCache's; ``cache_salt`` is vLLM's, for prompts that were
salted. Unknown fields are refused, since a misspelled ``tokens`` would make a
``/clear`` of some chunks one of all; so are empty lists, for the same reason.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from warmroute_common.agent_protocol import UNREADABLE, Registration, TierName
from warmroute_common.api_errors import BadRequestError
from warmroute_common.http_server import as_json, read_body

Location = Literal["LocalCPUBackend", "LocalDiskBackend", "RemoteBackend"]
"""LMCache's names of the tiers, fastest first."""

TIER_OF: Final[dict[Location, TierName]] = {
    "LocalCPUBackend": "cpu",
    "LocalDiskBackend": "disk",
    "RemoteBackend": "remote",
}
LOCATION_OF: Final[dict[str, Location]] = {tier: name for name, tier in TIER_OF.items()}

Token = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Tokens = Annotated[list[Token], Meta(min_length=1)]
"""A prompt's token ids from the first one on; vLLM's ``POST /tokenize`` has them."""
Position = tuple[str, Location]
"""An instance's id, and a location."""

_T = TypeVar("_T", bound=msgspec.Struct)


class _Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any request."""


class LookupCall(_Call, frozen=True):
    """``POST /lookup``."""

    tokens: list[Token]
    cache_salt: str | None = None


class PinCall(_Call, frozen=True):
    """``POST /pin`` and ``/unpin``."""

    instance_id: str
    location: Location
    tokens: Tokens
    cache_salt: str | None = None


class ClearCall(_Call, frozen=True):
    """``POST /clear``: one location (as LMCache's code has it), several (as its page), or all."""

    instance_id: str
    location: Location | None = None
    locations: Annotated[list[Location], Meta(min_length=1)] | None = None
    tokens: Tokens | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.location is not None and self.locations is not None:
            raise ValueError("give either 'location' or 'locations', one of them")

    def tiers(self) -> list[TierName] | None:
        """Return the tiers to clear, None for all."""
        names = self.names()
        return None if names is None else [TIER_OF[each] for each in names]

    def names(self) -> list[Location] | None:
        """Return the locations to clear, each once; None for all."""
        locations = self.locations if self.location is None else [self.location]
        return None if locations is None else list(dict.fromkeys(locations))


class MoveCall(_Call, frozen=True):
    """``POST /move``."""

    old_position: Position
    new_position: Position
    tokens: Tokens
    copy: bool | None = False
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.old_position == self.new_position:
            raise ValueError("both positions are the same")


class CheckFinishCall(_Call, frozen=True):
    """``POST /check_finish``."""

    event_id: str


class HealthCall(_Call, frozen=True):
    """``POST /health``."""

    instance_id: str


class WorkerInfoCall(HealthCall, frozen=True):
    """``POST /query_worker_info``."""

    worker_ids: list[int] = []


class RegisterCall(Registration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /register`` at the monitor: a `Registration` that can be kept and shown."""

    # Printable ASCII, since a name stands in logs and in answers.
    instance_id: Annotated[str, Meta(pattern=r"^[!-~]([ -~]{0,254}[!-~])?\Z")]
    transfer_port: Annotated[int, Meta(ge=1, le=65535)] | None
    heartbeat_s: Annotated[float, Meta(gt=0, le=3600)]


def answering(
    path: str, kind: type[_T], answer: Callable[[_T], Awaitable[dict[str, Any]]]
) -> web.RouteDef:
    """Return a route for POST: its body is a ``kind``, its answer a JSON object."""

    async def handler(request: web.Request) -> web.Response:
        return as_json(await answer(await read_call(request, kind)))

    return web.post(path, handler)


async def read_call(request: web.Request, kind: type[_T]) -> _T:
    """Return a request's body; raise `BadRequestError` or `TooLargeError`.

    Only of a body that is said to be JSON: forms in web pages cannot send such.
    """
    if request.content_type != "application/json":
        raise BadRequestError(f"{request.path}: send 'Content-Type: application/json'")
    body = await read_body(request)
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise BadRequestError(f"{request.path}: {error}; it takes {_fields_text(kind)}") from None


def _fields_text(kind: type[msgspec.Struct]) -> str:
    """Return the fields of a request as a person reads them."""
    fields = msgspec.structs.fields(kind)
    required = [each.name for each in fields if each.required]
    optional = [each.name for each in fields if not each.required]
    text = f"a JSON object with {', '.join(required)}"
    if optional:
        text += f" and, if wanted, {', '.join(optional)}"
    if any("location" in each.name or "position" in each.name for each in fields):
        text += f"; locations are {', '.join(TIER_OF)}"
    return text
