"""vLLM router's rule by KV events, alone and with sessions that stay where they are."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from math import ceil
from types import MappingProxyType
from typing import Final

from bench.discrete.rules.kv_index import KvInformedRule, Runs, reach
from bench.discrete.rules.rule import Asked
from router.index.prompt_keys import Tier

LOWER_TIER_CREDITS: Final[Mapping[Tier, float]] = MappingProxyType(
    {Tier.CPU: 0.8, Tier.REMOTE: 0.6, Tier.DISK: 0.3}
)
"""What a block outside the GPU counts for, of one on it."""


class KvAware(KvInformedRule):
    """Least (prefill in flight + new prefill) x (requests in flight + 1); ties to the first.

    vllm-router 0.1.17, policy `kv_aware`, at its temperature of 0: as its program logs and
    decides when it is asked. A request's prefill is what its replica does not have of it;
    it is released with the first part of the body, or at the end of an answer that is not
    streamed. Of the tiers below the GPU, one counts: the one that goes on furthest from
    where the GPU's blocks end. The last token of a prompt is always computed.
    """

    def __init__(
        self, replicas: int, *, credits: Mapping[Tier, float] = LOWER_TIER_CREDITS
    ) -> None:
        """Take the router's credits of lower tiers, as shares of a block on the GPU."""
        super().__init__(replicas)
        self._credits = dict(credits)

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send a request to the least score."""
        runs = self.index.runs(asked.blocks)
        new_tokens = {each: self._new_tokens(asked, runs, each) for each in healthy}
        replica = min(healthy, key=lambda each: self._score(each, new_tokens[each]))
        self.in_flight.sent(asked.id, replica, new_tokens[replica])
        return replica

    def _score(self, replica: int, new_tokens: int) -> int:
        tokens = self.in_flight.prefill_tokens[replica] + new_tokens
        return tokens * (self.in_flight.requests[replica] + 1)

    def _new_tokens(self, asked: Asked, runs: Runs, replica: int) -> int:
        most = asked.prompt_tokens - 1
        on_gpu = reach(runs, self.index.bits(replica, Tier.GPU))
        depth = min(on_gpu, most // asked.block_tokens)
        blocks = depth + self._extension(runs, replica, depth)
        return ceil(asked.prompt_tokens - min(blocks * asked.block_tokens, most))

    def _extension(self, runs: Runs, replica: int, depth: int) -> float:
        """Return what the longest lower run is worth, in blocks on the GPU."""
        blocks, credit = max(
            (reach(runs, self.index.bits(replica, tier), depth) - depth, credit)
            for tier, credit in self._credits.items()
        )
        return blocks * credit


class KvAwareSessions(KvAware):
    """The same, but a session stays with its replica, however loaded, while that is healthy.

    vllm-router 0.1.17, `--kv-aware-session-affinity-ttl-secs` and the header `x-session-id`.
    A session is forgotten after so long without a request in flight.
    """

    def __init__(self, replicas: int, *, ttl_s: float = 3600.0) -> None:
        """Keep idle sessions for `ttl_s`: off by default, and no value is recommended."""
        super().__init__(replicas)
        self._ttl_s = ttl_s
        self._homes: dict[str, int] = {}
        self._flying: Counter[str] = Counter()
        self._session_of: dict[int, str] = {}
        self._idle_since_s: OrderedDict[str, float] = OrderedDict()

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send a request to its session's replica, or else to the least score."""
        self._expire(now_s)
        home = None if asked.session is None else self._homes.get(asked.session)
        at_home = [home] if home is not None and home in healthy else healthy
        replica = super().pick(asked, at_home, now_s)
        if asked.session is not None:
            self._homes[asked.session] = replica
            self._session_of[asked.id] = asked.session
            self._flying[asked.session] += 1
            self._idle_since_s.pop(asked.session, None)
        return replica

    def finished(self, request_id: int, now_s: float) -> None:
        """Release a request; its session is idle if it was the last one."""
        super().finished(request_id, now_s)
        session = self._session_of.pop(request_id, None)
        if session is None:
            return
        self._flying[session] -= 1
        if not self._flying[session]:
            del self._flying[session]
            self._idle_since_s[session] = now_s

    def _expire(self, now_s: float) -> None:
        while self._idle_since_s:
            session, since_s = next(iter(self._idle_since_s.items()))
            if now_s - since_s < self._ttl_s:
                return
            del self._idle_since_s[session], self._homes[session]
