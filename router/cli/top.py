"""``warmroute top``: what the page at ``/ui`` shows, in a terminal."""

import time
from typing import TYPE_CHECKING, Any, Final

import click

from router.cli.router_client import ADMIN_KEY, ROUTER, NoAnswerError, RouterRefusedError, answer_of

if TYPE_CHECKING:
    from rich.console import Console

_EVERY_S: Final = 1.0
_SHOWN: Final = ("totals", "replicas", "requests", "ttft", "sessions")


@click.command(short_help="Watch a running router in the terminal.")
@ROUTER
@ADMIN_KEY
@click.option("--once", is_flag=True, help="Print one frame, for scripts, and stop.")
def top(url: str, admin_key: str | None, once: bool) -> None:
    """Watch a running router: its fleet and tiers, and the last requests.

    The same as the page at /ui, once a second. Ctrl-C ends it.
    """
    # rich takes a while to import; no other command needs it.
    from rich.console import Console  # noqa: PLC0415

    from router.cli.top_frame import frame  # noqa: PLC0415

    console = Console()
    state = _state(url, admin_key)
    if once:
        console.print(frame(state, url))
    else:
        _watch(console, url, admin_key, state)


def _state(url: str, key: str | None) -> dict[str, Any]:
    """Return the router's state; raise as `answer_of` does."""
    state = answer_of(url, "/ui/state", key=key)
    if missing := [name for name in _SHOWN if name not in state]:
        told = f"what answers at {url} is no router, or of another version: it tells no"
        raise RouterRefusedError(f"{told} {', '.join(missing)}")
    return state


def _watch(console: "Console", url: str, key: str | None, state: dict[str, Any]) -> None:
    """Show one state after another until Ctrl-C; of a router that is gone, the last one."""
    from rich.live import Live  # noqa: PLC0415

    from router.cli.top_frame import frame  # noqa: PLC0415

    problem = None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                shown = frame(state, url, lines=console.height, problem=problem)
                live.update(shown, refresh=True)
                time.sleep(_EVERY_S)
                try:
                    state, problem = _state(url, key), None
                except NoAnswerError as error:
                    problem = error.message
    except KeyboardInterrupt:
        pass
