"""From a YAML mapping to frozen dataclasses, with errors that a person can act on.

A dataclass is its own schema: the fields' names are the keys, their types are
checked strictly, `setting` adds bounds and choices. What is wrong is reported
as a `ConfigError` that says where, what, and how to mend it.
"""

import difflib
import math
import operator
import re
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from router.config.errors import ConfigError

T = TypeVar("T")

_UNITS = {
    "bytes_per_s": "bytes per second",
    "tokens_per_s": "tokens per second",
    "_s": "seconds",
    "_bytes": "bytes",
    "_tokens": "tokens",
}
_HOLDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le}
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def setting(
    default: Any = MISSING,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    repr: bool = True,
) -> Any:
    """Declare a dataclass field with bounds (inclusive, exclusive, inclusive)."""
    bounds = {"at least": at_least, "above": above, "at most": at_most}
    return field(default=default, metadata=bounds, repr=repr)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, or raise `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(str(path), "", "no such file", "check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            str(path), "", f"cannot be read ({error})", "give a readable text file"
        ) from None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}" if mark is not None else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(
            str(path), line, f"not valid YAML ({what})", "check indentation, colons and quotes"
        ) from None
    if not isinstance(value, dict):
        found = "is empty" if value is None else f"holds {_describe(value)} at its top level"
        raise ConfigError(str(path), "", found, "write settings as 'key: value' lines")
    return value


def build(cls: type[T], value: object, *, path: str, key: str = "") -> T:
    """Return ``cls`` made from a mapping; ``path`` and ``key`` say where it stands."""
    known_fields = {each.name: each for each in fields(typing.cast("type[Any]", cls))}
    if not isinstance(value, Mapping):
        known = ", ".join(known_fields)
        raise ConfigError(
            path,
            key,
            f"expected settings, got {_describe(value)}",
            f"write 'key: value' lines under it; known keys are {known}",
        )
    hints = typing.get_type_hints(cls)
    for name in value:
        if name not in known_fields:
            raise _unknown(path, key, name, known_fields)
    made: dict[str, Any] = {}
    for name, each in known_fields.items():
        where = f"{key}.{name}" if key else name
        if name in value:
            made[name] = _convert(hints[name], value[name], each, path, where)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ConfigError(path, where, "is missing", f"add '{name}: ...'")
    return cls(**made)


def _unknown(path: str, key: str, name: object, known: Collection[str]) -> ConfigError:
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    fix = f"did you mean '{near[0]}'?" if near else f"known keys are {', '.join(known)}"
    where = f"{key}.{name}" if key else str(name)
    return ConfigError(path, where, "unknown key", fix)


def _convert(hint: Any, value: object, each: Field[Any], path: str, where: str) -> Any:
    """Return ``value`` as the type ``hint``, or raise `ConfigError`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        wanted = next(arg for arg in args if arg is not type(None))
        return None if value is None else _convert(wanted, value, each, path, where)
    if origin is Literal:
        return _choice(args, value, path, where)
    if origin is tuple:
        return _sequence(args[0], value, each, path, where)
    if origin is dict:
        return _mapping(args[1], value, each, path, where)
    if is_dataclass(hint):
        return build(typing.cast("type[Any]", hint), value, path=path, key=where)
    return value if hint is Any else _scalar(hint, value, each, path, where)


def _choice(choices: tuple[Any, ...], value: object, path: str, where: str) -> Any:
    if isinstance(value, str) and value in choices:
        return value
    near = difflib.get_close_matches(str(value), choices, n=1)
    shown = f"'{value}'" if isinstance(value, str) else _describe(value)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ConfigError(
        path, where, f"unknown value {shown}", f"{hint}choose from {', '.join(choices)}"
    )


def _sequence(item: Any, value: object, each: Field[Any], path: str, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ConfigError(
            path, where, f"expected a list, got {_describe(value)}", "write one '- item' a line"
        )
    return tuple(
        _convert(item, one, each, path, f"{where}[{index}]") for index, one in enumerate(value)
    )


def _mapping(item: Any, value: object, each: Field[Any], path: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(
            path, where, f"expected a mapping, got {_describe(value)}", "write 'NAME: value' lines"
        )
    return {
        str(name): _convert(item, one, each, path, f"{where}.{name}") for name, one in value.items()
    }


def _scalar(hint: Any, value: object, each: Field[Any], path: str, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigError(
            path,
            where,
            f"expected {_wanted(hint, each.name)}, got {_describe(value)}",
            _mend(hint, value),
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(path, where, f"{value} is not a finite number", "give a number")
    if isinstance(value, str) and not value.strip():
        raise ConfigError(path, where, "is empty", "give a value, or leave the key out")
    _check_bounds(value, each, path, where)
    return value


def _check_bounds(value: Any, each: Field[Any], path: str, where: str) -> None:
    for words, bound in each.metadata.items():
        if bound is not None and not _HOLDS[words](value, bound):
            fix = f"it must be {words} {bound}"
            raise ConfigError(path, where, f"{value} is out of range", fix)


def _wanted(hint: Any, name: str) -> str:
    unit = next((words for suffix, words in _UNITS.items() if name.endswith(suffix)), "")
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return f"{words[hint]} of {unit}" if unit and hint in (int, float) else words[hint]


def _mend(hint: Any, value: object) -> str:
    if hint is float and isinstance(value, str) and _EXPONENT.fullmatch(value):
        return f"write {float(value):.15g}, since YAML takes '{value}' as text"
    fixes = {
        int: "write digits only, without a unit or quotes",
        float: "write a number only, without a unit or quotes",
        str: "put it in quotes",
        bool: "write true or false, without quotes",
    }
    return fixes[hint]


def _describe(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case str():
            return f"the text '{value}'"
        case bool():
            return str(value).lower()
        case dict():
            return "a mapping"
        case list():
            return "a list"
    return f"{value!r}"
