"""Asking a running router for what its commands show."""

import json
import urllib.error
import urllib.request
from typing import Any, Final
from urllib.parse import quote

import click

_WITHIN_S: Final = 30.0


class NoAnswerError(click.ClickException):
    """The router cannot be asked."""


class RouterRefusedError(click.ClickException):
    """The router answers, but not this."""


def answer_of(
    url: str,
    path: str,
    body: bytes | None = None,
    *,
    key: str | None,
    timeout_s: float = _WITHIN_S,
) -> dict[str, Any]:
    """Return a router's answer at a path, to a POST where there is a body; raise either of these.

    ``url`` is its base URL, with ``/v1`` or without; ``key`` the administration's.
    """
    request = urllib.request.Request(
        url.rstrip("/").removesuffix("/v1") + path,
        data=body,
        headers={"Content-Type": "application/json"},
    )
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        # Never through a proxy from the environment: routers are near.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        raise RouterRefusedError(_refusal(error)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise NoAnswerError(
            f"no router answers at {url} ({reason}); start one with 'warmroute serve', "
            "or name another with --router"
        ) from None
    return answer


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the router answered {error.code}"


# TODO of router.cli.router_client: Options of the commands that ask a running router.

ROUTER: Final = click.option(
    "--router",
    "--url",
    "url",
    default="http://127.0.0.1:8080",
    show_default=True,
    help="The running router to ask.",
)
ADMIN_KEY: Final = click.option(
    "--admin-key",
    "--key",
    "admin_key",
    envvar="WARMROUTE_ADMIN_KEY",
    show_envvar=True,
    help="The router's admin key, where it asks for one.",
)


# TODO of router.cli.router_client: ``warmroute drain`` and ``resume``.


@click.command(short_help="Let a replica finish what it has, and give it nothing new.")
@click.argument("replica")
@ROUTER
@click.option(
    "--wait-s",
    type=click.FloatRange(0, 3600),
    default=600.0,
    show_default=True,
    help="How long to wait for its requests to end; 0 not to wait.",
)
@ADMIN_KEY
def drain(replica: str, url: str, wait_s: float, admin_key: str | None) -> None:
    """Take REPLICA (its id) out of service without losing a request.

    The router gives it nothing new; its sessions go on elsewhere, with their KV
    where it can be copied. Exit code 1 when requests still run there after
    --wait-s. 'warmroute resume' takes it back; a router that is started anew
    knows nothing of it.
    """
    path = f"/replicas/{quote(replica, safe='')}/drain?wait_s={wait_s:g}"
    told = answer_of(url, path, b"", key=admin_key, timeout_s=wait_s + 30)
    click.echo(f"{told['id']} is {told['state']}, {told['in_flight']} requests run there")
    if wait_s and told["in_flight"]:
        raise click.exceptions.Exit(1)


@click.command(short_help="Give requests to a drained replica again.")
@click.argument("replica")
@ROUTER
@ADMIN_KEY
def resume(replica: str, url: str, admin_key: str | None) -> None:
    """End 'warmroute drain' for REPLICA (its id)."""
    answer_of(url, f"/replicas/{quote(replica, safe='')}/resume", b"", key=admin_key)
    click.echo(f"{replica} gets requests again, once it is found up")
