"""Records of requests that tests put together."""

from typing import Any

from router.fleet.decision import Reason
from router.index.prompt_keys import KvTier
from router.record.records import Outcome, RequestRecord


def ended(at_s: float, **known: Any) -> RequestRecord:
    """Return the record of a request of 100 tokens that took a second and ended at a time."""
    said: dict[str, Any] = {
        "request_id": "r",
        "endpoint": "/v1/chat/completions",
        "started_s": at_s - 1.0,
        "ended_s": at_s,
        "replica_id": "one",
        "reason": Reason.LONGEST_MATCH,
        "prompt_tokens": 100,
        "outcome": Outcome.OK,
        "status": 200,
        "streamed": True,
    }
    said |= known
    ttft_s = said.pop("ttft_s", 0.5)
    return RequestRecord(first_byte_s=said["started_s"] + ttft_s, **said)


def matched(gpu: int = 0, cpu: int = 0) -> dict[KvTier, int]:
    """Return matched tokens by tier."""
    return {KvTier.GPU: gpu, KvTier.CPU: cpu}
