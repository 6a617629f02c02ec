"""Finding replicas that the configuration's file does not name.

`Discovery` runs what the configuration asks for: names that are looked up (`dns`), a service that
the Kubernetes API tells of (`kubernetes`), agents that register (`registration`). Each tells
`Members` all that it knows of, whenever that may have changed; a source that cannot be asked
changes nothing.

Started by the application.
"""

from router.membership.discovery.discovery import Discovery

__all__ = ["Discovery"]
