"""A request's record as one line for a person."""

from router.record.records import Outcome, RequestRecord


def text_line(record: RequestRecord) -> str:
    """Return what is known of a request, as one line."""
    matched = ",".join(f"{tier}:{count}" for tier, count in record.matched_tokens.items() if count)
    tries = ",".join(f"{each.replica_id}:{each.cause}" for each in record.failed_tries)
    parts = {
        "key": record.key,
        "status": record.status,
        "outcome": None if record.outcome is Outcome.OK else record.outcome,
        "replica": record.replica_id,
        "reason": record.reason,
        "prompt_tokens": record.prompt_tokens,
        "matched": matched or None,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "prefetch": record.prepared.prefetch,
        "copy": record.prepared.copy,
        "held_ms": _ms(record.held_s or None),
        "ttft_ms": _ms(record.ttft_s),
        "predicted_ms": _ms(record.predicted_ttft_s),
        "total_ms": _ms(record.total_s),
        "failed_tries": tries or None,
        "retry_wait_ms": _ms(record.retry_wait_s),
        "error": None if record.error is None else repr(record.error),
        "id": record.request_id,
    }
    told = " ".join(f"{name}={value}" for name, value in parts.items() if value is not None)
    return f"{record.path or record.endpoint} {told}"


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.0f}"
