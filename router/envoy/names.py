"""Names by which Envoy and picker know what they tell each other."""

from typing import Final

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Of a header, and in `LB_METADATA`: where the request goes (endpoint picker protocol)."""
SUBSET: Final = "x-gateway-destination-endpoint-subset"
"""Of a header, and in `SUBSET_METADATA`: the endpoints to choose from."""
SUBSET_METADATA: Final = "envoy.lb.subset_hint"
SERVED: Final = "x-gateway-destination-endpoint-served"
"""In `LB_METADATA`: the endpoint that answered."""
LB_METADATA: Final = "envoy.lb"

# --- between the picker and an Envoy with our own configuration

HINT: Final = "x-picker-subset-hint"
"""Header of a question: what `SUBSET_METADATA` says, a list as JSON."""
MAX_RETRIES: Final = "x-envoy-max-retries"
"""Header of an answer, for the request: no more retries than there are destinations."""
EXCHANGE: Final = "x-picker-exchange"
"""Header of an answer: the name of the exchange, which the access log repeats."""
REPLICAS: Final = "x-picker-replicas"
"""Header of an answer: the replicas' ids in the order of the destinations, a tab between two."""
STATUS: Final = "x-picker-status"
"""Header of a refusal: its status, where Envoy would take that for a picker that has failed."""
TOLD_HEADERS: Final = "x-warmroute-"
"""What headers begin with by which an answer tells of the decision."""

ASKED_METADATA: Final = "envoy.filters.http.ext_authz"
"""Envoy's dynamic metadata of the filter that asks: what was answered, by headers' names."""
OWN_METADATA: Final = "warmroute"
"""Envoy's dynamic metadata of its script."""
ENVELOPE: Final = "envelope"
"""In `OWN_METADATA`: ``id`` and ``usage`` of an answer, as JSON."""
KIND: Final = "content-type"
"""The answer's header, which the access log repeats."""
FIRST_BYTE_US: Final = "first_byte_us"
"""Tag of the access log: when the answer's first byte came, after the request's last one."""
