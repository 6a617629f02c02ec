"""The ``warmroute`` command."""

from router.cli.commands import main

__all__ = ["main"]
