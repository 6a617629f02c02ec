"""Where a request belongs in a trace: the W3C's ``traceparent``, read and written."""

import random
import re
from dataclasses import dataclass, replace
from typing import Final

_HEADER: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_UNKNOWN_VERSION: Final = "ff"
_FIRST_VERSION: Final = "00"
_SAMPLED: Final = 1
_RATIO_BITS: Final = 64
"""A trace's lower bits decide whether it is sampled, as in OpenTelemetry's own sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A request's place in its trace."""

    trace_id: str
    """32 hex digits."""
    parent_id: str | None = None
    """The client's span, if it sent one; 16 hex digits, as below."""
    span_id: str | None = None
    """The router's own span; None where the router makes none."""
    is_sampled: bool = False

    def header(self, span_id: str) -> str:
        """Return the ``traceparent`` for what a span of the router's asks."""
        return f"{_FIRST_VERSION}-{self.trace_id}-{span_id}-{int(self.is_sampled):02x}"


def trace_context(traceparent: str | None, sample_ratio: float | None) -> TraceContext | None:
    """Return the place of a request that came with this header.

    ``sample_ratio`` is that of requests without one, None where the router makes no spans:
    then there is only the client's. A header that is not one counts as none.
    """
    sent = None if traceparent is None else _parsed(traceparent)
    if sample_ratio is None:
        return sent
    if sent is not None:
        return replace(sent, span_id=new_span_id())
    trace = random.getrandbits(128) or 1
    is_sampled = trace % (1 << _RATIO_BITS) < sample_ratio * (1 << _RATIO_BITS)
    return TraceContext(trace_id=f"{trace:032x}", span_id=new_span_id(), is_sampled=is_sampled)


def new_span_id() -> str:
    """Return the id of a new span."""
    return f"{random.getrandbits(64) or 1:016x}"


def _parsed(traceparent: str) -> TraceContext | None:
    found = _HEADER.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    is_wrong = version == _UNKNOWN_VERSION or (version == _FIRST_VERSION and more is not None)
    if is_wrong or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    is_sampled = bool(int(flags, 16) & _SAMPLED)
    return TraceContext(trace_id=trace_id, parent_id=parent_id, is_sampled=is_sampled)
