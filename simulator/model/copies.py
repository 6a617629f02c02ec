"""Copies of KV between a GPU and its CPU RAM, and when each has come. Pure."""

from collections import deque
from collections.abc import Sequence

from simulator.model.lower_tiers import LowerTiers
from simulator.model.rates import Rates, Shape
from simulator.model.request import SimRequest


class Copies:
    """One replica's loads and stores: each way one copy after another, at its own rate."""

    def __init__(self, shape: Shape, rates: Rates, tiers: LowerTiers) -> None:
        self.loading: list[tuple[float, SimRequest]] = []
        """Requests whose KV is on its way from CPU RAM, and when it will have come."""
        self._shape = shape
        self._rates = rates
        self._tiers = tiers
        self._load_free_s = 0.0
        self._storing: deque[tuple[float, Sequence[bytes]]] = deque()

    @property
    def are_under_way(self) -> bool:
        """Whether any goes on."""
        return bool(self.loading or self._storing)

    @property
    def next_load_s(self) -> float | None:
        """When the next load will have come."""
        return min((ready_s for ready_s, _ in self.loading), default=None)

    @property
    def next_store_s(self) -> float | None:
        """When the next store will have come."""
        return self._storing[0][0] if self._storing else None

    def begin_store(self, request: SimRequest, now_s: float) -> None:
        """Store what has become full of a request's computed tokens."""
        chunks = self._tiers.begin_store(request)
        if chunks:
            begin_s = max(now_s, self._storing[-1][0] if self._storing else now_s)
            tokens = len(chunks) * self._shape.chunk_tokens
            self._storing.append((begin_s + tokens / self._rates.store_tokens_per_s, chunks))

    def end_stores(self, now_s: float) -> None:
        """Make visible what has come to CPU RAM by now."""
        while self._storing and self._storing[0][0] <= now_s:
            self._tiers.end_store(self._storing.popleft()[1])

    def begin_load(self, request: SimRequest, tokens: int, now_s: float) -> None:
        """Load so many tokens that the tiers have found for a request."""
        self._tiers.begin_load(request)
        begin_s = max(now_s, self._load_free_s)
        self._load_free_s = begin_s + tokens / self._rates.load_tokens_per_s
        self.loading.append((self._load_free_s, request))

    def loaded(self, now_s: float) -> list[SimRequest]:
        """Return the requests whose KV has come by now; `end_load` must follow for each."""
        return [each for ready_s, each in self.loading if ready_s <= now_s]

    def end_load(self, request: SimRequest) -> None:
        """Forget a load that has come, or that nobody wants any more."""
        self.loading = [each for each in self.loading if each[1] is not request]
        self._tiers.end_load(request)

    def check(self) -> None:
        """Raise AssertionError if stores are not in the order of their ends."""
        assert [at_s for at_s, _ in self._storing] == sorted(at_s for at_s, _ in self._storing)
