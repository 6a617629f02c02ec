"""Options that several commands share, types of options, and counts in messages."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click


class NumberRange(click.FloatRange):
    """A number within bounds."""

    name = "number"


class WholeNumberRange(click.IntRange):
    """A whole number within bounds."""

    name = "whole number"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 request", "2 requests"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


ADMIN_KEY: Final = click.option(
    "--admin-key",
    "--key",
    "admin_key",
    metavar="KEY",
    envvar="WARMROUTE_ADMIN_KEY",
    show_envvar=True,
    help="The router's admin key, if it has one.",
)


def config_file(help_text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take its YAML file as -c/--config FILE or as an argument: ``config_path``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_file(*, config_path: Path | None, file: Path | None, **options: Any) -> None:
            if config_path is not None and file is not None:
                raise click.UsageError("give the file once: as FILE or with --config")
            command(config_path=config_path if file is None else file, **options)

        path = click.Path(path_type=Path)
        option = click.option(
            "-c", "--config", "config_path", metavar="FILE", type=path, help=help_text
        )
        return option(click.argument("file", required=False, type=path)(with_file))

    return decorate
