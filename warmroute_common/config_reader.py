"""Reading settings: YAML and environment values into frozen dataclasses.

A dataclass is its own schema. Field names are the keys, types are checked strictly, and `setting`
adds bounds, a parser, or the mark that a setting may change while the process runs. Everything
that cannot be used raises `ConfigError`, which says what is wrong, where, and how to fix it. A
field with ``repr=False`` is a secret: neither errors nor `printable` show its value.
"""

import difflib
import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import yaml

from warmroute_common.addresses import split_host_port, without_passwords

T = TypeVar("T")

_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})
_NULL: Final = frozenset({"", "null", "none", "~"})
_MOST_GB: Final = 1e6
_MOST_S: Final = 3600.0

_UNITS: Final = {
    "bytes_per_s": "bytes per second",
    "tokens_per_s": "tokens per second",
    "_s": "seconds",
    "_bytes": "bytes",
    "_tokens": "tokens",
}
_SCALARS: Final = {
    int: ("a whole number", "write digits only, without a unit or quotes"),
    float: ("a number", "write a number only, without a unit or quotes"),
    str: ("text", "put it in quotes"),
    bool: ("true or false", "write true or false, without quotes"),
}
"""For each type: what is expected, and how to write it."""
_VALUE_KINDS: Final = {
    type(None): "nothing",
    str: "text",
    dict: "a mapping",
    list: "a list",
    bool: "true or false",
    int: "a number",
    float: "a number",
}
_COMPARE: Final = {"at least": operator.ge, "above": operator.gt, "at most": operator.le}
_EXPONENT: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_VARIABLE: Final = re.compile(r"\$\{\w+\}|\$[A-Z_]+\b")
_NO_VARIABLES: Final = "write the value itself: variables such as ${NAME} are not expanded"

FileKind = Literal["router", "fleet", "replica"]
_KINDS: Final[Mapping[FileKind, tuple[str, str]]] = {
    "router": ("the router's file", "warmroute serve --config {}"),
    "fleet": ("a fleet's file", "warmroute up --config {}"),
    "replica": ("a replica's file", "warmroute replica --config {} -- --model MODEL"),
}
"""For each kind of file: its name, and the command that reads it."""


# --- errors


class BadValueError(ValueError):
    """A value that cannot be used: what is wrong, and what to write instead."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix


class ConfigError(ValueError):
    """A configuration that cannot work: in which file, under which key, what is wrong, the fix.

    ``str()`` is the one line that commands print: ``path: key: problem; fix``, without the
    passwords of URLs.
    """

    def __init__(self, path: str, key: str, problem: str, fix: str) -> None:
        super().__init__(path, key, problem, fix)
        self.path = path
        self.key = key
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.path, self.key) if part)
        return without_passwords(f"{where}: {self.problem}; {self.fix}")


class ConfigLocation(NamedTuple):
    """Where a setting is: in which file, under which key ('' is the top level)."""

    path: str
    key: str = ""

    def at(self, name: object) -> "ConfigLocation":
        """Return the location of a key in the mapping here."""
        return ConfigLocation(self.path, f"{self.key}.{name}" if self.key else str(name))

    def item(self, index: int) -> "ConfigLocation":
        """Return the location of an item of the list here."""
        return ConfigLocation(self.path, f"{self.key}[{index}]")

    def error(self, problem: str, fix: str) -> ConfigError:
        """Return the error to raise for the setting here."""
        return ConfigError(self.path, self.key, problem, fix)


_HIDDEN: Final = "***"
_SECRET_NAME: Final = re.compile(
    r"(^|[-_])(key|token|secret|password|passwd|passphrase|credentials?)$", re.IGNORECASE
)


def printable(value: Any) -> Any:
    """Return settings or a command for people: dataclasses as mappings, secrets as ``***``.

    Secrets are the fields with ``repr=False``, and, in mappings and among a command's words, texts
    whose name ends like that of a secret: ``HF_TOKEN``, ``api_key``, ``--api-key``. Passwords in
    URLs are left to `without_passwords`.
    """
    if is_dataclass(value) and not isinstance(value, type):
        values = {each.name: getattr(value, each.name) for each in fields(value)}
        secrets = {each.name for each in fields(value) if not each.repr and values[each.name]}
        return {k: _HIDDEN if k in secrets else printable(v) for k, v in values.items()}
    if isinstance(value, Mapping):
        return {k: printable(_unless_secret(str(k), v)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        before = ["", *value[:-1]]
        return [printable(_word(last, each)) for last, each in zip(before, value, strict=False)]
    return value


def _word(last: object, word: object) -> object:
    """Return a word of a command, without the secret in it."""
    if not isinstance(word, str):
        return word
    name, equals, given = word.partition("=")
    if equals and name.startswith("-"):
        return f"{name}={_unless_secret(name, given)}"
    is_option = isinstance(last, str) and last.startswith("-") and "=" not in last
    return _unless_secret(str(last), word) if is_option else word


def _unless_secret(name: str, value: object) -> object:
    is_secret = isinstance(value, str) and value and _SECRET_NAME.search(name)
    return _HIDDEN if is_secret else value


def describe(error: BaseException) -> str:
    """Return an error's text, or its type's name if it has no text."""
    # aiohttp says "ssl:default" for connections without TLS too.
    return str(error).replace(" ssl:default", "") or type(error).__name__


def suggestion(name: str, known: Iterable[str], offered: Iterable[str] | None = None) -> str:
    """Return the fix for an unknown name: the nearest known one, else all that are offered."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"use one of {', '.join(offered or known)}" if known else "remove it"


