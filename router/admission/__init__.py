"""Requests that wait in the router, because every replica is busy enough.

`Gate` decides which requests are admitted, in which order, and when waiting is over (no clock,
no I/O); `Admission` drives it by the event loop and gives a request its ticket, or raises
`router.config.OverloadedError`.

Called by proxy. Imports config, latency and fleet.
"""

from router.admission.async_gate import Admission
from router.admission.gate import Admitted, Gate

__all__ = [
    "Admission",
    "Admitted",
    "Gate",
]
