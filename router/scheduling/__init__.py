"""Where requests go, and when: filter, scorer, picker, admission. Decides from a `Fleet`."""

from router.scheduling.admission import AdmissionController, AdmissionQueue, Admitted
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler
from router.scheduling.scorer import ReservedWork

__all__ = [
    "AdmissionController",
    "AdmissionQueue",
    "Admitted",
    "PlacementRequest",
    "RequestScheduler",
    "ReservedWork",
]
