"""Which headers are passed on, from a client to a replica and back."""

import re
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

_OWN_HEADERS: Final = ("x-warmroute-", "access-control-")
"""How the headers begin in which the router alone speaks: of a request, and of other origins."""

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Of the client's: its Host names the router, and its body arrives here decoded
# (aiohttp undoes Content-Encoding), with a length of its own.
_NOT_FORWARDED: Final = _HOP_BY_HOP | {"host", "content-length", "content-encoding", "expect"}


def forwarded_headers(
    headers: CIMultiDictProxy[str],
    *,
    request_id: str,
    api_key: str | None,
    is_keyed: bool,
    traceparent: str | None = None,
) -> CIMultiDict[str]:
    """Return the client's headers as the replica gets them.

    ``traceparent`` is the router's own, instead of the client's; None where it has none.

    Its key only where it is the replica's to check: where neither the router does (``is_keyed``)
    nor the replica has one of its own.
    """
    kept = _without(headers, _NOT_FORWARDED)
    kept["X-Request-Id"] = request_id
    if traceparent is not None:
        kept["Traceparent"] = traceparent
    if is_keyed or api_key is not None:
        for name in ("Authorization", "X-Api-Key"):
            kept.popall(name, None)
    if api_key is not None:
        kept["Authorization"] = f"Bearer {api_key}"
    return kept


def kept_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return an answer's headers without connection headers and the router's own.

    And without those that no server may send, which a client of HTTP takes and ours refuses.
    """
    return CIMultiDict(
        (name, value)
        for name, value in _without(headers, _HOP_BY_HOP).items()
        if not name.lower().startswith(_OWN_HEADERS) and not _CONTROLS.search(value)
    )


def _without(headers: CIMultiDictProxy[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    named = {
        name.strip().lower()
        for value in headers.getall("Connection", ())
        for name in value.split(",")
    }
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in dropped and name.lower() not in named
    )
