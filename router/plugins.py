"""Commands of other packages beside our own: entry points, imported when they are used."""

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import click

from warmroute_common.config_reader import ConfigError

_PLUGINS: Final = "warmroute.commands"


class LazyGroup(click.Group):
    """A group whose plugin commands are imported when they are used or listed.

    A plugin that cannot be imported is listed with the reason, and does not
    take the other commands down.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of our own commands and of the plugins'."""
        return sorted({*super().list_commands(ctx), *(each.name for each in _plugins())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, importing it if it is a plugin's."""
        named = (each for each in _plugins() if each.name == cmd_name)
        return super().get_command(ctx, cmd_name) or next(map(_load, named), None)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; a configuration that cannot work ends it as a wrong option does."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            click.echo(str(error), err=True)
            ctx.exit(2)


def _plugins() -> Iterable[EntryPoint]:
    return entry_points(group=_PLUGINS)


def _load(plugin: EntryPoint) -> click.Command:
    try:
        command = plugin.load()
        why = f"{plugin.value} is no command"
    except (ImportError, AttributeError) as error:
        command, why = None, str(error)
    if isinstance(command, click.Command):
        return command

    def fail(args: tuple[str, ...]) -> None:
        raise click.ClickException(f"'{plugin.name}' cannot be used here: {why}")

    return click.Command(
        plugin.name,
        callback=fail,
        params=[click.Argument(["args"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        short_help=f"(unavailable: {why})",
    )
