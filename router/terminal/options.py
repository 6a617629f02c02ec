"""Options of the commands that ask a running router."""

from typing import Final

import click

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
