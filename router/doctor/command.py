"""The command ``warmroute doctor``: its options and its output."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from router.config.loading import load_router_config, router_config
from router.config.settings import RouterConfig
from router.doctor.findings import Level, Report, Section
from router.launch.fleet_file import load_fleet_file
from warmroute_common.command_line import ADMIN_KEY, config_file
from warmroute_common.config_reader import ConfigError, read_yaml

_COLOURS: Final[dict[Level | None, dict[str, Any]]] = {
    None: {"bold": True},
    Level.OK: {"fg": "green"},
    Level.NOTE: {"fg": "yellow"},
    Level.PROBLEM: {"fg": "red"},
}


@click.command(short_help="Check a configuration and its running fleet.")
@config_file("The router's YAML file, or the fleet's YAML file of 'warmroute up'.")
@click.option(
    "-r",
    "--replica",
    "urls",
    multiple=True,
    metavar="URL",
    help="A replica's base URL, instead of a file; repeat it for each.",
)
@click.option(
    "--probe",
    is_flag=True,
    help="Also send each replica one short prompt, and check its KV events.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@ADMIN_KEY
def doctor(
    *,
    config_path: Path | None,
    urls: tuple[str, ...],
    probe: bool,
    as_json: bool,
    admin_key: str | None,
) -> None:
    """Check a configuration and its running fleet, and say how to fix problems.

    Checks for each replica that it answers, which models it serves, that its
    agent and its KV events can be reached, and that its tokens and hashes
    equal the ones that the router computes. If the router already runs, it is
    checked too. Nothing is changed, and no prompt is sent without --probe.

    Exit code 0 if there is no problem (notes may be intended), 1 otherwise.
    """
    if (config_path is None) == (not urls):
        raise click.UsageError("give either a FILE or --replica URL")
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
    # aiohttp and the tokenizers are slow to import, and no other command needs them.
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
    """Turn off logging: the findings say the same."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
