"""The request log: one line for each request, as JSON or as text, written by a thread of its own.

So no request waits for a disk. The JSON fields in `FIELDS` keep their names, units and meanings.
`RecordExports` sends records to the log, and to traces if they are configured.
"""

import asyncio
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import TYPE_CHECKING, Any, Final, Self

import orjson

from router.config.settings import RequestLogConfig, RouterConfig, TracingConfig
from router.index.prompt_keys import KvTier
from router.record.records import Cause, FirstLeg, Outcome, RequestRecord
from router.staging.stager import StagingResult
from warmroute_common.config_reader import ConfigError
from warmroute_common.log_format import LogFormatter

if TYPE_CHECKING:
    from router.record.tracing import Traces

_LONGEST: Final = 1000
"""Most characters of a text that a client or a replica wrote."""
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
    "client": (
        "address of the client, or of the last proxy before the router",
        lambda r: _short(r.client),
    ),
    "client_key": ("name of the client's key", lambda r: r.key),
    "priority": ("its class: `high`, `normal`, `batch`", lambda r: r.priority),
    "session": ("hash of the session's name", lambda r: r.session_hash),
    "method": ("of HTTP", lambda r: r.method),
    "path": ("as the client wrote it, without a query", lambda r: _short(r.path)),
    "endpoint": ("the path where it is one of a known API, else `other`", lambda r: r.endpoint),
    "requested_model": ("as the client named it", lambda r: _short(r.requested_model)),
    "model": ("the one that the replica was asked for", lambda r: _short(r.model)),
    "status": ("sent to the client; null where it left before", lambda r: r.status),
    "outcome": (
        "`ok`, `refused` (by the router), `cut` (by the replica), `client-gone`, `ended` (by the "
        "gateway), `failed` (a defect)",
        lambda r: r.outcome,
    ),
    "error": ("why it did not end well", lambda r: _short(r.error)),
    "rejected": ("why queuing was refused: `full`, `deadline`", lambda r: r.rejected),
    "replica": ("the one that was asked last", lambda r: r.replica_id),
    "reason": ("why that one", lambda r: r.reason),
    "failed_tries": (
        "failed tries before the last one: `replica`, `cause`, `detail`",
        lambda r: [
            {"replica": each.replica_id, "cause": each.cause, "detail": _short(each.detail)}
            for each in r.failed_tries
        ],
    ),
    "retry_wait_s": ("waiting between tries", lambda r: _rounded(r.retry_wait_s)),
    "streamed": ("whether the answer was", lambda r: r.streamed),
    "prompt_tokens": ("as the router counts them", lambda r: r.prompt_tokens),
    "prompt_hashes": (
        "with `request_log.prompt_hashes`: hashes of the prompt's beginnings and of the session",
        lambda r: None if r.prompt_hashes is None else r.prompt_hashes.to_json(),
    ),
    "matched_tokens": (
        "of these, by tier, what the router believed to be cached there",
        lambda r: {str(tier): r.matched_tokens.get(tier, 0) for tier in KvTier},
    ),
    "cached_tokens": ("as the replica's `usage` said", lambda r: r.cached_tokens),
    "uncached": (
        "why tokens were computed: `tokens` by cause, `is_reported` (whether the replica told what "
        "was cached; if not, as the router expected), `why` in words",
        lambda r: None if r.uncached is None else r.uncached.as_json(),
    ),
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
    "prefilled": (
        "by another replica: `by`, `seconds`, `cached_tokens` there",
        lambda r: None if r.first_leg is None else _leg(r.first_leg),
    ),
    "predicted_ttft_s": ("from its end of waiting", lambda r: _rounded(r.predicted_ttft_s)),
    "ttft_s": (
        "from accepting it to the first byte (not streamed: to the headers)",
        lambda r: _rounded(r.ttft_s),
    ),
    "tpot_s": (
        "time per output token after the first one (without `usage`: per event); null if not "
        "streamed",
        lambda r: _rounded(r.tpot_s),
    ),
    "total_s": ("from accepting it to its end", lambda r: _rounded(r.total_s)),
}
"""The meaning of each field besides ``time``; null if the request did not get that far."""


def json_line(record: RequestRecord, ended_s: float) -> str:
    """Return the line of a request that ended at this time since 1970."""
    return orjson.dumps(record_fields(record, ended_s), default=str).decode()


