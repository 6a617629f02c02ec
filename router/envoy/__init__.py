"""The configuration of an Envoy that carries the requests, and asks the picker where they go.

`configuration` makes it, and an operator's own file is merged into it (`merge`): TLS, limits and
retries are Envoy's to do, in Envoy's own words. What Envoy and picker tell each other has its
names in `names`.

One call of the picker a request, with one message either way, is all that a prompt costs: how it
was answered Envoy tells by its access log, many requests in one message (`answers`).

Called by launch, picker and the command line. Imports config.
"""

from router.envoy.bootstrap import configuration, program
from router.envoy.merging import merge
from router.envoy.names import (
    ANSWER_HEADERS,
    DESTINATION,
    ENVELOPE,
    EXCHANGE,
    FIRST_BYTE_MS,
    HEADER_ATTRIBUTE,
    LB_METADATA,
    MARK,
    MAX_RETRIES,
    OWN_METADATA,
    REPLICAS,
    SERVED,
    SUBSET,
    SUBSET_METADATA,
)

__all__ = [
    "ANSWER_HEADERS",
    "DESTINATION",
    "ENVELOPE",
    "EXCHANGE",
    "FIRST_BYTE_MS",
    "HEADER_ATTRIBUTE",
    "LB_METADATA",
    "MARK",
    "MAX_RETRIES",
    "OWN_METADATA",
    "REPLICAS",
    "SERVED",
    "SUBSET",
    "SUBSET_METADATA",
    "configuration",
    "merge",
    "program",
]
