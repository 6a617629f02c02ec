"""Starting a router with its replicas on one machine, and stopping them together."""

from router.launch.fleet_file import load_any, load_fleet_file
from router.launch.processes import ChildFailedError
from router.launch.up import commands_text
from router.launch.up import run as run_fleet

__all__ = [
    "ChildFailedError",
    "commands_text",
    "load_any",
    "load_fleet_file",
    "run_fleet",
]
