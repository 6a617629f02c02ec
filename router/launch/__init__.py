"""Starting a router with its replicas on one machine, and ending them.

`run_fleet` starts what a fleet file describes and restarts nothing: where one process ends,
all are ended. `processes` has groups of child processes, none of which is left running.

Called by the command line (and by the benchmarks). Imports config.
"""

from router.launch.processes import ChildFailed
from router.launch.up import commands_text, load_any, load_fleet_file
from router.launch.up import run as run_fleet

__all__ = [
    "ChildFailed",
    "commands_text",
    "load_any",
    "load_fleet_file",
    "run_fleet",
]
