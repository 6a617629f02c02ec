"""A request's record as one JSON object, for programs: names, units and meanings stay."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from router.index import Tier
from router.record.records import RequestRecord
from router.staging import StagingResult

_LONGEST: Final = 1000
"""Characters of what clients and replicas wrote."""
_Value = Callable[[RequestRecord], object]

FIELDS: Final[Mapping[str, tuple[str, _Value]]] = {
    "request_id": (
        "`X-Request-Id`: the client's, else the router's",
        lambda r: _short(r.request_id),
    ),
    "trace_id": (
        "of the client's `traceparent`, else the router's own trace",
        lambda r: None if r.trace is None else r.trace.trace_id,
    ),
    "client_key": ("name of the client's key", lambda r: r.key),
    "method": ("of HTTP", lambda r: r.method),
    "path": ("as the client wrote it, without a query", lambda r: _short(r.path)),
    "endpoint": ("the path where it is one of a known API, else `other`", lambda r: r.endpoint),
    "model": ("the one that the replica was asked for", lambda r: _short(r.model)),
    "status": ("sent to the client; null where it left before", lambda r: r.status),
    "outcome": (
        "`ok`, `refused` (by the router), `cut` (by the replica), `client-gone`, `ended` (by the "
        "gateway), `failed` (a defect)",
        lambda r: r.outcome,
    ),
    "error": ("why it did not end well", lambda r: _short(r.error)),
    "rejected": ("why it was not let wait: `full`, `deadline`", lambda r: r.rejected),
    "replica": ("the one that was asked last", lambda r: r.replica_id),
    "reason": ("why that one", lambda r: r.reason),
    "failed_tries": (
        "tries that another had to make good: `replica`, `cause`, `detail`",
        lambda r: [
            {"replica": each.replica_id, "cause": each.cause, "detail": _short(each.detail)}
            for each in r.failed_tries
        ],
    ),
    "retry_wait_s": ("waiting between its tries", lambda r: _rounded(r.retry_wait_s)),
    "streamed": ("whether the answer was", lambda r: r.streamed),
    "prompt_tokens": ("as the router counts them", lambda r: r.prompt_tokens),
    "matched_tokens": (
        "of these, by tier, what the router believed to be cached there",
        lambda r: {str(tier): r.matched_tokens.get(tier, 0) for tier in Tier},
    ),
    "cached_tokens": ("as the replica's `usage` said", lambda r: r.cached_tokens),
    "output_tokens": ("as the replica's `usage` said", lambda r: r.output_tokens),
    "response_bytes": ("of the body, passed on", lambda r: r.response_bytes),
    "read_s": ("reading the prompt: template, tokens", lambda r: _rounded(r.read_s)),
    "place_s": ("deciding where it goes", lambda r: _rounded(r.place_s)),
    "held_s": ("until a replica could soon begin with it", lambda r: _rounded(r.held_s)),
    "staged_s": (
        "waiting for its KV: prefetch, copy",
        lambda r: _rounded(r.prepared.waited_s),
    ),
    "prefetch": (
        "KV brought to CPU RAM: `result` (`in-time`, `late`, `failed`), chunks, bytes",
        lambda r: _prefetch(r.prepared),
    ),
    "copy": (
        "KV copied from another replica: `result`, `from`, chunks, bytes",
        lambda r: _copy(r.prepared),
    ),
    "predicted_ttft_s": ("from its end of waiting", lambda r: _rounded(r.predicted_ttft_s)),
    "ttft_s": (
        "from accepting it to the first byte (not streamed: to the headers)",
        lambda r: _rounded(r.ttft_s),
    ),
    "total_s": ("from accepting it to its end", lambda r: _rounded(r.total_s)),
}
"""What each field tells, beside ``time``; null where the request did not get that far."""


def json_line(record: RequestRecord, ended_s: float) -> str:
    """Return the line of a request that ended at this time since 1970."""
    time = datetime.fromtimestamp(ended_s, UTC).isoformat(timespec="milliseconds")
    told: dict[str, Any] = {"time": time.replace("+00:00", "Z")}
    told |= {name: value(record) for name, (_, value) in FIELDS.items()}
    # What others wrote may hold what UTF-8 cannot.
    return orjson.dumps(told, default=str).decode()


def _short(text: str | None) -> str | None:
    """Return text that can be written as UTF-8, and is not too long."""
    return None if text is None else text[:_LONGEST].encode(errors="replace").decode()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _prefetch(prepared: StagingResult) -> dict[str, object] | None:
    found = prepared.prefetch
    if found is None:
        return None
    return {
        "result": found.timing,
        "asked_chunks": found.asked,
        "promoted_chunks": found.promoted,
        "pending_chunks": found.pending,
        "missing_chunks": found.missing,
        "promoted_bytes": found.promoted_bytes,
        "error": _short(found.error),
    }


def _copy(prepared: StagingResult) -> dict[str, object] | None:
    found = prepared.copy
    if found is None:
        return None
    return {
        "result": found.timing,
        "from": found.source_id,
        "asked_chunks": found.asked,
        "arrived_chunks": found.arrived,
        "moved_bytes": found.moved_bytes,
        "error": _short(found.error),
    }