# --- files


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice: YAML would silently use the last one.

    Dates are text: YAML's own reader fails on a day that does not exist.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in lines:
                    raise _DuplicateKeyError(key.value, lines[key.value], line)
                lines[key.value] = line
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _DuplicateKeyError(Exception):
    def __init__(self, key: str, first: int, second: int) -> None:
        super().__init__(key, first, second)
        self.key, self.first, self.second = key, first, second


def read_yaml(path: Path, *, may_be_empty: bool = False) -> dict[str, Any]:
    """Return the mapping in a YAML file; raise `ConfigError`."""
    at = ConfigLocation(str(path))
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise at.error("no such file", f"check the path ({path.absolute()})") from None
    except OSError as error:
        raise at.error(f"cannot be read ({error.strerror})", "name a readable text file") from None
    try:
        value = yaml.load(data.decode(), _Loader)  # a subclass of SafeLoader
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise at.at(f"line {number}").error(found, "save the file as UTF-8") from None
    except _DuplicateKeyError as error:
        found = f"'{error.key}' is set in line {error.first} and again in line {error.second}"
        raise at.error(found, "put both under one key, or remove one") from None
    except yaml.YAMLError as error:
        raise _yaml_error(error, at) from None
    if value is None and may_be_empty:
        return {}
    if not isinstance(value, dict):
        found = "is empty" if value is None else f"holds {_describe(value)} at its top level"
        raise at.error(found, "write settings as 'key: value' lines")
    return value


def _yaml_error(error: yaml.YAMLError, at: ConfigLocation) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    line = at if mark is None else at.at(f"line {mark.line + 1}")
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if isinstance(error, yaml.constructor.ConstructorError) and "tag" in problem:
        tag = problem.rpartition(" ")[2]
        return line.error(f"the tag {tag} is not supported", _NO_VARIABLES)
    return line.error(f"not valid YAML ({problem})", "check indentation, colons and quotes")


def check_kind(value: Mapping[str, Any], kind: FileKind, at: ConfigLocation) -> None:
    """Raise `ConfigError` for another kind of file than the one that is wanted."""
    found: FileKind | None = None
    if "replicas" in value or "discovery" in value:
        found = "fleet" if value.keys() & {"model", "router", "vllm_args"} else "router"
    elif value.keys() & {"chunk_size", "max_local_cpu_size", "lmcache_instance_id", "local_cpu"}:
        found = "replica"
    if found not in (None, kind):
        (name, command), (wanted, _) = _KINDS[found], _KINDS[kind]
        fix = f"give {wanted}, or use this one with: {command.format(at.path)}"
        raise at.error(f"this is {name}, not {wanted}", fix)


# --- dataclasses


