"""What a router knows of its own requests: how many are in flight where, and their prefill."""

from collections.abc import Sequence

from bench.discrete.rules.rule import ReplicaMetrics
from router.index.prompt_keys import Tier


class InFlight:
    """Requests in flight, and the prompt tokens of theirs that are still to be prefilled."""

    def __init__(self, replicas: int) -> None:
        self.requests = [0] * replicas
        self.prefill_tokens = [0] * replicas
        self._sent: dict[int, tuple[int, int]] = {}

    def sent(self, request_id: int, replica: int, prefill_tokens: int = 0) -> None:
        """Count a request as sent to a replica that has so much to prefill for it."""
        self.requests[replica] += 1
        self.prefill_tokens[replica] += prefill_tokens
        self._sent[request_id] = (replica, prefill_tokens)

    def prefilled(self, request_id: int) -> None:
        """Release a request's prefill."""
        if request_id in self._sent:
            replica, tokens = self._sent[request_id]
            self.prefill_tokens[replica] -= tokens
            self._sent[request_id] = (replica, 0)

    def finished(self, request_id: int) -> None:
        """Release a request, and what of its prefill is still counted."""
        if request_id in self._sent:
            replica, tokens = self._sent.pop(request_id)
            self.requests[replica] -= 1
            self.prefill_tokens[replica] -= tokens

    def least(self, healthy: Sequence[int]) -> int:
        """Return the first of the replicas with the fewest requests."""
        return min(healthy, key=self.requests.__getitem__)


class CountingRule:
    """What rules have in common: they count their requests, and need not hear the replicas."""

    def __init__(self, replicas: int) -> None:
        self.in_flight = InFlight(replicas)

    def first_token(self, request_id: int, now_s: float) -> None:
        """Release a request's prefill: its prompt is computed."""
        self.in_flight.prefilled(request_id)

    def finished(self, request_id: int, now_s: float) -> None:
        """Release a request."""
        self.in_flight.finished(request_id)

    def stored(self, replica: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Do nothing: the rule takes no KV events."""

    def removed(self, replica: int, tier: Tier, blocks: Sequence[int]) -> None:
        """Do nothing: the rule takes no KV events."""

    def cleared(self, replica: int) -> None:
        """Do nothing: the rule takes no KV events."""

    def scraped(self, replica: int, metrics: ReplicaMetrics, now_s: float) -> None:
        """Do nothing: the rule reads no metrics."""
