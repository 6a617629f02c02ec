"""One frozen record of each request: metrics and the log are readers of it.

The proxy fills an `Exchange` while it works and emits its `RequestRecord` once,
at the end, whatever the end was. Nothing else is told about requests.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

log = logging.getLogger("warmroute.requests")


class Outcome(StrEnum):
    """How a request ended, seen from the client."""

    OK = "ok"
    """The replica's answer was passed on whole, whatever its status."""
    REFUSED = "refused"
    """The router answered with an error of its own; no replica had begun to answer."""
    CUT = "cut"
    """The replica's answer broke off after its first byte."""
    CLIENT_GONE = "client-gone"
    """The client went away before the answer's end."""
    FAILED = "failed"
    """A defect of the router: see its log."""


class Cause(StrEnum):
    """Why one try at a replica was given up for another."""

    CONNECT = "connect"
    """No connection: refused, unreachable, or not in time."""
    CUT = "cut"
    """The connection broke before the answer's first byte."""
    STATUS = "status"
    """The replica answered 502, 503 or 504."""
    TIMEOUT = "timeout"
    """No first byte within ``timeouts.first_byte_s``."""


@dataclass(frozen=True, kw_only=True)
class FailedTry:
    """One replica that was tried in vain."""

    replica_id: str
    cause: Cause
    detail: str


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """Everything worth knowing of a request that has ended. Times in seconds.

    A value is None (or empty) where the request did not get that far or
    nothing told it.
    """

    request_id: str
    endpoint: str
    outcome: Outcome
    status: int | None
    """The status sent to the client."""
    error: str | None
    model: str | None
    session: bool
    """Whether the request named a session."""
    streamed: bool
    replica_id: str | None
    reason: str | None
    failed_tries: tuple[FailedTry, ...]
    prompt_tokens: int | None
    matched_tokens: Mapping[str, int]
    """By tier, as the router believed when it decided."""
    cached_tokens: int | None
    """As the replica's ``usage`` said."""
    output_tokens: int | None
    read_s: float | None
    """Reading the prompt: template, tokens."""
    place_s: float | None
    """Deciding: keys, match, costs."""
    admission_wait_s: float | None
    """Until a replica could soon begin; the predicted TTFT counts from its end."""
    rejected: str | None
    """Why the router did not let it wait any longer, or at all: "full", "deadline"."""
    prefetch: str | None
    """Chunks resident/promoted/pending/missing, as in the response header."""
    prefetch_result: str | None
    """Whether all was there when the request was forwarded: a `router.staging.prefetch.Timing`."""
    copy: str | None
    """KV from another replica, as in the response header."""
    copy_result: str | None
    """As ``prefetch_result``."""
    copy_bytes: int
    """Of a copy that was over when the request was forwarded."""
    prefetch_wait_s: float | None
    """For the prefetch, the copy, or both."""
    prefetch_chunks: Mapping[str, int]
    """Chunks asked for, by what had become of them when the wait was over."""
    prefetch_bytes: int
    ttft_s: float | None
    """From accepting the request to the first byte of the answer's body if it
    is streamed, else to the answer's headers."""
    predicted_ttft_s: float | None
    total_s: float
    response_bytes: int


@dataclass(kw_only=True)
class Exchange:
    """A request under way: the mutable draft of its `RequestRecord`."""

    request_id: str
    endpoint: str
    started_s: float
    outcome: Outcome = Outcome.FAILED
    status: int | None = None
    error: str | None = None
    model: str | None = None
    session: str | None = None
    streamed: bool = False
    replica_id: str | None = None
    reason: str | None = None
    failed_tries: list[FailedTry] = field(default_factory=list)
    prompt_tokens: int | None = None
    matched_tokens: Mapping[str, int] = field(default_factory=dict)
    cached_tokens: int | None = None
    output_tokens: int | None = None
    read_s: float | None = None
    place_s: float | None = None
    admission_wait_s: float | None = None
    rejected: str | None = None
    prefetch: str | None = None
    prefetch_result: str | None = None
    copy: str | None = None
    copy_result: str | None = None
    copy_bytes: int = 0
    prefetch_wait_s: float | None = None
    prefetch_chunks: Mapping[str, int] = field(default_factory=dict)
    prefetch_bytes: int = 0
    first_byte_s: float | None = None
    """The clock's reading then, not a duration."""
    predicted_ttft_s: float | None = None
    response_bytes: int = 0

    def record(self, now_s: float) -> RequestRecord:
        """Return what is known, as of the request's end."""
        first = self.first_byte_s
        return RequestRecord(
            request_id=self.request_id,
            endpoint=self.endpoint,
            outcome=self.outcome,
            status=self.status,
            error=self.error,
            model=self.model,
            session=self.session is not None,
            streamed=self.streamed,
            replica_id=self.replica_id,
            reason=self.reason,
            failed_tries=tuple(self.failed_tries),
            prompt_tokens=self.prompt_tokens,
            matched_tokens=dict(self.matched_tokens),
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            read_s=self.read_s,
            place_s=self.place_s,
            admission_wait_s=self.admission_wait_s,
            rejected=self.rejected,
            prefetch=self.prefetch,
            prefetch_result=self.prefetch_result,
            copy=self.copy,
            copy_result=self.copy_result,
            copy_bytes=self.copy_bytes,
            prefetch_wait_s=self.prefetch_wait_s,
            prefetch_chunks=dict(self.prefetch_chunks),
            prefetch_bytes=self.prefetch_bytes,
            ttft_s=None if first is None else first - self.started_s,
            predicted_ttft_s=self.predicted_ttft_s,
            total_s=now_s - self.started_s,
            response_bytes=self.response_bytes,
        )


def log_record(record: RequestRecord) -> None:
    """Write the record as one line: plain ends at INFO, troubled ones at WARNING."""
    troubled = record.outcome in (Outcome.CUT, Outcome.FAILED) or bool(record.failed_tries)
    level = logging.WARNING if troubled else logging.INFO
    if log.isEnabledFor(level):
        log.log(level, "%s", _line(record))


def _line(record: RequestRecord) -> str:
    matched = ",".join(f"{tier}:{count}" for tier, count in record.matched_tokens.items() if count)
    tries = ",".join(f"{each.replica_id}:{each.cause}" for each in record.failed_tries)
    parts = {
        "status": record.status,
        "outcome": None if record.outcome is Outcome.OK else record.outcome,
        "replica": record.replica_id,
        "reason": record.reason,
        "prompt_tokens": record.prompt_tokens,
        "matched": matched or None,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "prefetch": record.prefetch,
        "copy": record.copy,
        "held_ms": _ms(record.admission_wait_s or None),
        "ttft_ms": _ms(record.ttft_s),
        "predicted_ms": _ms(record.predicted_ttft_s),
        "total_ms": _ms(record.total_s),
        "failed_tries": tries or None,
        "error": None if record.error is None else repr(record.error),
        "id": record.request_id,
    }
    told = " ".join(f"{name}={value}" for name, value in parts.items() if value is not None)
    return f"{record.endpoint} {told}"


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.0f}"
