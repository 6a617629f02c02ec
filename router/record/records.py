"""The record of one request, which answer headers, log, metrics and traces are made from.

It is filled in while the request runs, and published once, when the request has ended.
"""

import random
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import nan
from typing import Final, NamedTuple, Protocol

from router.fleet.cost_model import Cost
from router.fleet.decision import Decision
from router.index.prompt_keys import KvTier
from router.record.prompt_hashes import PromptHashes
from router.record.uncached import Uncached
from router.staging.stager import StagingResult

_HEADER: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_UNKNOWN_VERSION: Final = "ff"
_FIRST_VERSION: Final = "00"
_SAMPLED: Final = 1
_RATIO_BITS: Final = 64
"""The lower bits of a trace's id decide whether it is sampled, as in OpenTelemetry's sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A request's place in its trace (W3C ``traceparent``)."""

    trace_id: str
    """32 hex digits."""
    parent_id: str | None = None
    """The client's span, if it sent one; 16 hex digits, as below."""
    span_id: str | None = None
    """The router's own span; None if the router makes no spans."""
    is_sampled: bool = False

    def header(self, span_id: str) -> str:
        """Return the ``traceparent`` for a request below this span of the router."""
        return f"{_FIRST_VERSION}-{self.trace_id}-{span_id}-{int(self.is_sampled):02x}"


def trace_context(traceparent: str | None, sample_ratio: float | None) -> TraceContext | None:
    """Return the place in its trace of a request with this header; an invalid header is ignored.

    ``sample_ratio`` applies to requests without the header. It is None if the router makes no
    spans: then only the client's trace counts.
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


class Outcome(StrEnum):
    """How a request ended, seen from the client."""

    OK = "ok"
    """The replica's answer was passed on whole, whatever its status."""
    REFUSED = "refused"
    """The router answered with an error of its own; no replica had begun to answer."""
    CUT = "cut"
    """The replica's answer broke off after its first content."""
    ENDED = "ended"
    """The gateway ended the request after the answer had begun. It does not say whether the client
    got all of it."""
    CLIENT_GONE = "client-gone"
    """The client left before the end of an answer that the replica had not broken off."""
    FAILED = "failed"
    """A defect of the router: see its log."""


class Cause(StrEnum):
    """Why one try at a replica was given up for another."""

    CONNECT = "connect"
    """No connection: refused, unreachable, or not in time."""
    LOCAL = "local"
    """No connection, and no fault of the replica: the router has no file descriptor or memory
    left for one, or could not resolve the host name."""
    CUT = "cut"
    """The connection broke before the answer's first content."""
    ERROR = "error"
    """The replica answered 500, or its stream began with an error."""
    BUSY = "busy"
    """The replica answered 429: it is well, and takes no more now."""
    STATUS = "status"
    """The replica answered 502, 503 or 504."""
    HUNG = "hung"
    """The LMCache server that the replica waits for has ended, or the replica sleeps or is
    paused."""
    SILENT = "silent"
    """The replica stopped answering health checks before it began to answer."""
    GATEWAY = "gateway"
    """The gateway tried another replica, or has tried another one before, and does not say why."""
    TIMEOUT = "timeout"
    """No first byte within ``timeouts.first_byte_s``, or the replica computes nothing."""
    ABSENT = "absent"
    """The replica answered 404, and another may store what was asked for."""
    NO_MODEL = "no-model"
    """The replica answered 404: it does not serve the model, against what it had reported."""
    PREFILL = "prefill"
    """The replica should have prefilled the prompt for another one. It refused (4xx), or
    NixlConnector does not run there."""
    PULL = "pull"
    """The replica should have pulled the prompt's KV from another one, and answered 500. Either may
    be at fault."""


@dataclass(frozen=True, kw_only=True)
class FirstLeg:
    """The prefill of a prompt at one replica for another one."""

    replica_id: str
    seconds: float | None
    """Unknown behind a gateway."""
    cached_tokens: int | None
    """Tokens of the prompt that were cached there, as its ``usage`` said."""


@dataclass(frozen=True, kw_only=True)
class FailedTry:
    """A try at a replica that failed before its answer began."""

    replica_id: str
    cause: Cause
    detail: str
    retry_after_s: float | None = None
    """The replica's ``Retry-After``."""
    is_prefill: bool = False
    """Whether it was a first leg, to prefill the prompt for another replica."""
    ended_s: float = field(default_factory=time.monotonic, compare=False)


