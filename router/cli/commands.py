"""Commands of other packages beside our own: entry points, imported when they are used."""

import json
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final

import click
import yaml

from router.cli.explain import explain
from router.cli.router_client import drain, resume
from router.cli.top import top
from router.config import PickerConfig, RouterConfig, load_router_config, router_config
from router.doctor import doctor
from router.gateway.envoy_config import envoy_configuration
from router.launch import ChildFailedError, commands_text, load_any, load_fleet_file, run_fleet
from warmroute_common.config_reader import ConfigError, ConfigLocation

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


# TODO of router.cli.commands: The ``warmroute`` command. Heavy imports wait until a command needs them.


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


_CONFIG: Final = click.option(
    "-c",
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="The router's YAML file (see configs/router.yaml).",
)
_REPLICAS: Final = click.option(
    "-r",
    "--replica",
    "urls",
    multiple=True,
    metavar="URL",
    help="A replica's base URL; repeat it for each. Instead of, or on top of, the file's.",
)


@main.command(short_help="Run the router.")
@_CONFIG
@_REPLICAS
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
    (timeouts.drain_s at most); a second one stops it at once. After SIGTERM
    it first leaves: /health says 503 while requests are still taken
    (timeouts.leave_s). The file is read again when it changes, and on SIGHUP.
    """

    def read() -> RouterConfig:
        config = _config("serve", config_path, urls)
        return replace(
            config,
            host=config.host if host is None else host,
            port=config.port if port is None else port,
        )

    _run(read, config_path)


@main.command(short_help="Pick replicas for a gateway, like Envoy.")
@_CONFIG
@_REPLICAS
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1, or the file's]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port for gRPC, 0 for a free one.  [default: 9002, or the file's]",
)
@click.option(
    "--print-envoy", is_flag=True, help="Print a configuration of Envoy that asks it, and stop."
)
def picker(
    config_path: Path | None,
    urls: tuple[str, ...],
    host: str | None,
    port: int | None,
    print_envoy: bool,
) -> None:
    """Run the router as the endpoint picker of a gateway, which carries the requests.

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
        return replace(config, picker=settings)

    if print_envoy:
        made = envoy_configuration(
            read(), ConfigLocation(str(config_path or "--replica"), "replicas")
        )
        click.echo(yaml.safe_dump(made, sort_keys=False), nl=False)
        return
    _run(read, config_path, picks=True)


@main.command("check-config", short_help="Check a YAML file; print what would be used.")
@click.argument("config_path", type=click.Path(path_type=Path))
def check_config(config_path: Path) -> None:
    """Check a router's or a fleet's YAML file and print what would be used.

    Exit code 0 when it can work; 2, and one line that says what to change, when
    it cannot.
    """
    click.echo(json.dumps(load_any(config_path), indent=2, default=_without_secrets))


@main.command(short_help="Run replicas and the router on this machine.")
@click.option(
    "-c",
    "--config",
    "config_path",
    required=True,
    type=click.Path(path_type=Path),
    help="The fleet's YAML file (see configs/fleet.yaml).",
)
@click.option(
    "--gateway",
    type=click.Choice(["envoy"]),
    help="Let Envoy carry the requests, where the router's port is; the router is its picker.",
)
@click.option("--print-commands", is_flag=True, help="Print what would be started, and stop.")
def up(config_path: Path, gateway: str | None, print_commands: bool) -> None:
    """Run a whole fleet on this machine: replicas, and the router in front.

    The file (see configs/fleet.yaml) names the model, the replicas with their
    GPUs, and the router's settings. Everything is ended together: on Ctrl-C,
    on SIGTERM, or when one of the processes dies.
    """
    fleet = load_fleet_file(config_path, by_envoy=gateway == "envoy")
    if print_commands:
        click.echo(commands_text(fleet))
        return
    try:
        run_fleet(fleet, say=click.echo)
    except ChildFailedError as error:
        raise click.ClickException(str(error)) from None


@main.command(short_help="Make a key for a client, or for administration.")
@click.argument("name", required=False)
@click.option(
    "--admin",
    is_flag=True,
    help="For administration: /explain, /metrics, /replicas, /ui, the controller.",
)
def key(name: str | None, admin: bool) -> None:
    """Make a key for the client NAME, and the lines of router.yaml that let it in.

    The key is printed this once and kept nowhere: the file has its SHA-256.
    """
    if admin == (name is not None):
        raise click.UsageError("give the client's NAME, or --admin")
    from router.access import new_key, sha256_of  # noqa: PLC0415

    made = new_key()
    click.echo(f"key: {made}", err=True)
    entry = {"name": name, "sha256": sha256_of(made)}
    access = {"admin_sha256": [entry["sha256"]]} if admin else {"keys": [entry]}
    click.echo(yaml.safe_dump({"access": access}, sort_keys=False), nl=False)


for each in (doctor, drain, explain, resume, top):
    main.add_command(each)


def _run(read: Callable[[], RouterConfig], path: Path | None, *, picks: bool = False) -> None:
    config = read()
    # aiohttp and uvloop take a while to import; no other command needs them.
    from router.cli.serve import PortTakenError, run  # noqa: PLC0415
    from router.membership import ConfigFile  # noqa: PLC0415

    file = None if path is None else ConfigFile(path=path, read=read)
    try:
        run(config, file=file, picks=picks)
    except PortTakenError as error:
        where = (str(path), error.key) if path else ("--port", "")
        raise ConfigError(*where, str(error), "choose another") from None
    except ModuleNotFoundError as error:
        if not picks:
            raise
        fix = "install the extra: pip install 'warmroute[gateway]'"
        raise ConfigError("warmroute picker", "", str(error), fix) from None


def _config(command: str, path: Path | None, urls: tuple[str, ...]) -> RouterConfig:
    if path is None and not urls:
        fix = "give --config FILE or --replica URL"
        raise ConfigError(f"warmroute {command}", "", "knows no replica", fix)
    config = RouterConfig(replicas=()) if path is None else load_router_config(path)
    if urls:
        named = {"replicas": [{"url": url} for url in urls]}
        given = router_config(named, path="--replica").replicas
        known = {each.url for each in config.replicas}
        more = tuple(each for each in given if each.url not in known)
        config = replace(config, replicas=config.replicas + more)
    return config


def _without_secrets(settings: Any) -> dict[str, Any]:
    """Return a dataclass of settings for JSON; fields that no ``repr`` shows are secrets."""
    assert is_dataclass(settings)
    shown = {each.name: getattr(settings, each.name) for each in fields(settings)}
    secrets = [each.name for each in fields(settings) if not each.repr and shown[each.name]]
    return shown | dict.fromkeys(secrets, "***")
