"""The page at ``/ui``: what the fleet holds and does, in a browser, and as JSON for programs.

`Recent` reads each request's record and keeps what lately was: the last requests, and figures of
15 minutes. `Page.state` answers ``GET /ui/state`` with that and with the fleet as it is now;
``warmroute top`` shows the same in a terminal. `FILES` are the page's own, from ``static/``,
served to anyone: they hold no data.

Called by the application. Imports http, residency, fleet and record.
"""

from router.ui.page import FILES, Page
from router.ui.recent import Recent

__all__ = ["FILES", "Page", "Recent"]
