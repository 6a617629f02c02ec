"""Where a request belongs in a trace: the W3C's ``traceparent``, read and written."""

import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import nan
from typing import Final, NamedTuple

from router.fleet import Decision
from router.index import Tier
from router.staging import StagingResult

_HEADER: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_UNKNOWN_VERSION: Final = "ff"
_FIRST_VERSION: Final = "00"
_SAMPLED: Final = 1
_RATIO_BITS: Final = 64
"""A trace's lower bits decide whether it is sampled, as in OpenTelemetry's own sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A request's place in its trace."""

    trace_id: str
    """32 hex digits."""
    parent_id: str | None = None
    """The client's span, if it sent one; 16 hex digits, as below."""
    span_id: str | None = None
    """The router's own span; None where the router makes none."""
    is_sampled: bool = False

    def header(self, span_id: str) -> str:
        """Return the ``traceparent`` for what a span of the router's asks."""
        return f"{_FIRST_VERSION}-{self.trace_id}-{span_id}-{int(self.is_sampled):02x}"


def trace_context(traceparent: str | None, sample_ratio: float | None) -> TraceContext | None:
    """Return the place of a request that came with this header.

    ``sample_ratio`` is that of requests without one, None where the router makes no spans:
    then there is only the client's. A header that is not one counts as none.
    """
    sent = None if traceparent is None else _parsed(traceparent)
    if sample_ratio is None:
        return sent
    if sent is not None:
        return replace(sent, span_id=new_span_id())
    trace = random.getrandbits(128) or 1
    is_sampled = trace % (1 << _RATIO_BITS) < sample_ratio * (1 << _RATIO_BITS)
    return TraceContext(trace_id=f"{trace:032x}", span_id=new_span_id(), is_sampled=is_sampled)


def new_span_id() -> str:
    """Return the id of a new span."""
    return f"{random.getrandbits(64) or 1:016x}"


def _parsed(traceparent: str) -> TraceContext | None:
    found = _HEADER.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    is_wrong = version == _UNKNOWN_VERSION or (version == _FIRST_VERSION and more is not None)
    if is_wrong or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    is_sampled = bool(int(flags, 16) & _SAMPLED)
    return TraceContext(trace_id=trace_id, parent_id=parent_id, is_sampled=is_sampled)


# TODO of router.record.records: One record of each request: headers of its answer, log, metrics and traces are made of it.
#
# The proxy fills it in while the request is under way, and hands it out once, at the end,
# whatever the end was. Nothing else is told about requests.


class Outcome(StrEnum):
    """How a request ended, seen from the client."""

    OK = "ok"
    """The replica's answer was passed on whole, whatever its status."""
    REFUSED = "refused"
    """The router answered with an error of its own; no replica had begun to answer."""
    CUT = "cut"
    """The replica's answer broke off after its first byte."""
    ENDED = "ended"
    """The answer had begun when its gateway ended the request: its client has all of it or has
    gone, which the gateway does not tell."""
    CLIENT_GONE = "client-gone"
    """The client went away before the answer's end, which the replica had not broken off."""
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
    HUNG = "hung"
    """What the replica waits for has ended: its LMCache server."""
    SILENT = "silent"
    """Before it began to answer, the replica answered no health checks any more."""
    GATEWAY = "gateway"
    """The gateway went on to another replica, and does not tell why."""
    TIMEOUT = "timeout"
    """No first byte within ``timeouts.first_byte_s``."""
    ABSENT = "absent"
    """The replica answered 404, and another may keep what was asked for."""


@dataclass(frozen=True, kw_only=True)
class FailedTry:
    """One replica that was tried in vain."""

    replica_id: str
    cause: Cause
    detail: str
    retry_after_s: float | None = None
    """When it would take the request, as it said (``Retry-After``)."""
    ended_s: float = field(default_factory=time.monotonic, compare=False)


class RequestStep(NamedTuple):
    """Something that a request went through at the router."""

    name: str
    """``read`` (its prompt), ``wait`` (for a replica), ``stage`` (KV), ``retry`` (waiting to)."""
    began_s: float
    ended_s: float