def setting(
    default: Any = MISSING,
    *,
    default_factory: Any = MISSING,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    parse: Callable[[object], object] | None = None,
    live: bool = False,
    repr: bool = True,
) -> Any:
    """Declare a field of a dataclass of settings.

    The bounds are inclusive, exclusive, inclusive. ``parse`` replaces the check by type; it raises
    `BadValueError`. ``live``: a new value is applied while the process runs. ``repr=False`` marks
    a secret.
    """
    bounds = {"at least": at_least, "above": above, "at most": at_most}
    metadata = {"bounds": bounds, "parse": parse, "live": live}
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata, repr=repr)
    return field(default=default, metadata=metadata, repr=repr)


def bounds_of(each: Field[Any]) -> dict[str, float]:
    """Return the bounds of a setting, by their names: at least, above, at most."""
    given: dict[str, float | None] = each.metadata.get("bounds", {})
    return {name: bound for name, bound in given.items() if bound is not None}


def live_settings(cls: type) -> frozenset[str]:
    """Return the names of the settings that are applied while the process runs."""
    return frozenset(each.name for each in fields(cls) if each.metadata.get("live"))


def build(cls: type[T], value: object, at: ConfigLocation) -> T:
    """Return ``cls`` made from the mapping at a location; raise `ConfigError`.

    A class may have ``REMOVED``: settings of earlier versions, each with what to do instead.
    """
    known = {each.name: each for each in fields(typing.cast("type[Any]", cls))}
    if not isinstance(value, Mapping):
        fix = f"write 'key: value' lines under it; the keys are {', '.join(known)}"
        raise at.error(f"expected settings, got {_kind(value)}", fix)
    removed: Mapping[str, str] = getattr(cls, "REMOVED", {})
    for name in value:
        if name in removed:
            raise at.at(name).error("was removed", removed[name])
        if name not in known:
            raise at.at(name).error("unknown key", suggestion(str(name), known))
    hints = typing.get_type_hints(cls)
    made: dict[str, Any] = {}
    for name, each in known.items():
        if name in value and each.metadata.get("parse"):
            made[name] = parse_setting(each, value[name], at.at(name))
        elif name in value:
            made[name] = _convert(hints[name], value[name], each, at.at(name))
        elif each.default is MISSING and each.default_factory is MISSING:
            raise at.at(name).error("is missing", f"add '{name}: ...'")
    return cls(**made)