def record_fields(record: RequestRecord, ended_s: float) -> dict[str, Any]:
    """Return `FIELDS` and ``time`` of a request that ended at this time since 1970."""
    time = datetime.fromtimestamp(ended_s, UTC).isoformat(timespec="milliseconds")
    fields: dict[str, Any] = {"time": time.replace("+00:00", "Z")}
    return fields | {name: value(record) for name, (_, value) in FIELDS.items()}


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


def _leg(leg: FirstLeg) -> dict[str, object]:
    return {
        "by": leg.replica_id,
        "seconds": _rounded(leg.seconds),
        "cached_tokens": leg.cached_tokens,
    }


def text_line(record: RequestRecord) -> str:
    """Return a request's record as one line for a person."""
    matched = ",".join(f"{tier}:{count}" for tier, count in record.matched_tokens.items() if count)
    tries = ",".join(f"{each.replica_id}:{each.cause}" for each in record.failed_tries)
    parts = {
        "client": record.client,
        "key": record.key,
        "status": record.status,
        "outcome": None if record.outcome is Outcome.OK else record.outcome,
        "replica": record.replica_id,
        "reason": record.reason,
        "prompt_tokens": record.prompt_tokens,
        "matched": matched or None,
        "cached_tokens": record.cached_tokens,
        "uncached": None if record.uncached is None else record.uncached.summary(),
        "output_tokens": record.output_tokens,
        "prefetch": record.prepared.prefetch,
        "copy": record.prepared.copy,
        "prefilled_by": None if record.first_leg is None else record.first_leg.replica_id,
        "held_ms": _ms(record.held_s or None),
        "ttft_ms": _ms(record.ttft_s),
        "predicted_ms": _ms(record.predicted_ttft_s),
        "tpot_ms": None if record.tpot_s is None else f"{record.tpot_s * 1000:.1f}",
        "total_ms": _ms(record.total_s),
        "failed_tries": tries or None,
        "retry_wait_ms": _ms(record.retry_wait_s),
        "error": None if record.error is None else repr(record.error),
        "id": record.request_id,
    }
    text = " ".join(f"{name}={value}" for name, value in parts.items() if value is not None)
    return f"{record.path or record.endpoint} {text}"


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.0f}"


log = logging.getLogger("warmroute.requests")

_MOST_WAITING: Final = 10_000
"""Most lines that may wait to be written; further lines are dropped."""
_LAST_LINES_S: Final = 5.0
"""How long `RequestLog.stop` waits for the last lines."""
_REFUSALS_PER_S: Final = 10
"""Most requests that were not admitted that are written in a second: anybody can send many."""
_TEXT_FORMAT: Final = "%(asctime)s %(levelname)-7s %(message)s"


class _Failing(logging.Handler):
    """Counts its failures and logs only the first: on a full disk every line fails."""

    failed = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        """Count a line that could not be written."""
        self.failed += 1
        if self.failed == 1:
            log.error("the request log cannot be written: %s", sys.exc_info()[1])


class _File(_Failing, WatchedFileHandler):
    """Appends to a file, and creates it again if it was moved away."""


class _Output(_Failing, logging.StreamHandler):  # type: ignore[type-arg]  # not subscriptable
    """Writes to standard output."""


class _RouterLog(_Failing):
    """Writes to the router's log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line where the router's other lines are written."""
        log.handle(record)


