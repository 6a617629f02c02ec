"""Starting a router with its replicas on one machine, and ending them.

`fleet_file` plans the processes of a fleet's file (`plan`), with an Envoy in front if that is
asked for (`gateway`). `run_fleet` starts them and restarts none:
where one ends, all are ended. `processes` has groups of child processes, none of which is left
running.

Called by the command line (and by the benchmarks). Imports config and envoy.
"""

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
