"""The two pages: what stands in them beside the tables."""

import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Final

import click

from cacheengine.settings import EngineConfig
from cacheengine.settings.lmcache_keys import ALIASES, INERT, REFUSED
from cacheengine.tiers.stores.mooncake.settings import MooncakeSettings
from router.cli import main as warmroute
from router.config import RouterConfig
from router.launch.fleet_file import FleetFile
from tools.reference.sections import (
    hints,
    meanings,
    plain_table,
    row,
    section_of,
    sections,
    settings,
    table,
)

ROOT: Final = Path(__file__).parent.parent.parent
_CONFIGURATION: Final = """\
# Configuration

<!-- Written by `python -m tools.reference` from the docstrings in router/config, router/launch and
cacheengine/settings: edit them, not this page. -->

Three files: the [router's](#routeryaml) (`configs/router.yaml`), a
[replica's cache engine's](#a-replicas-file) (`configs/instance1.yaml`), and, for `warmroute up`,
that of a whole [fleet on one machine](#fleetyaml) (`configs/fleet.yaml`).

- The router's and the fleet's file are YAML with the keys below. Sizes are in bytes and times in
  seconds, as the names say. An unknown key is an error that names the nearest known one.
- A replica's file has LMCache's own keys, with sizes in GB.
- `warmroute check-config FILE` checks a router's or fleet's file, and prints all that is in force.
  `warmroute replica --config FILE --print-command -- --model MODEL` checks a replica's.

"""
_ENGINE: Final = """\
## A replica's file

The keys and their defaults are LMCache's, unless said otherwise; sizes are in GB. Each may be set
by an environment variable, `LMCACHE_` and the key in capitals, which overrides the file. What the
tiers are and when each pays: [engine.md](engine.md).

"""
_MOONCAKE: Final = """\
### `extra_config` for Mooncake Store

For `remote_url: mooncakestore://host:port/`, which names the master. Each key may also be written
with `mooncake_` before it. A JSON file that the variable `MOONCAKE_CONFIG_PATH` names goes before
these keys.

"""
_ALIASES: Final = """\
### Other names of keys

Names of LMCache's earlier and later versions are read too.

"""
_REFUSED: Final = """\
### Keys that are refused

They ask for what this engine does not do: starting with one is an error that says why.

"""
_INERT: Final = """\
### Keys without effect

They may stay in a file; a warning says why they do nothing here.

"""
_COMMANDS: Final = """\
# Commands

<!-- Written by `python -m tools.reference` from the commands themselves. -->

What `warmroute COMMAND --help` says. Exit codes: 0 done, 1 a failure, 2 a mistake in the
command line or in a file, with one line that says what to change.

"""


def pages() -> dict[str, str]:
    """Return the text of each page, by its path from the root."""
    return {"docs/configuration.md": configuration(), "docs/commands.md": commands()}


def configuration() -> str:
    """Return the reference of all three files."""
    parts = [
        _CONFIGURATION,
        *sections(RouterConfig, "router.yaml", "router.yaml"),
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


def _by_reason() -> Iterator[tuple[str, str]]:
    reasons: dict[str, list[str]] = {}
    for key, why in INERT.items():
        reasons.setdefault(why, []).append(f"`{key}`")
    return ((", ".join(keys), why) for why, keys in reasons.items())


def commands() -> str:
    """Return what each command says of itself."""
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
        said = meanings(cls)
        for name, each in settings(cls):
            if name not in said and section_of(hints(cls)[each.name])[0] is None:
                yield f"{cls.__name__}.{name}"


def _below(cls: type) -> Iterator[type]:
    for each in fields(cls):
        inner, _ = section_of(hints(cls)[each.name])
        if inner is not None:
            yield inner
            yield from _below(inner)
