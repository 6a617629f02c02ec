"""``warmroute drain`` and ``resume``."""

from urllib.parse import quote

import click

from router.terminal.asking import answer_of
from router.terminal.options import ADMIN_KEY, ROUTER


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
