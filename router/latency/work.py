"""What a request asks of a replica, and what that is predicted to take.

Pure: no clock, no I/O.
"""

from dataclasses import dataclass, replace
from enum import IntEnum


class Part(IntEnum):
    """What has a rate of its own, and what a unit of it is."""

    BASE = 0
    """A request."""
    PREFILL = 1
    """A token to prefill."""
    ATTENTION = 2
    """A token to prefill, times a token of its context."""
    DECODE = 3
    """A token to prefill, times a decode running beside it."""
    LOAD = 4
    """A byte, from CPU RAM to the GPU."""
    DISK = 5
    """A byte, to CPU RAM; likewise the next two."""
    REMOTE = 6
    PEER = 7


@dataclass(slots=True, kw_only=True)  # not frozen: many are made for each decision
class Work:
    """What a request asks of one replica."""

    new_tokens: int
    """To prefill."""
    matched_tokens: int = 0
    """Their context: already cached in some tier."""
    load_bytes: float = 0.0
    """Matched beyond the GPU."""
    disk_bytes: float = 0.0
    remote_bytes: float = 0.0
    peer_bytes: float = 0.0
    """To be copied from another replica."""
    queue_s: float = 0.0
    """Until the replica gets to it."""
    backlog_s: float = 0.0
    """Until it has fetched what it was told to fetch before."""
    decoding: int = 0
    """Decodes running there: their steps lengthen a prefill's."""
    reads_late: bool = False
    """Whether the replica cannot be told to fetch before it gets to the request: it does then,
    and that takes its time like loading."""

    @property
    def attended(self) -> float:
        """New tokens times the mean context that each attends to."""
        return self.new_tokens * (self.matched_tokens + self.new_tokens / 2)

    def with_cached(self, cached_tokens: int, kv_bytes_per_token: float) -> "Work":
        """Return what a request asked in truth, now that its cached tokens are known.

        Matched tokens that were not there are missing from the end: those to be
        copied first, then those of the slowest tiers.
        """
        prompt_tokens = self.new_tokens + self.matched_tokens
        matched = min(cached_tokens, prompt_tokens - 1)
        lost_bytes = max(0, self.matched_tokens - matched) * kv_bytes_per_token
        left_to_lose = lost_bytes
        left: list[float] = []
        for nbytes in (self.peer_bytes, self.remote_bytes, self.disk_bytes):
            left.append(max(0.0, nbytes - left_to_lose))
            left_to_lose = max(0.0, left_to_lose - nbytes)
        peer_bytes, remote_bytes, disk_bytes = left
        return replace(
            self,
            new_tokens=prompt_tokens - matched,
            matched_tokens=matched,
            load_bytes=max(0.0, self.load_bytes - lost_bytes),
            disk_bytes=disk_bytes,
            remote_bytes=remote_bytes,
            peer_bytes=peer_bytes,
        )


@dataclass(slots=True, kw_only=True)  # not frozen: many are made for each decision
class Cost:
    """The predicted parts of a time to first token."""

    base_s: float
    queue_s: float
    backlog_s: float
    """Before the fetch; 0 where there is nothing to fetch."""
    fetch_s: float
    load_s: float
    prefill_s: float

    @property
    def busy_s(self) -> float:
        """The replica's time that the request takes from those behind it."""
        return self.load_s + self.prefill_s

    @property
    def fetched_s(self) -> float:
        """Until all KV is in CPU RAM."""
        return self.backlog_s + self.fetch_s

    @property
    def queued_s(self) -> float:
        """What the queue has of the time to first token: nothing where a longer fetch hides it."""
        return 0.0 if self.fetched_s > self.queue_s else self.queue_s

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token; the fetch overlaps the queue."""
        return self.base_s + max(self.queue_s, self.fetched_s) + self.busy_s
