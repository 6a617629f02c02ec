"""What a crowd has shown, judged, for people and as JSON. Pure."""

import math
from typing import Any, Final

from bench.crowds.rounds import Crowded
from bench.proof.statistics import Estimate, ratio

MOST_RATIO: Final = 1.10
"""Of the others' p99 with a crowd to that without."""
_MIB: Final = 1 << 20


def p99_ratio(found: Crowded) -> Estimate:
    """Return p99 with the crowd over that without, paired by round."""
    estimate = ratio(found.crowded_p99_s, found.alone_p99_s)
    assert estimate is not None
    return estimate


def verdicts(found: Crowded) -> dict[str, bool]:
    """Return what must hold, and whether it does."""
    grown = found.with_bytes - found.before_bytes
    unread = not found.kind.reads
    return {
        "the crowd was there": found.open_files >= found.connections
        and (found.sent_bytes > 0) == unread,
        "p99 within 10%": p99_ratio(found).value <= MOST_RATIO,
        "memory bounded": grown <= found.connections * found.kind.most_bytes,
        "nothing in flight at the end": not found.in_flight,
        "no traceback in the log": not found.bad_lines,
    }


def holds(found: Crowded) -> bool:
    """Whether all holds that must."""
    return all(verdicts(found).values())


def line(found: Crowded) -> str:
    """Return a crowd's result as a line."""
    estimate = p99_ratio(found)
    failed = [what for what, does in verdicts(found).items() if not does]
    return (
        f"{found.connections} {found.kind.what}: others' p99 times {estimate.value:.3f} "
        f"({estimate.low:.3f} to {estimate.high:.3f}), memory {found.before_bytes / _MIB:.0f} MiB "
        f"before, {found.with_bytes / _MIB:.0f} with, {found.after_bytes / _MIB:.0f} after; "
        f"{found.closed} closed, {found.sent_bytes / _MIB:.0f} MiB sent and not read; "
        f"{'FAILS: ' + ', '.join(failed) if failed else 'holds'}"
    )


def as_json(found: Crowded) -> dict[str, Any]:
    """Return a crowd's result, ready for JSON."""
    estimate = p99_ratio(found)
    interval = [estimate.low, estimate.high]
    return {
        "crowd": found.kind.name,
        "what": found.kind.what,
        "connections": found.connections,
        "holds": holds(found),
        "verdicts": verdicts(found),
        "p99_ratio": round(estimate.value, 4),
        "p99_ratio_95": [round(each, 4) if math.isfinite(each) else None for each in interval],
        "alone_p99_ms": [round(1e3 * each, 3) for each in found.alone_p99_s],
        "crowded_p99_ms": [round(1e3 * each, 3) for each in found.crowded_p99_s],
        "memory_mib": {
            "before": round(found.before_bytes / _MIB, 1),
            "with": round(found.with_bytes / _MIB, 1),
            "after": round(found.after_bytes / _MIB, 1),
        },
        "bytes_each": round((found.with_bytes - found.before_bytes) / found.connections),
        "most_bytes_each": found.kind.most_bytes,
        "open_files": found.open_files,
        "closed": found.closed,
        "sent_unread_bytes": found.sent_bytes,
        "in_flight_at_the_end": found.in_flight,
        "bad_lines": found.bad_lines[:5],
    }
