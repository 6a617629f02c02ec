"""One request from its acceptance to the last byte of its answer.

`Proxy.handle` is the way of a request: read (`request`), placed and admitted, prepared
(staging), forwarded (`Upstream`), relayed, and recorded; with a retry at another replica
where nothing had been answered. `Bindings` remember which replica owns a stored response.

Called by the application. Imports config, http, prompt, residency, latency, fleet, admission,
staging and record.
"""

from router.proxy.proxy import Proxy
from router.proxy.request import PROMPTED, PROMPTLESS, json_object, parse
from router.proxy.response_owners import Bindings
from router.proxy.upstream import Upstream, client_session

__all__ = [
    "PROMPTED",
    "PROMPTLESS",
    "Bindings",
    "Proxy",
    "Upstream",
    "client_session",
    "json_object",
    "parse",
]