class _PerSecond:
    """Lets a number of events through in each second, and counts the others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._second = 0
        self._passed = 0
        self.left_out = 0

    def has_next(self, now_s: float) -> bool:
        """Whether one more may pass now; it then counts."""
        if int(now_s) != self._second:
            self._second, self._passed = int(now_s), 0
        if self._passed == self._most:
            self.left_out += 1
            return False
        self._passed += 1
        return True


class RequestLog:
    """Writes the lines of requests that have ended, between `start` and `stop`."""

    def __init__(self, config: RequestLogConfig, *, most_waiting: int = _MOST_WAITING) -> None:
        self._config = config
        self._waiting: queue.Queue[tuple[RequestRecord, float] | None] = queue.Queue(most_waiting)
        self._left_out = 0
        self._refusals = _PerSecond(_REFUSALS_PER_S)
        self._handler: _Failing = _RouterLog()
        self._thread = threading.Thread(target=self._run, name="request log", daemon=True)

    @property
    def dropped(self) -> int:
        """Lines that were not written: too many waited, or writing failed."""
        return self._left_out + self._handler.failed

    @property
    def dropped_refusals(self) -> int:
        """Lines of requests that were not admitted, beyond `_REFUSALS_PER_S`."""
        return self._refusals.left_out

    def start(self) -> None:
        """Begin to write; raise `ConfigError` if the file cannot be opened."""
        self._handler = self._opened()
        self._thread.start()

    def stop(self) -> None:
        """Write the waiting lines, for `_LAST_LINES_S` at most, and end."""
        if self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=_LAST_LINES_S)
            except queue.Full:
                return  # nothing can be written: the thread ends with the process
            self._thread.join(_LAST_LINES_S)

    def write(self, record: RequestRecord) -> None:
        """Queue a request's line; does not wait."""
        if isinstance(self._handler, _RouterLog) and not log.isEnabledFor(_level(record)):
            return
        if not record.is_admitted and not self._refusals.has_next(record.ended_s):
            return
        try:
            self._waiting.put_nowait((record, time.time()))
        except queue.Full:
            self._left_out += 1

    def _opened(self) -> _Failing:
        path, is_json = self._config.path, self._config.format == "json"
        if path is None and not is_json:
            return _RouterLog()
        handler = _Output(sys.stdout) if path is None or path == "-" else _file(path)
        handler.setFormatter(LogFormatter("%(message)s" if is_json else _TEXT_FORMAT))
        return handler

    def _run(self) -> None:
        make = json_line if self._config.format == "json" else _text
        while (waiting := self._waiting.get()) is not None:
            record, ended_s = waiting
            try:
                line = make(record, ended_s)
            except Exception:  # one bad record must not end the log
                log.exception("a line of the request log could not be formatted")
                self._left_out += 1
                continue
            made = logging.LogRecord(log.name, _level(record), "", 0, line, None, None)
            self._handler.handle(made)
        self._handler.close()


def _file(path: str) -> _Failing:
    try:
        return _File(path, encoding="utf-8")
    except OSError as error:
        found = f"'{path}' cannot be written ({error.strerror})"
        raise ConfigError("request_log", "path", found, "name a writable file") from None


def _text(record: RequestRecord, ended_s: float) -> str:
    # Headers may contain bytes that are not valid text.
    return text_line(record).encode(errors="backslashreplace").decode()


def _level(record: RequestRecord) -> int:
    """Return WARNING for requests that failed or had failed tries, else INFO."""
    has_failed = record.outcome in (Outcome.CUT, Outcome.FAILED) or any(
        each.cause is not Cause.ABSENT for each in record.failed_tries
    )
    return logging.WARNING if has_failed else logging.INFO


class RecordExports:
    """Sends records to the request log, and to traces if configured, within ``async with``."""

    def __init__(self, config: RouterConfig) -> None:
        self._log = RequestLog(config.request_log)
        self._tracing = config.tracing
        self._traces: Traces | None = None

    async def __aenter__(self) -> Self:
        """Open what records go to.

        Raises `ConfigError` where that cannot be: a file, or traces without the extra for them.
        """
        await asyncio.to_thread(self._log.start)
        try:
            if self._tracing is not None:
                self._traces = await asyncio.to_thread(_traces, self._tracing)
        except BaseException:
            await asyncio.to_thread(self._log.stop)
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Send off what waits, and end: within some seconds, whatever the other ends do."""
        traces = self._traces
        ends = [self._log.stop, *([] if traces is None else [traces.stop])]
        await asyncio.gather(*map(asyncio.to_thread, ends))

    def observe(self, record: RequestRecord) -> None:
        """Log and trace a request that has ended; does not wait."""
        self._log.write(record)
        if self._traces is not None and record.is_admitted:
            self._traces.take(record)

    def dropped(self) -> dict[str, int]:
        """Return how many records were lost, by destination."""
        return {"request_log": self._log.dropped, "refusals": self._log.dropped_refusals}


def _traces(config: TracingConfig) -> "Traces":
    # An extra of its own, which only traces need.
    try:
        from router.record.tracing import Traces  # noqa: PLC0415
    except ModuleNotFoundError as error:
        found = f"OpenTelemetry is not installed ({error.name} is missing)"
        fix = "install the extra: pip install '.[otel]' in a clone of the repository"
        raise ConfigError("tracing", "", found, fix) from None
    return Traces(config)