def _convert(hint: Any, value: object, each: Field[Any], at: ConfigLocation) -> Any:
    """Return ``value`` as the type ``hint``; raise `ConfigError`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        wanted = next(arg for arg in args if arg is not type(None))
        return None if value is None else _convert(wanted, value, each, at)
    if origin is Literal:
        return _choice(args, value, at)
    if origin is tuple:
        if not isinstance(value, list):
            raise at.error(f"expected a list, got {_kind(value)}", "write one '- item' a line")
        return tuple(_convert(args[0], one, each, at.item(i)) for i, one in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            found = f"expected a mapping, got {_kind(value)}"
            raise at.error(found, "write 'NAME: value' lines")
        return {str(name): _convert(args[1], one, each, at.at(name)) for name, one in value.items()}
    if is_dataclass(hint):
        return build(typing.cast("type[Any]", hint), value, at)
    return value if hint is Any else _scalar(hint, value, each, at)


def parse_setting(each: Field[Any], value: object, at: ConfigLocation) -> Any:
    """Return a setting's value, read by its own parser (``setting(parse=...)``).

    None for a value that means "not set". Raises `ConfigError`.
    """
    if is_null(value):
        return None
    try:
        return each.metadata["parse"](value)
    except BadValueError as error:
        raise at.error(error.problem, error.fix) from None


def _choice(choices: tuple[Any, ...], value: object, at: ConfigLocation) -> Any:
    if isinstance(value, str) and value in choices:
        return value
    near = difflib.get_close_matches(str(value), choices, n=1)
    shown = f"'{value}'" if isinstance(value, str) else _describe(value)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise at.error(f"unknown value {shown}", f"{hint}choose from {', '.join(choices)}")


def _scalar(hint: Any, value: object, each: Field[Any], at: ConfigLocation) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    has_variable = isinstance(value, str) and _VARIABLE.search(value) is not None
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        wanted, fix = _SCALARS[hint]
        unit = next((words for suffix, words in _UNITS.items() if each.name.endswith(suffix)), "")
        if unit and hint in (int, float):
            wanted = f"{wanted} of {unit}"
        if has_variable:
            fix = _NO_VARIABLES
        elif hint is float and isinstance(value, str) and _EXPONENT.fullmatch(value):
            fix = f"write {float(value):.15g}, since YAML takes '{value}' as text"
        raise at.error(
            f"expected {wanted}, got {_describe(value) if each.repr else _kind(value)}", fix
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise at.error(f"{value} is not a finite number", "give a number")
    if isinstance(value, str) and not value.strip():
        raise at.error("is empty", "give a value, or leave the key out")
    if isinstance(value, str) and "${" in value and has_variable and each.repr:
        raise at.error(f"'{value}' has a variable in it", _NO_VARIABLES)
    for words, bound in bounds_of(each).items():
        if not _COMPARE[words](value, bound):
            raise at.error(f"{value} is out of range", f"it must be {words} {bound}")
    return value


def _describe(value: object) -> str:
    match value:
        case str():
            return f"the text '{value}'"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"{value!r}"
    return _kind(value)


def _kind(value: object) -> str:
    """Describe a value that may be, or hold, a secret in the wrong place."""
    return _VALUE_KINDS.get(type(value)) or f"a {type(value).__name__}"


# --- parsers of values that may be YAML or an environment variable's text


def is_null(value: object) -> bool:
    """Whether a value means "not set"."""
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
    number = _number(value, "sizes are in GB: write 5.0 for 5 GB")
    if number > _MOST_GB:
        raise BadValueError(
            f"{value} GB is more than any machine has", "sizes are in GB, not in bytes"
        )
    if number < 0:
        raise BadValueError(f"{value} is negative", "write a size in GB, or 0")
    return number


def parse_share(value: object) -> float:
    """Read a number above 0 and up to 1."""
    number = _number(value, "write a number such as 0.5")
    if not 0 < number <= 1:
        raise BadValueError(f"{value} is out of range", "write a number above 0 and up to 1")
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
    """Read a TCP port, or a list with one port (LMCache has a list with one per worker)."""
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list):
        if len(value) != 1:
            raise BadValueError(
                f"{value} has {len(value)} ports", "write one: a replica has one agent"
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


def parse_date(value: object) -> str:
    """Read a day, such as 2027-12-31."""
    try:
        return date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise BadValueError(
            f"{value!r} is not a date", "write year, month and day, like 2027-12-31"
        ) from None


def parse_host_port(value: object) -> str:
    """Read ``host:port``."""
    text = parse_text(value)
    try:
        split_host_port(text)
    except ValueError as error:
        raise BadValueError(str(error), "write host:port, such as localhost:8004") from None
    return text


def parse_http_address(value: object) -> str:
    """Read ``host:port``, or an HTTP URL without a path."""
    text = parse_text(value).rstrip("/")
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https"):
        raise BadValueError(
            f"{value!r} is not an HTTP address", "write host:port, or http://host:port"
        )
    parse_host_port(f"{parts.netloc.rpartition('@')[2]}{parts.path}")
    return text


def parse_own_address(value: object) -> str:
    """Read an HTTP URL without a path; the host may be left out."""
    text = parse_text(value).rstrip("/")
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadValueError(
            f"{value!r} is not an HTTP URL", "write http://host:port, or http://:port"
        )
    parse_host_port(f"{'any' if parts.netloc.startswith(':') else ''}{parts.netloc}{parts.path}")
    return text


def parse_text(value: object) -> str:
    """Read a name or an address."""
    if isinstance(value, bool | dict | list):
        raise BadValueError(f"{_kind(value)} is not text", "write one word")
    return str(value).strip()


def parse_directories(value: object) -> tuple[Path, ...]:
    """Read paths or LMCache's ``file:///path/``: a list, or text with commas between them."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list) or not value:
        raise BadValueError(f"{value!r} is not a path", "write one, or several with commas")
    paths = tuple(_directory(each) for each in value)
    if len(set(paths)) < len(paths):
        raise BadValueError(f"{value!r} names a path twice", "write each path once")
    return paths


def _directory(value: object) -> Path:
    text = parse_text(value)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    elif "://" in text:
        raise BadValueError(f"{value!r} is not a local path", "write a path, or file:///path/")
    if not text:
        raise BadValueError(f"{value!r} has no path", "write a path, or file:///path/")
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
