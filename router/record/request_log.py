"""The request log: a line for each request, written by a thread, so that none waits for a disk."""

import logging
import queue
import sys
import threading
import time
from logging.handlers import WatchedFileHandler
from typing import Final

from router.config import RequestLogConfig
from router.record.json_line import json_line
from router.record.records import Cause, Outcome, RequestRecord
from router.record.text_line import text_line
from warmroute_common.config_error import ConfigError

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