class Try(NamedTuple):
    """One replica that a request was sent to."""

    replica_id: str
    url: str
    began_s: float
    span_id: str | None
    """The caller's span that the replica was told; None where the router makes none."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Everything worth knowing of a request. Times in seconds, by the router's clock.

    A value is None (or empty) where the request did not get that far or nothing told it.
    """

    request_id: str
    endpoint: str
    """Its path where that is an endpoint of a known API, else ``other``."""
    method: str = ""
    path: str = ""
    """As the client wrote it: percent-encoded."""
    model: str | None = None
    """The one that replicas are asked for."""
    trace: TraceContext | None = None
    """Where it belongs in a trace; None where nothing says so, and none is made."""
    key: str | None = None
    """The name of the client's key."""
    started_s: float
    ended_s: float = nan
    read_s: float | None = None
    """Reading the prompt: template, tokens."""
    place_s: float | None = None
    """Deciding: keys, match, costs."""
    held_s: float | None = None
    """Until a replica could soon begin; the predicted TTFT counts from its end."""
    retry_wait_s: float | None = None
    """Between its tries: for its turn among the retries, a pause, a replica's ``Retry-After``."""
    rejected: str | None = None
    """Why the router did not let it wait any longer, or at all: "full", "deadline"."""
    replica_id: str | None = None
    """The replica that was asked last."""
    reason: str | None = None
    home: str | None = None
    """The replica that was the session's home when it was decided."""
    prompt_tokens: int | None = None
    matched_tokens: Mapping[Tier, int] = field(default_factory=dict)
    """By tier, as the router believed when it decided."""
    predicted_ttft_s: float | None = None
    prepared: StagingResult = field(default_factory=StagingResult)
    """At that replica."""
    failed_tries: list[FailedTry] = field(default_factory=list)
    steps: list[RequestStep] = field(default_factory=list)
    tries: list[Try] = field(default_factory=list)
    """In their order, failed or not; the gateway's are not known."""
    streamed: bool = False
    first_byte_s: float | None = None
    """When the first byte of the answer's body came if it is streamed, else its headers."""
    cached_tokens: int | None = None
    """As the replica's ``usage`` said."""
    output_tokens: int | None = None
    response_bytes: int = 0
    outcome: Outcome = Outcome.FAILED
    status: int | None = None
    """The status sent to the client."""
    error: str | None = None

    def decided(self, decision: Decision) -> None:
        """Note where the request goes. The decision's keys are not kept: they may be long."""
        self.replica_id, self.reason = decision.replica_id, decision.reason
        self.home = decision.home
        self.prompt_tokens, self.matched_tokens = decision.prompt_tokens, decision.matched_tokens
        self.predicted_ttft_s = decision.predicted_ttft_s

    def step(self, name: str, began_s: float) -> None:
        """Note that a `RequestStep` has ended now."""
        self.steps.append(RequestStep(name, began_s, time.monotonic()))

    def begin_try(self, url: str) -> str | None:
        """Note that the request is sent to its replica now.

        Returns the ``traceparent`` for it, None where it gets the client's, if that sent one.
        """
        made = self.trace is not None and self.trace.span_id is not None
        span_id = new_span_id() if made else None
        self.tries.append(Try(str(self.replica_id), url, time.monotonic(), span_id))
        return None if self.trace is None or span_id is None else self.trace.header(span_id)

    def waited_to_retry(self, began_s: float) -> None:
        """Note that the request has waited between two tries until now."""
        self.retry_wait_s = (self.retry_wait_s or 0.0) + time.monotonic() - began_s
        self.step("retry", began_s)

    def end(self, outcome: Outcome, *, error: str | None = None) -> None:
        """Note how the request ended. The first end counts: others are its consequences."""
        if self.outcome is Outcome.FAILED:
            self.outcome, self.error = outcome, error

    @property
    def ttft_s(self) -> float | None:
        """From accepting the request to its first byte."""
        return None if self.first_byte_s is None else self.first_byte_s - self.started_s

    @property
    def total_s(self) -> float:
        """From accepting the request to its end."""
        return self.ended_s - self.started_s


def answer_headers(record: RequestRecord) -> dict[str, str]:
    """Return the headers in which the router tells of a request that a replica answers."""
    headers = {
        "x-request-id": record.request_id,
        "x-warmroute-replica": str(record.replica_id),
        "x-warmroute-reason": str(record.reason),
        "x-warmroute-prompt-tokens": str(record.prompt_tokens),
        "x-warmroute-predicted-ttft-ms": f"{(record.predicted_ttft_s or 0.0) * 1000:.1f}",
        "x-warmroute-held-ms": f"{(record.held_s or 0.0) * 1000:.1f}",
        "x-warmroute-retries": str(len(record.failed_tries)),
    }
    for tier in Tier:
        headers[f"x-warmroute-matched-{tier}"] = str(record.matched_tokens.get(tier, 0))
    return headers | record.prepared.headers()
