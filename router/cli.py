"""The ``warmroute`` command. Heavy imports wait until a command needs them."""

import json
import sys
from collections.abc import Iterable
from dataclasses import Field, fields, is_dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from router.config import ConfigError, RouterConfig, load_router_config, router_config
from router.explain import ExplainFailed, ask, table
from router.launch import ChildFailed, commands_text, load_any, load_fleet_file, run_fleet

_PLUGINS: Final = "warmroute.commands"
EXIT_CONFIG: Final = 2
"""The exit code for a configuration that cannot work, as for a wrong option."""


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
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for plugin in _plugins():
            if plugin.name == cmd_name:
                return _load(plugin)
        return None


def _plugins() -> Iterable[EntryPoint]:
    return entry_points(group=_PLUGINS)


def _load(plugin: EntryPoint) -> click.Command:
    try:
        command = plugin.load()
    except (ImportError, AttributeError) as error:
        return _broken(plugin.name, str(error))
    if not isinstance(command, click.Command):
        return _broken(plugin.name, f"{plugin.value} is no command")
    return command


def _broken(name: str, why: str) -> click.Command:
    def fail(args: tuple[str, ...]) -> None:
        raise click.ClickException(f"'{name}' cannot be used here: {why}")

    return click.Command(
        name,
        callback=fail,
        params=[click.Argument(["args"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        short_help=f"(unavailable: {why})",
    )


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here: warmroute serve --replica http://localhost:8000",
)
@click.version_option(package_name="warmroute", prog_name="warmroute")
def main() -> None:
    """Send every prompt to the replica that already remembers it.

    Warmroute is an OpenAI-compatible router for vLLM fleets that knows which
    replica holds which prompt's KV cache, and in which tier.
    """


_CONFIG_OPTION = click.option(
    "-c",
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="The router's YAML file (see configs/router.yaml).",
)
_REPLICA_OPTION = click.option(
    "-r",
    "--replica",
    "urls",
    multiple=True,
    metavar="URL",
    help="A replica's base URL; repeat it for each. Instead of, or on top of, the file's.",
)


@main.command(short_help="Run the router.")
@_CONFIG_OPTION
@_REPLICA_OPTION
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1, or the file's]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port to listen on, 0 for a free one.  [default: 8080, or the file's]",
)
def serve(
    config_path: Path | None, urls: tuple[str, ...], host: str | None, port: int | None
) -> None:
    """Run the router.

    Clients change only their base URL:

        OPENAI_BASE_URL=http://localhost:8080/v1

    Ctrl-C or SIGTERM stops it once running requests have ended
    (timeouts.drain_s at most); a second one stops it at once.
    """
    config = _config_or_exit(config_path, urls, host, port)
    # aiohttp and uvloop take a while to import; no other command needs them.
    from router.serve import PortTaken, run  # noqa: PLC0415

    try:
        run(config)
    except PortTaken as error:
        where = str(config_path) if config_path else "--port"
        _exit(ConfigError(where, error.key if config_path else "", str(error), "choose another"))


@main.command("check-config", short_help="Check a YAML file; print what would be used.")
@click.argument("config_path", type=click.Path(path_type=Path))
def check_config(config_path: Path) -> None:
    """Check a router's or a fleet's YAML file and print what would be used.

    Exit code 0 when it can work; 2, and one line that says what to change, when
    it cannot.
    """
    try:
        config = load_any(config_path)
    except ConfigError as error:
        _exit(error)
    click.echo(json.dumps(_plain(config), indent=2))


@main.command(short_help="Run replicas and the router on this machine.")
@click.option(
    "-c",
    "--config",
    "config_path",
    required=True,
    type=click.Path(path_type=Path),
    help="The fleet's YAML file (see configs/fleet.yaml).",
)
@click.option("--print-commands", is_flag=True, help="Print what would be started, and stop.")
def up(config_path: Path, print_commands: bool) -> None:
    """Run a whole fleet on this machine: replicas, and the router in front.

    The file (see configs/fleet.yaml) names the model, the replicas with their
    GPUs, and the router's settings. Everything is ended together: on Ctrl-C,
    on SIGTERM, or when one of the processes dies.
    """
    try:
        fleet = load_fleet_file(config_path)
        if print_commands:
            click.echo(commands_text(fleet))
            return
        run_fleet(fleet, say=click.echo)
    except ConfigError as error:
        _exit(error)
    except ChildFailed as error:
        raise click.ClickException(str(error)) from None


@main.command(short_help="Ask a running router where a prompt would go.")
@click.argument("prompt", required=False)
@click.option(
    "--router",
    "url",
    default="http://127.0.0.1:8080",
    show_default=True,
    help="The running router to ask.",
)
@click.option("--model", help="The model; needed where the replicas serve several.")
@click.option("--session", help="Ask as this session.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON.")
def explain(
    prompt: str | None, url: str, model: str | None, session: str | None, as_json: bool
) -> None:
    """Ask a running router where it would send PROMPT, and why.

    PROMPT is a user's message, or a whole request body as JSON if it begins
    with '{'. Without PROMPT it is read from standard input. Nothing is sent to
    a replica.
    """
    text = sys.stdin.read() if prompt is None else prompt
    try:
        answer = ask(url, text, model=model, session=session)
    except ExplainFailed as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps(answer, indent=2) if as_json else table(answer))


def _config_or_exit(
    path: Path | None, urls: tuple[str, ...], host: str | None, port: int | None
) -> RouterConfig:
    try:
        return _config(path, urls, host, port)
    except ConfigError as error:
        _exit(error)


def _config(
    path: Path | None, urls: tuple[str, ...], host: str | None, port: int | None
) -> RouterConfig:
    given: tuple[Any, ...] = ()
    if path is None and not urls:
        raise ConfigError(
            "warmroute serve",
            "",
            "knows no replica",
            "give --config FILE or --replica URL",
        )
    if urls:
        named = [{"url": url} for url in urls]
        given = router_config({"replicas": named}, path="--replica").replicas
    config = RouterConfig(replicas=given) if path is None else load_router_config(path)
    if path is not None and given:
        config = replace(config, replicas=config.replicas + given)
    return replace(
        config,
        host=config.host if host is None else host,
        port=config.port if port is None else port,
    )


def _plain(value: Any) -> Any:
    """Return settings as JSON values, without secrets."""
    if is_dataclass(value):
        return {each.name: _shown(value, each) for each in fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return str(value) if isinstance(value, Path) else value


def _shown(value: Any, each: Field[Any]) -> Any:
    inner = getattr(value, each.name)
    is_secret = not each.repr
    return "***" if is_secret and inner else _plain(inner)


def _exit(error: ConfigError) -> NoReturn:
    click.echo(str(error), err=True)
    sys.exit(EXIT_CONFIG)