class RequestStep(NamedTuple):
    """A step of a request in the router."""

    name: str
    """``read`` (its prompt), ``wait`` (for a replica), ``stage`` (KV), ``prefill`` (elsewhere),
    ``retry`` (waiting to)."""
    began_s: float
    ended_s: float


class Try(NamedTuple):
    """A try: one replica that a request was sent to."""

    replica_id: str
    url: str
    began_s: float
    span_id: str | None
    """The parent span in the replica's ``traceparent``; None if the router makes no spans."""
    prefilled_s: float | None = None
    """When a first leg ended well: the prompt was prefilled there for another replica."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """All that is recorded of a request. Times in seconds, by `time.monotonic`.

    A value is None (or empty) if the request did not get that far, or if it is unknown.
    """

    request_id: str
    endpoint: str
    """Its path if that is an endpoint of a known API, else ``other``."""
    method: str = ""
    path: str = ""
    """As the client wrote it: percent-encoded."""
    client: str | None = None
    """The address of the client, or of the last proxy before the router. Behind Envoy: the last
    one in ``X-Forwarded-For``, which Envoy adds."""
    is_admitted: bool = True
    """Whether the request was let in. It was not if its key, the key's rate or its path was
    refused: then nothing was read of it, and anybody may have sent it."""
    requested_model: str | None = None
    """As the client named it: an alias, or a model."""
    model: str | None = None
    """The model that the replica is asked for, with aliases replaced."""
    session_hash: str | None = None
    """A hash of the session's name (`session_hash`): the name may be a person's."""
    trace: TraceContext | None = None
    """Its place in a trace, if it has one."""
    key: str | None = None
    """The name of the client's key."""
    priority: str | None = None
    """The name of its class, by which it waits; None without a prompt that could be parsed."""
    started_s: float
    ended_s: float = nan
    read_s: float | None = None
    """Reading the prompt: template, tokens."""
    place_s: float | None = None
    """The last placement: keys, match, costs."""
    held_s: float | None = None
    """Waiting until a replica could soon begin; the predicted TTFT counts from its end."""
    retry_wait_s: float | None = None
    """Between its tries: for a retry's turn, a pause, a replica's ``Retry-After``."""
    rejected: str | None = None
    """Why the router refused to let it wait (longer): "full", "deadline"."""
    replica_id: str | None = None
    """The replica that was asked last."""
    reason: str | None = None
    home: str | None = None
    """The replica that was the session's home when it was decided."""
    prompt_tokens: int | None = None
    is_exact: bool = False
    """Whether `prompt_tokens` are certainly what the replica computes."""
    prompt_hashes: PromptHashes | None = None
    """Only with ``request_log.prompt_hashes``."""
    matched_tokens: Mapping[KvTier, int] = field(default_factory=dict)
    """By tier, as the router believed when it decided."""
    predicted_ttft_s: float | None = None
    cost: Cost | None = None
    """The parts of the predicted TTFT."""
    expected_tpot_s: float | None = None
    """Time per output token after the first one, as it was predicted."""
    prepared: StagingResult = field(default_factory=StagingResult)
    """At that replica."""
    first_leg: FirstLeg | None = None
    """Where the prompt was prefilled for that replica; None: there itself."""
    failed_tries: list[FailedTry] = field(default_factory=list)
    steps: list[RequestStep] = field(default_factory=list)
    tries: list[Try] = field(default_factory=list)
    """In order, failed or not. Unknown behind a gateway."""
    streamed: bool = False
    first_byte_s: float | None = None
    """When the answer's first content came if it is streamed, else its headers."""
    cached_tokens: int | None = None
    """As the replica's ``usage`` said."""
    input_tokens: int | None = None
    """The prompt's tokens, as the same said."""
    uncached: Uncached | None = None
    """Why tokens of the prompt were computed. Until the answer ends, what is expected of that."""
    output_tokens: int | None = None
    answer_tokens: int | None = None
    """The same; of a stream without ``usage`` about as many as its events."""
    response_bytes: int = 0
    outcome: Outcome = Outcome.FAILED
    status: int | None = None
    """The status sent to the client."""
    error: str | None = None

    def decided(self, decision: Decision) -> None:
        """Note where the request goes, without the decision's keys, which may be many."""
        self.replica_id, self.reason = decision.replica_id, decision.reason
        self.home = decision.home
        self.prompt_tokens, self.matched_tokens = decision.prompt_tokens, decision.matched_tokens
        self.predicted_ttft_s = decision.predicted_ttft_s
        self.cost = decision.picked.cost

    def moved(self, decision: Decision) -> None:
        """Note that the second leg goes to another replica than was decided at first."""
        self.replica_id, self.matched_tokens = decision.replica_id, decision.matched_tokens

    def step(self, name: str, began_s: float) -> None:
        """Note that a step has ended now."""
        self.steps.append(RequestStep(name, began_s, time.monotonic()))

    def begin_try(self, url: str, replica_id: str | None = None) -> str | None:
        """Note that the request is sent to its replica now, or to the one named.

        Returns the replica's ``traceparent``; None to pass on the client's.
        """
        made = self.trace is not None and self.trace.span_id is not None
        span_id = new_span_id() if made else None
        self.tries.append(Try(replica_id or str(self.replica_id), url, time.monotonic(), span_id))
        return None if self.trace is None or span_id is None else self.trace.header(span_id)

    def prefilled(self, began_s: float) -> None:
        """Note that the first leg, the last try so far, has ended well."""
        self.tries[-1] = self.tries[-1]._replace(prefilled_s=time.monotonic())
        self.step("prefill", began_s)

    def waited_to_retry(self, began_s: float) -> None:
        """Note that the request has waited between two tries until now."""
        self.retry_wait_s = (self.retry_wait_s or 0.0) + time.monotonic() - began_s
        self.step("retry", began_s)

    def end(self, outcome: Outcome, *, error: str | None = None) -> None:
        """Note how the request ended. Only the first call counts."""
        if self.outcome is Outcome.FAILED:
            self.outcome, self.error = outcome, error

    @property
    def ttft_s(self) -> float | None:
        """From accepting the request to its first byte."""
        return None if self.first_byte_s is None else self.first_byte_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first one (TPOT).

        None if the answer is not streamed, not whole, or has one token only.
        """
        tokens_after = (self.answer_tokens or 0) - 1
        is_whole = self.streamed and self.outcome is Outcome.OK
        if not is_whole or self.first_byte_s is None or tokens_after < 1:
            return None
        return (self.ended_s - self.first_byte_s) / tokens_after

    @property
    def total_s(self) -> float:
        """From accepting the request to its end."""
        return self.ended_s - self.started_s


def answer_headers(record: RequestRecord, *, is_tenant: bool = False) -> dict[str, str]:
    """Return the router's own headers for an answer.

    ``is_tenant``: without those that show what replicas hold, which other clients have sent.
    """
    if record.replica_id is None:  # a stream that began while the request was held
        return {"x-request-id": record.request_id}
    headers = {
        "x-request-id": record.request_id,
        "x-warmroute-prompt-tokens": str(record.prompt_tokens),
        "x-warmroute-held-ms": f"{(record.held_s or 0.0) * 1000:.1f}",
        "x-warmroute-retries": str(len(record.failed_tries)),
    }
    if is_tenant:
        return headers
    headers |= {
        "x-warmroute-replica": str(record.replica_id),
        "x-warmroute-reason": str(record.reason),
        "x-warmroute-predicted-ttft-ms": f"{(record.predicted_ttft_s or 0.0) * 1000:.1f}",
    }
    for tier in KvTier:
        headers[f"x-warmroute-matched-{tier}"] = str(record.matched_tokens.get(tier, 0))
    if record.uncached is not None:
        headers["x-warmroute-uncached"] = record.uncached.header()
    if record.first_leg is not None:
        headers["x-warmroute-prefiller"] = record.first_leg.replica_id
    return headers | record.prepared.headers()


class RecordReader(Protocol):
    """Takes the records of requests that have ended: metrics, the log, traces, the page."""

    def observe(self, record: RequestRecord) -> None:
        """Take a record; must not wait."""


class RecordReaders:
    """Hands each record to several readers."""

    def __init__(self, readers: Iterable[RecordReader]) -> None:
        self._readers = [*readers]

    def add(self, reader: RecordReader) -> None:
        """Hand later records to one more reader."""
        self._readers.append(reader)

    def observe(self, record: RequestRecord) -> None:
        """Hand on a record."""
        for each in self._readers:
            each.observe(record)
