"""From what a person wrote in a file or a variable to typed values.

Every parser takes a YAML value or a variable's text, and raises `BadValueError`
with the problem and the fix for anything it does not fully understand.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from warmroute_common.addresses import split_host_port

_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})
_NULL: Final = frozenset({"", "null", "none", "~"})
_MOST_GB: Final = 1e6
_MOST_S: Final = 3600.0


class BadValueError(ValueError):
    """A value that cannot be used: what is wrong, and what to write instead."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix


def suggestion(name: str, known: Iterable[str], offered: Iterable[str] | None = None) -> str:
    """Return the fix for a name that is not known: the nearest, else all (or those offered)."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"use one of {', '.join(offered or known)}" if known else "remove it"


def is_null(value: object) -> bool:
    """Whether a value says "not set"."""
    return value is None or (isinstance(value, str) and value.strip().lower() in _NULL)


def parse_bool(value: object) -> bool:
    """Read true/false, yes/no, on/off, 1/0, in any case."""
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise BadValueError(f"{value!r} is neither true nor false", "write true or false")


def parse_int(*, minimum: int, maximum: int | None = None) -> Callable[[object], int]:
    """Return a parser of whole numbers within bounds, both included."""
    bounds = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(value: object) -> int:
        try:
            if isinstance(value, bool | float):
                raise ValueError
            number = int(str(value))
        except ValueError:
            problem = f"{value!r} is not a whole number"
            raise BadValueError(problem, f"write a number, {bounds}") from None
        if number < minimum or (maximum is not None and number > maximum):
            raise BadValueError(f"{number} is out of range", f"write a number {bounds}")
        return number

    return parse


def parse_gb(value: object) -> float:
    """Read a size in GB."""
    number = _number(value, "sizes are numbers in GB, so 5 GB is 5.0")
    if number > _MOST_GB:
        raise BadValueError(f"{value} GB is beyond any machine", "sizes are in GB, not in bytes")
    if number < 0:
        raise BadValueError(f"{value} is negative", "write a size in GB, or 0")
    return number


def parse_share(value: object) -> float:
    """Read a number above 0 and up to 1."""
    number = _number(value, "write a number such as 0.5")
    if not 0 < number <= 1:
        raise BadValueError(f"{value} is no share", "write a number above 0 and up to 1")
    return number


def _number(value: object, fix: str) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(str(value))
    except ValueError:
        raise BadValueError(f"{value!r} is not a number", fix) from None
    if not math.isfinite(number):
        raise BadValueError(f"{value!r} is not a number", fix)
    return number


def parse_port(value: object) -> int:
    """Read a TCP port, or the first of a list (LMCache has one per worker)."""
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list):
        if len(value) != 1:
            raise BadValueError(
                f"{value} are {len(value)} ports", "write one: a replica has one agent"
            )
        value = value[0]
    return parse_int(minimum=0, maximum=65535)(value)


def parse_seconds(value: object) -> float:
    """Read a time in seconds, more than 0."""
    number = _number(value, "write seconds, such as 10")
    if not 0 < number <= _MOST_S:
        raise BadValueError(
            f"{value} s is out of range", "write seconds, more than 0, an hour at most"
        )
    return number


def parse_host_port(value: object) -> str:
    """Read ``host:port``."""
    text = parse_text(value)
    try:
        split_host_port(text)
    except ValueError as error:
        raise BadValueError(str(error), "write host:port, such as localhost:8004") from None
    return text


def parse_http_address(value: object) -> str:
    """Read ``host:port``, or a URL of http or https with nothing behind the port."""
    text = parse_text(value).rstrip("/")
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https"):
        raise BadValueError(
            f"{value!r} is not served over http", "write host:port, or http://host:port"
        )
    parse_host_port(f"{parts.netloc.rpartition('@')[2]}{parts.path}")
    return text


def parse_own_address(value: object) -> str:
    """Read a URL of http or https with nothing behind the port, and perhaps no host before it."""
    text = parse_text(value).rstrip("/")
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadValueError(
            f"{value!r} is no URL of http", "write http://host:port, or http://:port"
        )
    parse_host_port(f"{'any' if parts.netloc.startswith(':') else ''}{parts.netloc}{parts.path}")
    return text


def parse_text(value: object) -> str:
    """Read a name or an address."""
    if isinstance(value, bool | dict | list):
        raise BadValueError(f"{value!r} is not a text", "write one word")
    return str(value).strip()


def parse_directories(value: object) -> tuple[Path, ...]:
    """Read paths, or LMCache's ``file:///path/``: a list, or one text with commas between."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list) or not value:
        raise BadValueError(f"{value!r} is no path", "write a path, or several with commas between")
    paths = tuple(_directory(each) for each in value)
    if len(set(paths)) < len(paths):
        raise BadValueError(f"{value!r} names a path twice", "write each path once")
    return paths


def _directory(value: object) -> Path:
    text = parse_text(value)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    elif "://" in text:
        raise BadValueError(f"{value!r} is no local path", "write a path, or file:///path/")
    if not text:
        raise BadValueError(f"{value!r} has no path in it", "write a path, or file:///path/")
    return Path(text).expanduser().absolute()


def parse_file(value: object) -> Path:
    """Read the path of a file."""
    text = parse_text(value)
    if not text:
        raise BadValueError("it is empty", "write a path")
    return Path(text).expanduser().absolute()


def parse_mapping(value: object) -> Mapping[str, Any]:
    """Read a mapping, or its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadValueError(f"it is not JSON ({error})", 'write {"key": value}') from None
    if not isinstance(value, dict):
        raise BadValueError(f"{value!r} is not a mapping", 'write {"key": value}')
    return value
