"""How lines of a log are written: what clients and replicas sent cannot forge or hide lines."""

import json
import logging
import unicodedata
from datetime import UTC, datetime
from types import TracebackType
from typing import Final

from warmroute_common.addresses import without_passwords

_HIDDEN: Final = ("Cc", "Cf", "Zl", "Zp")
"""Unicode's categories of control and formatting characters, and of line separators."""
_ESCAPED: Final = {
    # As JSON writes them, so that a line of JSON means the same afterwards.
    code: f"\\u{code:04x}"
    for code in range(0x10000)
    if unicodedata.category(chr(code)) in _HIDDEN
}
_TRACE_INDENT: Final = "    "


class LogFormatter(logging.Formatter):
    """Writes control characters as escapes, and each record's message as one line.

    Passwords in URLs are left out.

    The lines of a stack trace follow, indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        """Return the line without its stack trace."""
        return without_passwords(super().formatMessage(record)).translate(_ESCAPED)

    def formatException(  # noqa: N802  (logging's name)
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        """Return a stack trace; an exception's text may be a client's."""
        return self._indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802  (logging's name)
        """Return the stack of a record with ``stack_info``."""
        return self._indented(super().formatStack(stack_info))

    @staticmethod
    def _indented(text: str) -> str:
        lines = without_passwords(text).split("\n")
        return "\n".join(_TRACE_INDENT + each.translate(_ESCAPED) for each in lines)


class JsonLogFormatter(LogFormatter):
    """Writes each record as one JSON object in a line, with its time in UTC.

    Fields: ``time`` (RFC 3339, milliseconds), ``level``, ``logger``, ``message``, and ``trace`` if
    there is a stack trace.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_passwords(record.getMessage()),
        }
        if record.exc_info:
            fields["trace"] = without_passwords(
                logging.Formatter.formatException(self, record.exc_info)
            )
        # Not as UTF-8: what a terminal takes for a command is escaped.
        return json.dumps(fields, ensure_ascii=True).translate(_ESCAPED)
