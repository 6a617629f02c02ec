"""Dataclasses of settings as sections of Markdown."""

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

_SCALARS: Final = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_HIDDEN: Final = ("source", "fleet_secret", "master_server_address")
"""Fields that no file has."""
_MIB: Final = 1 << 20


def sections(cls: type, title: str, file: str, path: str = "") -> Iterator[str]:
    """Yield a class's heading, what it says, its table, and then its sections'."""
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
    """Return the fields that a file may have, by name."""
    return [(each.name, each) for each in fields(cls) if each.name not in _HIDDEN]


def section_of(hint: Any) -> tuple[type | None, bool]:
    """Return the class of a section, or None, and whether there may be many of it."""
    if typing.get_origin(hint) is tuple:
        return section_of(typing.get_args(hint)[0])[0], True
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return section_of(next(a for a in typing.get_args(hint) if a is not type(None)))
    return (hint if isinstance(hint, type) and is_dataclass(hint) else None), False


@dataclass(frozen=True)
class Row:
    """One setting: its key, what it is, its default, its meaning."""

    key: str
    kind: str
    default: str
    meaning: str


def row(path: str, cls: type, each: Field[Any], file: str = "") -> Row:
    """Return the row of a field at a path; ``file`` is the one whose sections it links to."""
    said = meanings(cls).get(each.name, "")
    inner, is_list = section_of(hints(cls)[each.name])
    if inner is not None:
        anchor = slug(_title(path, is_list, file))
        first = (inspect.getdoc(inner) or "").split(". ")[0].split("\n\n")[0].rstrip(".")
        said = f"[{_one_line(first)}](#{anchor}). {said}".rstrip()
    name = path.rpartition(".")[2]
    bounded = f"{said} {_bounds(each)}"
    return Row(name, _kind(hints(cls)[each.name]), _default(each, inner), bounded)


def _bounds(each: Field[Any]) -> str:
    bounds = (
        f"{words} {_value(each.metadata[words])}"
        for words in ("at least", "above", "at most")
        if each.metadata.get(words) is not None
    )
    said = ", ".join(bounds)
    return f"{said.capitalize()}." if said else ""


def _kind(hint: Any) -> str:
    """Return what a setting is, in words."""
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
