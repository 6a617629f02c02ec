"""``warmroute top``: the data of the page at ``/ui``, in a terminal."""

import time
from typing import TYPE_CHECKING, Any, Final

import click

from router.cli.router_client import (
    NoAnswerError,
    RouterClient,
    RouterRefusedError,
    asks_router,
)

if TYPE_CHECKING:
    from rich.console import Console

_EVERY_S: Final = 1.0
_SHOWN: Final = ("totals", "replicas", "requests", "ttft", "sessions")


@click.command(short_help="Watch a running router in the terminal.")
@asks_router
@click.option("--once", is_flag=True, help="Print one frame and stop, for scripts.")
def top(router: RouterClient, once: bool) -> None:
    """Watch a running router: replicas, tiers, and the latest requests.

    Shows the same data as the page at /ui, once a second. Ctrl-C ends it.
    """
    # rich is slow to import, and no other command needs it.
    from rich.console import Console  # noqa: PLC0415

    from router.cli.top_frame import frame  # noqa: PLC0415

    console = Console()
    state = _state(router)
    if once:
        console.print(frame(state, router.url))
    else:
        _watch(console, router, state)


def _state(router: RouterClient) -> dict[str, Any]:
    """Return the router's state; raise as `RouterClient.ask` does."""
    state = router.ask("/ui/state")
    if missing := [name for name in _SHOWN if name not in state]:
        raise RouterRefusedError(
            f"the server at {router.url} is not a Warmroute router, or is another version: its "
            f"answer has no {', '.join(missing)}"
        )
    return state


def _watch(console: "Console", router: RouterClient, state: dict[str, Any]) -> None:
    """Show each state until Ctrl-C. If the router is gone, keep showing the last one."""
    from rich.live import Live  # noqa: PLC0415

    from router.cli.top_frame import frame  # noqa: PLC0415

    problem = None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                shown = frame(state, router.url, lines=console.height, problem=problem)
                live.update(shown, refresh=True)
                time.sleep(_EVERY_S)
                try:
                    state, problem = _state(router), None
                except NoAnswerError as error:
                    problem = error.message
    except KeyboardInterrupt:
        pass
