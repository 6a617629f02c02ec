"""Text from clients and replicas is one readable line in the log."""

import io
import json
import logging
import sys

import pytest

from warmroute_common.log_format import JsonLogFormatter, LogFormatter

FORGED = "x\n2026-01-01 00:00:00,000 ERROR fake\r\x1b[2J\x00\x7f\x9b1A\u2028\u202e\u200b"


def logged(message: str, *args: object, **options: object) -> str:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(LogFormatter("%(levelname)s %(name)s %(message)s"))
    record = logging.LogRecord("r", logging.INFO, "", 0, message, args, None)
    vars(record).update(options)
    handler.handle(record)
    assert out.getvalue().endswith("\n")
    return out.getvalue()[:-1]


@pytest.mark.parametrize("args", [(), (FORGED,)])
def test_control_characters_are_escaped(args: tuple[str, ...]) -> None:
    line = logged("%s of a client" if args else FORGED, *args)
    assert line.isprintable()
    assert "x\\u000a2026" in line and "\\u001b[2J" in line and "\\u202e" in line


def test_other_text_is_unchanged() -> None:
    text = 'modèle "größe" 模型 \\n 🙂 \u00a0'
    assert logged("%s", text) == f"INFO r {text}"


def test_json_means_the_same() -> None:
    line = json.dumps({"model": FORGED}, ensure_ascii=False)
    assert json.loads(logged("%s", line).removeprefix("INFO r ")) == {"model": FORGED}


def test_passwords_in_urls_are_left_out() -> None:
    line = logged("%s is down", "a (http://me:hidden@x:1, rediss://:hidden@y) b@c")
    assert line == "INFO r a (http://***@x:1, rediss://***@y) b@c is down"


def test_a_traces_lines_are_no_lines_of_the_log() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        text = logged("failed", exc_info=(ValueError, error, error.__traceback__))
    first, *trace = text.split("\n")
    assert first == "INFO r failed"
    assert all(each.startswith("    ") and each.isprintable() for each in trace)
    assert "test_log_format.py" in text and "ERROR fake\\u000d" in text


def test_a_record_as_json_is_one_line_with_its_zone() -> None:
    record = logging.LogRecord("warmroute.x", logging.WARNING, "", 0, "a\n%s\x9b\x7f", ("b",), None)
    record.created = 1.5
    line = JsonLogFormatter().format(record)
    assert line.isprintable() and line.isascii()
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "warning",
        "logger": "warmroute.x",
        "message": "a\nb\x9b\x7f",
    }


def test_json_has_stack_traces_and_no_passwords() -> None:
    try:
        raise ValueError("redis://user:secret@host")
    except ValueError:
        record = logging.LogRecord(
            *("x", logging.ERROR, "", 0, "http://user:secret@host", (), sys.exc_info())
        )
    line = JsonLogFormatter().format(record)
    assert "ValueError" in json.loads(line)["trace"] and "secret" not in line
