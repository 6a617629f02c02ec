"""A request's record as one JSON object, for programs: names, units and meanings stay."""

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import Any, Final

import orjson

from router.config import RequestLogConfig
from router.index import Tier
from router.record.records import Cause, Outcome, RequestRecord
from router.staging import StagingResult
from warmroute_common.config_reader import ConfigError

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


# TODO of router.record.request_log: A request's record as one line for a person.


def text_line(record: RequestRecord) -> str:
    """Return what is known of a request, as one line."""
    matched = ",".join(f"{tier}:{count}" for tier, count in record.matched_tokens.items() if count)
    tries = ",".join(f"{each.replica_id}:{each.cause}" for each in record.failed_tries)
    parts = {
        "key": record.key,
        "status": record.status,
        "outcome": None if record.outcome is Outcome.OK else record.outcome,
        "replica": record.replica_id,
        "reason": record.reason,
        "prompt_tokens": record.prompt_tokens,
        "matched": matched or None,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "prefetch": record.prepared.prefetch,
        "copy": record.prepared.copy,
        "held_ms": _ms(record.held_s or None),
        "ttft_ms": _ms(record.ttft_s),
        "predicted_ms": _ms(record.predicted_ttft_s),
        "total_ms": _ms(record.total_s),
        "failed_tries": tries or None,
        "retry_wait_ms": _ms(record.retry_wait_s),
        "error": None if record.error is None else repr(record.error),
        "id": record.request_id,
    }
    told = " ".join(f"{name}={value}" for name, value in parts.items() if value is not None)
    return f"{record.path or record.endpoint} {told}"


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.0f}"


# TODO of router.record.request_log: The request log: a line for each request, written by a thread, so that none waits for a disk.

log = logging.getLogger("warmroute.requests")

_MOST_WAITING: Final = 10_000
"""Lines that may wait to be written; more are dropped."""
_LAST_LINES_S: Final = 5.0
"""How long the router's end waits for them to be written."""
_TEXT_FORMAT: Final = "%(asctime)s %(levelname)-7s %(message)s"


class _Failing(logging.Handler):
    """A handler whose failures are counted, and logged once: a full disk fails at every line."""

    failed = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        """Count a line that could not be written."""
        self.failed += 1
        if self.failed == 1:
            log.error("the request log cannot be written: %s", sys.exc_info()[1])


class _File(_Failing, WatchedFileHandler):
    """Appends to a file, and makes it anew where it was moved away."""


class _Output(_Failing, logging.StreamHandler):  # type: ignore[type-arg]  # not subscriptable
    """Writes to standard output."""


class _RouterLog(_Failing):
    """Hands lines to the router's log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line where the router's other lines are written."""
        log.handle(record)


class RequestLog:
    """Writes the lines of requests that have ended, between `start` and `stop`."""

    def __init__(self, config: RequestLogConfig, *, most_waiting: int = _MOST_WAITING) -> None:
        self._config = config
        self._waiting: queue.Queue[tuple[RequestRecord, float] | None] = queue.Queue(most_waiting)
        self._left_out = 0
        self._handler: _Failing = _RouterLog()
        self._thread = threading.Thread(target=self._run, name="request log", daemon=True)

    @property
    def dropped(self) -> int:
        """Lines that were not written: too many waited, or writing failed."""
        return self._left_out + self._handler.failed

    def start(self) -> None:
        """Begin to write; raise `ConfigError` where the file cannot be."""
        self._handler = self._opened()
        self._thread.start()

    def stop(self) -> None:
        """Write what waits, for `_LAST_LINES_S` at most, and end."""
        if self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=_LAST_LINES_S)
            except queue.Full:
                return  # nothing can be written: the thread ends with the process
            self._thread.join(_LAST_LINES_S)

    def write(self, record: RequestRecord) -> None:
        """Have a request's line written; does not wait."""
        if isinstance(self._handler, _RouterLog) and not log.isEnabledFor(_level(record)):
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
        handler.setFormatter(logging.Formatter("%(message)s" if is_json else _TEXT_FORMAT))
        return handler

    def _run(self) -> None:
        make = json_line if self._config.format == "json" else _text
        while (waiting := self._waiting.get()) is not None:
            record, ended_s = waiting
            try:
                line = make(record, ended_s)
            except Exception:  # else no line would be written any more
                log.exception("a request's line cannot be made")
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
        raise ConfigError("request_log", "path", found, "name a file that can be") from None


def _text(record: RequestRecord, ended_s: float) -> str:
    # Headers may hold bytes that are no text.
    return text_line(record).encode(errors="backslashreplace").decode()


def _level(record: RequestRecord) -> int:
    """Return WARNING for troubled ends, INFO for plain ones."""
    troubled = record.outcome in (Outcome.CUT, Outcome.FAILED) or any(
        each.cause is not Cause.ABSENT for each in record.failed_tries
    )
    return logging.WARNING if troubled else logging.INFO
