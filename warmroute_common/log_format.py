"""How lines of a log are written: what clients and replicas sent cannot forge or hide lines."""

import logging
import unicodedata
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
