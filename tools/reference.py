"""The reference pages in docs/, written from the code: `python -m tools.reference`.

The classes of settings are the schema that files are read by. Their fields become tables, with
the docstring below each field as its meaning. A test checks that the pages are up to date.
"""

import ast
import inspect
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from cacheengine.settings.engine_config import EngineConfig
from cacheengine.settings.lmcache_file import ALIASES, INERT, REFUSED
from cacheengine.tiers.mooncake_store import MooncakeSettings
from router.cli.commands import main as warmroute
from router.config.settings import RouterConfig
from router.launch.fleet_file import FleetFile
from warmroute_common.config_reader import bounds_of, live_settings

ROOT: Final = Path(__file__).parent.parent
_CONFIGURATION: Final = """\
# Configuration

<!-- Written by `python -m tools.reference` from the docstrings in router/config, router/launch and
cacheengine/settings: edit them, not this page. -->

There are three files: the [router's](#routeryaml) (`configs/router.yaml`), a
[replica's cache engine's](#a-replicas-file) (`configs/instance1.yaml`), and, for `warmroute up`,
the file of a whole [fleet on one machine](#fleetyaml) (`configs/fleet.yaml`).

- The router's and the fleet's file are YAML with the keys below. Sizes are in bytes and times in
  seconds, as the names say. An unknown key is an error that names the nearest known one.
- A replica's file has LMCache's own keys, with sizes in GB.
- `warmroute check-config FILE` checks a router's or fleet's file and prints the settings in use.
  `warmroute replica --config FILE --print-command -- --model MODEL` checks a replica's file.
- Variables such as `${NAME}` and YAML tags are not expanded. A key that is set twice is an error.

"""
_LIVE: Final = """\
A running router reads its file again when it changes, and on SIGHUP. These settings are applied
without a restart: {}. All others are applied at the next start; the log and
`configuration.used_at_next_start` in `GET /health` name the ones that have changed.

"""
_ENGINE: Final = """\
## A replica's file

Keys and defaults are LMCache's unless stated otherwise; sizes are in GB. An environment variable,
`LMCACHE_` and the key in capitals, overrides the file. [engine.md](engine.md) explains the tiers
and when each is worth it.

"""
_MOONCAKE: Final = """\
### `extra_config` for Mooncake Store

For `remote_url: mooncakestore://host:port/`, which names the master. Each key may have the prefix
`mooncake_`. A JSON file that the variable `MOONCAKE_CONFIG_PATH` names overrides these keys.

"""
_ALIASES: Final = """\
### Other names of keys

Names from earlier and later versions of LMCache are accepted too.

"""
_REFUSED: Final = """\
### Keys that are refused

They ask for features that this engine does not have. The replica does not start, and the message
gives the reason.

"""
_INERT: Final = """\
### Keys without effect

They may stay in a file. A warning gives the reason.

"""
_COMMANDS: Final = """\
# Commands

<!-- Written by `python -m tools.reference` from the commands themselves. -->

The output of `warmroute COMMAND --help`. Exit codes: 0 success, 1 failure, 2 a mistake in the
command line or in a file, with one line that says what to change.

"""
_SCALARS: Final = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
}
_HIDDEN: Final = ("source", "fleet_secret", "master_server_address")
"""Fields that files do not have."""
_MIB: Final = 1 << 20


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (ROOT / name).write_text(text, encoding="utf-8")
        print(name)


def pages() -> dict[str, str]:
    """Return the text of each page, by its path from the root."""
    return {"docs/configuration.md": configuration(), "docs/commands.md": commands()}


def configuration() -> str:
    """Return the reference of all three files."""
    parts = [
        _CONFIGURATION,
        *_router_sections(),
        _ENGINE,
        table(row(name, EngineConfig, each) for name, each in settings(EngineConfig)),
        _MOONCAKE,
        table(row(name, MooncakeSettings, each) for name, each in settings(MooncakeSettings)),
        _ALIASES,
        plain_table("key", "is read as", ((f"`{k}`", f"`{v}`") for k, v in ALIASES.items())),
        _REFUSED,
        plain_table("key", "why", ((f"`{key}`", why) for key, (_, why) in REFUSED.items())),
        _INERT,
        plain_table("keys", "why", _by_reason()),
        *sections(FleetFile, "fleet.yaml", "fleet.yaml"),
    ]
    return "".join(parts).rstrip("\n") + "\n"


def _router_sections() -> Iterator[str]:
    """Yield the sections of router.yaml, with the list of live settings after the first table."""
    first, table_of_first, *others = sections(RouterConfig, "router.yaml", "router.yaml")
    live = ", ".join(f"`{name}`" for name in sorted(live_settings(RouterConfig)))
    yield from (first, textwrap.fill(_LIVE.format(live), 99) + "\n\n", table_of_first, *others)


def _by_reason() -> Iterator[tuple[str, str]]:
    reasons: dict[str, list[str]] = {}
    for key, why in INERT.items():
        reasons.setdefault(why, []).append(f"`{key}`")
    return ((", ".join(keys), why) for why, keys in reasons.items())


def commands() -> str:
    """Return the help of each command."""
    return _COMMANDS + "\n".join(_command(*each) for each in sorted(known_commands().items()))


def known_commands() -> dict[str, click.Command]:
    """Return every command of ``warmroute``, by its name."""
    return {**warmroute.commands, **dict(_plugged())}


def _plugged() -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that live outside the router's package, as pyproject.toml names them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, where in project["entry-points"]["warmroute.commands"].items():
        module, _, attribute = where.partition(":")
        yield name, getattr(import_module(module), attribute)


