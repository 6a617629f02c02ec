"""Which replicas the fleet has, and which settings it runs with, while both change.

`Members` puts together the sources that name replicas and has them join and leave the fleet; all
rooms that keep something of a replica are told. `discovery` finds replicas that the file does
not name. `Reload` reads the configuration's file again
when it has changed, or on SIGHUP, and applies what can change while the router runs.

Started by the application. Imports config, fleet and tasks.
"""

from router.membership.discovery import Discovery
from router.membership.members import Members, Source
from router.membership.reload import ConfigFile, Reload

__all__ = ["ConfigFile", "Discovery", "Members", "Reload", "Source"]
