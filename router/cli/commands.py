"""The ``warmroute`` command and its subcommands. Slow imports wait until a command needs them."""

import json
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final

import click
import yaml

from router.cli.explain import explain, why
from router.cli.router_client import drain, resume
from router.cli.top import top
from router.cli.usage import usage
from router.cli.waste import waste
from router.config.loading import load_router_config, router_config
from router.config.settings import PickerConfig, RouterConfig
from router.doctor.command import doctor
from router.gateway.envoy_config import envoy_configuration
from router.launch.fleet_file import load_any, load_fleet_file
from router.launch.processes import ChildFailedError
from router.launch.up import commands_text, run
from router.policy import check_gateway
from warmroute_common.addresses import without_passwords
from warmroute_common.command_line import WholeNumberRange, config_file
from warmroute_common.config_reader import ConfigError, ConfigLocation, printable

_PLUGINS: Final = "warmroute.commands"


class LazyGroup(click.Group):
    """A group that also has the commands of other packages, and imports them when they are used.

    A plugin command that cannot be imported is listed with the reason; the others still work.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *(each.name for each in _plugins())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; import it if it belongs to another package."""
        named = (each for each in _plugins() if each.name == cmd_name)
        return super().get_command(ctx, cmd_name) or next(map(_load, named), None)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. A `ConfigError` ends it like a wrong option: one line, exit code 2."""
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
        why = f"{plugin.value} is not a command"
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


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here: warmroute serve --replica http://localhost:8000",
)
@click.version_option(package_name="warmroute", prog_name="warmroute")
def main() -> None:
    """A KV-cache-aware router for vLLM fleets.

    Clients use it like one OpenAI server. Each prompt goes to the replica that
    is predicted to answer first: the one that holds the prompt's KV cache,
    unless it is too busy.
    """


_ROUTER_FILE: Final = config_file("The router's YAML file (see configs/router.yaml).")
_REPLICAS: Final = click.option(
    "-r",
    "--replica",
    "urls",
    multiple=True,
    metavar="URL",
    help="A replica's base URL; repeat it for each. In addition to the file's, if any.",
)
_HOST: Final = click.option(
    "--host", metavar="ADDRESS", help="Address to listen on.  [default: the file's, or 127.0.0.1]"
)


@main.command(short_help="Run the router.")
@_ROUTER_FILE
@_REPLICAS
@_HOST
@click.option(
    "--port",
    metavar="PORT",
    type=WholeNumberRange(0, 65535),
    help="Port to listen on, 0 for a free one.  [default: the file's, or 8080]",
)
def serve(
    config_path: Path | None, urls: tuple[str, ...], host: str | None, port: int | None
) -> None:
    """Run the router.

    Clients change only their base URL:

        OPENAI_BASE_URL=http://localhost:8080/v1

    Ctrl-C or SIGTERM stops it after running requests have finished, within
    timeouts.drain_s; a second signal stops it at once. After SIGTERM /health
    first answers 503 while requests are still accepted (timeouts.leave_s). The
    file is read again when it changes, and on SIGHUP.
    """

    def read() -> RouterConfig:
        config = _config("serve", config_path, urls)
        return replace(
            config,
            host=config.host if host is None else host,
            port=config.port if port is None else port,
        )

    _run(read, config_path)


@main.command(short_help="Pick replicas for a gateway such as Envoy.")
@_ROUTER_FILE
@_REPLICAS
@_HOST
@click.option(
    "--port",
    metavar="PORT",
    type=WholeNumberRange(0, 65535),
    help="Port for gRPC, 0 for a free one.  [default: the file's, or 9002]",
)
@click.option("--print-envoy", is_flag=True, help="Print an Envoy configuration and stop.")
def picker(
    config_path: Path | None,
    urls: tuple[str, ...],
    host: str | None,
    port: int | None,
    print_envoy: bool,
) -> None:
    """Run the endpoint picker for a gateway, which then carries the requests.

    It speaks the protocol of the Gateway API Inference Extension (Envoy's
    external processing). Its own /health, /metrics and /explain are at
    picker.http_port.
    """

    def read() -> RouterConfig:
        config = _config("picker", config_path, urls)
        settings = config.picker or PickerConfig()
        settings = replace(
            settings,
            host=settings.host if host is None else host,
            port=settings.port if port is None else port,
        )
        config = replace(config, picker=settings)
        check_gateway(config, ConfigLocation(str(config_path or "--replica")))
        return config

    if print_envoy:
        at = ConfigLocation(str(config_path or "--replica"), "replicas")
        made = envoy_configuration(read(), at)
        click.echo(yaml.safe_dump(made, sort_keys=False), nl=False)
        return
    _run(read, config_path, picks=True)


@main.command("check-config", short_help="Check a YAML file and print its settings.")
@config_file("The router's or the fleet's YAML file.")
def check_config(config_path: Path | None) -> None:
    """Check a router's or a fleet's YAML file and print all its settings.

    Exit code 0 if the file can be used. Otherwise 2, and one line says what to
    change.
    """
    settings = load_any(_required(config_path))
    click.echo(without_passwords(json.dumps(printable(settings), indent=2)))


@main.command(short_help="Run replicas and the router on this machine.")
@config_file("The fleet's YAML file (see configs/fleet.yaml).")
@click.option(
    "--gateway",
    type=click.Choice(["envoy"]),
    help="Run Envoy at the router's port; the router becomes its endpoint picker.",
)
@click.option("--print-commands", is_flag=True, help="Print the commands and stop.")
def up(config_path: Path | None, gateway: str | None, print_commands: bool) -> None:
    """Run a whole fleet on this machine: replicas, and the router in front.

    The file names the model, the replicas with their GPUs, and the router's
    settings. Ctrl-C or SIGTERM stops everything. If one process ends, all are
    stopped.
    """
    fleet = load_fleet_file(_required(config_path), by_envoy=gateway == "envoy")
    if print_commands:
        click.echo(commands_text(fleet))
        return
    try:
        run(fleet, say=click.echo)
    except ChildFailedError as error:
        raise click.ClickException(str(error)) from None


@main.command(short_help="Make a key for a client or an administrator.")
@click.argument("name", required=False)
@click.option(
    "--admin",
    is_flag=True,
    help="Make an admin key: for /explain, /metrics, /replicas, /ui and the controller.",
)
def key(name: str | None, admin: bool) -> None:
    """Make a key for the client NAME, and its entry for router.yaml.

    The key is printed once, on standard error, and stored nowhere. Standard
    output has the list item with its SHA-256. Paste it into the list
    access.keys (with --admin: access.admin_sha256) of router.yaml.
    """
    if admin == (name is not None):
        raise click.UsageError("give the client's NAME, or --admin")
    from router.api.access import new_key, sha256_of  # noqa: PLC0415

    made = new_key()
    section = "admin_sha256" if admin else "keys"
    item = sha256_of(made) if admin else {"name": name, "sha256": sha256_of(made)}
    click.echo(f"key: {made}", err=True)
    click.echo(f"Paste this item below 'access:', '{section}:' (access.{section}):", err=True)
    # As deep as in a file with both lines above it.
    click.echo(textwrap.indent(yaml.safe_dump([item], sort_keys=False), "    "), nl=False)


for each in (doctor, drain, explain, resume, top, usage, waste, why):
    main.add_command(each)


def _required(path: Path | None) -> Path:
    if path is None:
        raise click.UsageError("give the YAML file: FILE or --config FILE")
    return path


def _run(read: Callable[[], RouterConfig], path: Path | None, *, picks: bool = False) -> None:
    config = read()
    # aiohttp and uvloop are slow to import, and no other command needs them.
    from router.cli.serve import PortTakenError, run  # noqa: PLC0415
    from router.membership.reload import ConfigFile  # noqa: PLC0415

    file = None if path is None else ConfigFile(path=path, read=read)
    try:
        run(config, file=file, picks=picks)
    except PortTakenError as error:
        where = (str(path), error.key) if path else ("--port", "")
        fix = "stop the program that uses it, or choose another port"
        raise ConfigError(*where, str(error), fix) from None
    except ModuleNotFoundError as error:
        if not picks:
            raise
        fix = "install the extra: pip install '.[gateway]' in a clone of the repository"
        raise ConfigError("warmroute picker", "", str(error), fix) from None


def _config(command: str, path: Path | None, urls: tuple[str, ...]) -> RouterConfig:
    if path is None and not urls:
        fix = "give --config FILE or --replica URL"
        raise ConfigError(f"warmroute {command}", "", "no replica is configured", fix)
    config = RouterConfig(replicas=()) if path is None else load_router_config(path)
    if urls:
        named = {"replicas": [{"url": url} for url in urls]}
        given = router_config(named, path="--replica").replicas
        known = {each.url for each in config.replicas}
        more = tuple(each for each in given if each.url not in known)
        config = replace(config, replicas=config.replicas + more)
    return config
