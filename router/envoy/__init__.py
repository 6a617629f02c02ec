"""The configuration of an Envoy that carries the requests, and asks the picker where they go.

`configuration` makes it, and an operator's own file is merged into it (`merge`): TLS, limits and
retries are Envoy's to do, in Envoy's own words. What Envoy and picker tell each other has its
names in `names`.

One question by HTTP is all that a request costs the picker (`asking`): how it was answered Envoy
tells by its access log, many requests in one message (`answers`).

Called by launch, picker and the command line. Imports config.
"""

from router.envoy.bootstrap import configuration, program
from router.envoy.merging import merge
from router.envoy.names import (
    ASKED_METADATA,
    DESTINATION,
    ENVELOPE,
    EXCHANGE,
    FIRST_BYTE_US,
    HINT,
    KIND,
    LB_METADATA,
    MAX_RETRIES,
    OWN_METADATA,
    REPLICAS,
    SERVED,
    STATUS,
    SUBSET,
    SUBSET_METADATA,
)

__all__ = [
    "ASKED_METADATA",
    "DESTINATION",
    "ENVELOPE",
    "EXCHANGE",
    "FIRST_BYTE_US",
    "HINT",
    "KIND",
    "LB_METADATA",
    "MAX_RETRIES",
    "OWN_METADATA",
    "REPLICAS",
    "SERVED",
    "STATUS",
    "SUBSET",
    "SUBSET_METADATA",
    "configuration",
    "merge",
    "program",
]
