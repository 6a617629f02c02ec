"""The command: what it is told, and how its findings are shown."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from router.config import RouterConfig, load_router_config, read_yaml, router_config
from router.doctor.findings import Level, Report, Section
from router.launch import load_fleet_file
from warmroute_common.config_reader import ConfigError

_COLOURS: Final[dict[Level | None, dict[str, Any]]] = {
    None: {"bold": True},
    Level.OK: {"fg": "green"},
    Level.NOTE: {"fg": "yellow"},
    Level.PROBLEM: {"fg": "red"},
}


@click.command(short_help="Say what is wrong with a configuration and its fleet.")
@click.option(
    "-c",
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="The router's YAML file, or the fleet's of 'warmroute up'.",
)
@click.option(
    "-r",
    "--replica",
    "urls",
    multiple=True,
    metavar="URL",
    help="A replica's base URL; repeat it for each. Instead of the file.",
)
@click.option(
    "--probe",
    is_flag=True,
    help="Send each replica one short prompt, and see that its KV events come.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--admin-key",
    envvar="WARMROUTE_ADMIN_KEY",
    show_envvar=True,
    help="That of the router that runs already, where it asks for one.",
)
def doctor(
    *,
    config_path: Path | None,
    urls: tuple[str, ...],
    probe: bool,
    as_json: bool,
    admin_key: str | None,
) -> None:
    """Check a configuration and its live fleet; say what is wrong and how to fix it.

    Each replica is asked what it is: whether it answers, which models it
    serves, whether its agent and its KV events can be followed, whether its
    tokens and hashes are those that the router computes. Nothing is changed,
    and without --probe no prompt is sent. Where the router runs already, it is
    asked too.

    Exit code 0 when nothing is wrong (notes may be meant so), 1 when something
    is.
    """
    if (config_path is None) == (not urls):
        raise click.UsageError("give --config FILE or --replica URL")
    report = _report(config_path, urls, probe=probe, admin_key=admin_key)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        for level, line in report.lines():
            click.echo(click.style(line, **_COLOURS[level]))
    sys.exit(0 if report.is_well else 1)


def _report(
    path: Path | None, urls: tuple[str, ...], *, probe: bool, admin_key: str | None
) -> Report:
    source = "--replica" if path is None else str(path)
    try:
        config = _loaded(path, urls)
    except ConfigError as error:
        section = Section(about="the router", at=source)
        where = ": ".join(filter(None, (error.path, error.key)))
        section.problem("file", f"the settings do not load: {where}: {error.problem}", error.fix)
        return Report([section])
    # The rooms that are asked take a while to import.
    import asyncio  # noqa: PLC0415

    from router.doctor.examination import examine  # noqa: PLC0415

    with _quiet():
        return asyncio.run(examine(config, source=source, probe=probe, admin_key=admin_key))


def _loaded(path: Path | None, urls: tuple[str, ...]) -> RouterConfig:
    if path is None:
        return router_config({"replicas": [{"url": url} for url in urls]}, path="--replica")
    if read_yaml(path).keys() & {"model", "router"}:
        settings = load_fleet_file(path).router_settings
        return router_config(settings, path=str(path), key="router", base=path.parent)
    return load_router_config(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the router's parts log out of the findings, which say the same."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