def _command(name: str, command: click.Command) -> str:
    context = click.Context(
        command,
        info_name=f"warmroute {name}",
        max_content_width=90,
        terminal_width=90,
        help_option_names=["-h", "--help"],
    )
    return f"## warmroute {name}\n\n```text\n{command.get_help(context)}\n```\n"


def unexplained() -> Iterator[str]:
    """Yield the settings that no docstring explains."""
    files = (RouterConfig, EngineConfig, MooncakeSettings, FleetFile)
    for cls in {*files, *_below(RouterConfig), *_below(FleetFile)}:
        meaning = meanings(cls)
        for name, each in settings(cls):
            if name not in meaning and section_of(hints(cls)[each.name])[0] is None:
                yield f"{cls.__name__}.{name}"


def _below(cls: type) -> Iterator[type]:
    for each in fields(cls):
        inner, _ = section_of(hints(cls)[each.name])
        if inner is not None:
            yield inner
            yield from _below(inner)


# --- dataclasses of settings as Markdown


def sections(cls: type, title: str, file: str, path: str = "") -> Iterator[str]:
    """Yield a class's heading and docstring, its table, and then the sections below it."""
    yield f"{'###' if path else '##'} {title}\n\n{_markdown(inspect.getdoc(cls) or '')}\n\n"
    yield table(row(f"{path}{name}", cls, each, file) for name, each in settings(cls))
    for name, each in settings(cls):
        inner, is_list = section_of(hints(cls)[each.name])
        if inner is not None:
            below = f"{path}{name}"
            title = _title(below, is_list, file)
            yield from sections(inner, title, file, f"{below}{'[]' if is_list else ''}.")


def _title(path: str, is_list: bool, file: str) -> str:
    return f"`{path}{'[]' if is_list else ''}` in {file}"


def slug(heading: str) -> str:
    """Return a heading's anchor, as GitHub makes it."""
    kept = (each for each in heading.lower() if each.isalnum() or each in " -_")
    return "".join(kept).strip().replace(" ", "-")


@cache
def hints(cls: type) -> dict[str, Any]:
    """Return the types of a class's fields."""
    return typing.get_type_hints(cls)


def settings(cls: type) -> list[tuple[str, Field[Any]]]:
    """Return the fields that a file may set, by name."""
    return [(each.name, each) for each in fields(cls) if each.name not in _HIDDEN]


def section_of(hint: Any) -> tuple[type | None, bool]:
    """Return the class of a section, or None, and whether the setting is a list of them."""
    if typing.get_origin(hint) is tuple:
        return section_of(typing.get_args(hint)[0])[0], True
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return section_of(next(a for a in typing.get_args(hint) if a is not type(None)))
    return (hint if isinstance(hint, type) and is_dataclass(hint) else None), False


@dataclass(frozen=True)
class Row:
    """One setting as a row of a table."""

    key: str
    kind: str
    default: str
    meaning: str


def row(path: str, cls: type, each: Field[Any], file: str = "") -> Row:
    """Return the row of a field at a path, with links to the sections of ``file``."""
    meaning = meanings(cls).get(each.name, "")
    inner, is_list = section_of(hints(cls)[each.name])
    if inner is not None:
        anchor = slug(_title(path, is_list, file))
        first = (inspect.getdoc(inner) or "").split(". ")[0].split("\n\n")[0].rstrip(".")
        meaning = f"[{_one_line(first)}](#{anchor}). {meaning}".rstrip()
    name = path.rpartition(".")[2]
    bounded = f"{meaning} {_bounds(each)}"
    return Row(name, _kind(hints(cls)[each.name]), _default(each, inner), bounded)


def _bounds(each: Field[Any]) -> str:
    bounds = ", ".join(f"{words} {_value(bound)}" for words, bound in bounds_of(each).items())
    return f"{bounds.capitalize()}." if bounds else ""


def _kind(hint: Any) -> str:
    """Return a setting's type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _kind(next(each for each in args if each is not type(None)))
    if origin is typing.Literal:
        return "one of " + ", ".join(f"`{each}`" for each in args)
    if origin is tuple:
        return "directories" if args[0] is Path else f"list of {_plural(_kind(args[0]))}"
    if is_dataclass(hint):
        return "section"
    return _SCALARS.get(hint, "mapping")


def _plural(kind: str) -> str:
    return {"text": "texts"}.get(kind, f"{kind}s")


def _default(each: Field[Any], section: type | None) -> str:
    if each.default_factory is not MISSING:
        return "all defaults" if is_dataclass(each.default_factory) else "none"
    if each.default is MISSING:
        return "*required*"
    if each.default is None and section is not None:
        return "off"
    if each.default in (None, (), ""):
        return "none"
    return _value(each.default, is_bytes=each.name.endswith("_bytes"))


def _value(value: Any, *, is_bytes: bool = False) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if is_bytes and value >= _MIB and value % _MIB == 0:
        return f"{value} ({value // _MIB} MiB)"
    if isinstance(value, float):
        return f"{value:.15g}"
    return f"`{value}`" if isinstance(value, str) else str(value)


@cache
def meanings(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a class, in one line of Markdown."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[field.target.id] = _one_line(str(below.value.value))
    return found


def _one_line(docstring: str) -> str:
    return " ".join(_markdown(docstring).split())


def _markdown(docstring: str) -> str:
    return docstring.replace("``", "`").strip()


def table(rows: Iterable[Row]) -> str:
    """Return the settings as a table."""
    lines = ["| key | what | default | meaning |", "|---|---|---|---|"]
    for each in rows:
        cells = (f"`{each.key}`", each.kind, each.default, each.meaning)
        lines.append(f"| {' | '.join(cell.strip().replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n\n"


def plain_table(first: str, second: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return pairs as a table."""
    lines = [f"| {first} | {second} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {left} | {right} |" for left, right in rows)]) + "\n\n"


if __name__ == "__main__":
    main()
