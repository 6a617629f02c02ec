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

from warmroute_common.config_error import Place

T = TypeVar("T")

_UNITS = {
    "bytes_per_s": "bytes per second",
    "tokens_per_s": "tokens per second",
    "_s": "seconds",
    "_bytes": "bytes",
    "_tokens": "tokens",
}
_SCALARS = {
    int: ("a whole number", "write digits only, without a unit or quotes"),
    float: ("a number", "write a number only, without a unit or quotes"),
    str: ("text", "put it in quotes"),
    bool: ("true or false", "write true or false, without quotes"),
}
"""What is expected, and how to mend what is not."""
_HOLDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le}
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def setting(
    default: Any = MISSING,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """Declare a dataclass field with bounds (inclusive, exclusive, inclusive)."""
    bounds = {"at least": at_least, "above": above, "at most": at_most}
    return field(default=default, metadata=bounds)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, or raise `ConfigError`."""
    at = Place(str(path))
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise at.error("no such file", "check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise at.error(f"cannot be read ({error})", "give a readable text file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = at if mark is None else at.at(f"line {mark.line + 1}")
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        fix = "check indentation, colons and quotes"
        raise line.error(f"not valid YAML ({what})", fix) from None
    if not isinstance(value, dict):
        found = "is empty" if value is None else f"holds {_describe(value)} at its top level"
        raise at.error(found, "write settings as 'key: value' lines")
    return value


def build(cls: type[T], value: object, at: Place) -> T:
    """Return ``cls`` made from the mapping at a place; raise `ConfigError`."""
    known = {each.name: each for each in fields(typing.cast("type[Any]", cls))}
    if not isinstance(value, Mapping):
        fix = f"write 'key: value' lines under it; known keys are {', '.join(known)}"
        raise at.error(f"expected settings, got {_describe(value)}", fix)
    for name in value:
        if name in (removed := getattr(cls, "REMOVED", {})):
            raise at.at(name).error("this setting was removed", removed[name])
        if name not in known:
            raise at.at(name).error("unknown key", _nearest(str(name), known))
    hints = typing.get_type_hints(cls)
    made: dict[str, Any] = {}
    for name, each in known.items():
        if name in value:
            made[name] = _convert(hints[name], value[name], each, at.at(name))
        elif each.default is MISSING and each.default_factory is MISSING:
            raise at.at(name).error("is missing", f"add '{name}: ...'")
    return cls(**made)


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known keys are {', '.join(known)}"


def _convert(hint: Any, value: object, each: Field[Any], at: Place) -> Any:
    """Return ``value`` as the type ``hint``, or raise `ConfigError`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        wanted = next(arg for arg in args if arg is not type(None))
        return None if value is None else _convert(wanted, value, each, at)
    if origin is Literal:
        return _choice(args, value, at)
    if origin is tuple:
        if not isinstance(value, list):
            raise at.error(f"expected a list, got {_describe(value)}", "write one '- item' a line")
        return tuple(_convert(args[0], one, each, at.item(i)) for i, one in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            found = f"expected a mapping, got {_describe(value)}"
            raise at.error(found, "write 'NAME: value' lines")
        return {str(name): _convert(args[1], one, each, at.at(name)) for name, one in value.items()}
    if is_dataclass(hint):
        return build(typing.cast("type[Any]", hint), value, at)
    return value if hint is Any else _scalar(hint, value, each, at)


def _choice(choices: tuple[Any, ...], value: object, at: Place) -> Any:
    if isinstance(value, str) and value in choices:
        return value
    near = difflib.get_close_matches(str(value), choices, n=1)
    shown = f"'{value}'" if isinstance(value, str) else _describe(value)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise at.error(f"unknown value {shown}", f"{hint}choose from {', '.join(choices)}")


def _scalar(hint: Any, value: object, each: Field[Any], at: Place) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        wanted, fix = _SCALARS[hint]
        unit = next((words for suffix, words in _UNITS.items() if each.name.endswith(suffix)), "")
        if unit and hint in (int, float):
            wanted = f"{wanted} of {unit}"
        if hint is float and isinstance(value, str) and _EXPONENT.fullmatch(value):
            fix = f"write {float(value):.15g}, since YAML takes '{value}' as text"
        raise at.error(f"expected {wanted}, got {_describe(value)}", fix)
    if isinstance(value, float) and not math.isfinite(value):
        raise at.error(f"{value} is not a finite number", "give a number")
    if isinstance(value, str) and not value.strip():
        raise at.error("is empty", "give a value, or leave the key out")
    for words, bound in each.metadata.items():
        if bound is not None and not _HOLDS[words](value, bound):
            raise at.error(f"{value} is out of range", f"it must be {words} {bound}")
    return value


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
