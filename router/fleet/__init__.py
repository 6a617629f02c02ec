"""All replicas, their sessions, and the decision of where a request goes.

`Fleet.place` returns a `Decision` for a prompt: `candidate` says what is minimized,
`assessment` makes the candidates, `policy` picks one, `placement` puts that together.
`Fleet.start` returns the `Ticket` of a request in flight, whose end is noted there. A
`Replica` has a state, a load and rates.

Called by admission, staging, feeds, proxy, doctor. Imports config, failures, residency and
latency; no I/O, times are passed in.
"""

from router.fleet.candidate import Candidate
from router.fleet.decision import Decision, KvCopy, Reason
from router.fleet.fleet import Fleet
from router.fleet.in_flight import Ticket
from router.fleet.replica import Replica, State

__all__ = [
    "Candidate",
    "Decision",
    "Fleet",
    "KvCopy",
    "Reason",
    "Replica",
    "State",
    "Ticket",
]
