"""Rules by KV events: vLLM router's, alone and with sessions that stay, and Dynamo's.

They know which replica holds which block in which tier. Dynamo's rule minimizes the prefill to
compute and the blocks to decode with.
"""

import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType
from typing import Final

from bench.discrete.rules.rule import ActivePrompts, Asked, CountingRule, Expectations
from router.index.prompt_keys import KvTier

Runs = Sequence[tuple[int, int]]
"""A prompt's blocks by holders: (tiers of replicas as bits, end of the run in blocks)."""


class KvIndex:
    """Blocks with the tiers that hold them, as bits; bounded by what the replicas hold."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._shifts = {tier: at * replicas for at, tier in enumerate(KvTier)}
        self._held: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def bits(self, replica: int, *tiers: KvTier) -> int:
        """Return the bits of a replica's tiers."""
        return sum(1 << (self._shifts[tier] + replica) for tier in tiers)

    def stored(self, replica: int, tier: KvTier, blocks: Sequence[int]) -> None:
        """Note that a tier holds blocks."""
        bit, held = self.bits(replica, tier), self._held
        for block in blocks:
            held[block] = held.get(block, 0) | bit

    def removed(self, replica: int, tier: KvTier, blocks: Sequence[int]) -> None:
        """Note that a tier does not hold blocks any more."""
        keep, held = ~self.bits(replica, tier), self._held
        for block in blocks:
            if left := held.get(block, 0) & keep:
                held[block] = left
            else:
                held.pop(block, None)

    def cleared(self, replica: int) -> None:
        """Note that a replica holds nothing in any tier."""
        keep = ~self.bits(replica, *self._shifts)
        self._held = {block: mask & keep for block, mask in self._held.items() if mask & keep}

    def runs(self, blocks: Sequence[int], at_least: int = 0) -> Runs:
        """Return a prompt's blocks by their holders, up to the first that nobody holds.

        Among the first `at_least` blocks, such a one does not end them.
        """
        runs: list[tuple[int, int]] = []
        last = -1
        for at, block in enumerate(blocks):
            mask = self._held.get(block, 0)
            if mask != last and at:
                runs.append((last, at))
            if not mask and at >= at_least:
                return runs
            last = mask
        if blocks:
            runs.append((last, len(blocks)))
        return runs


def reach(runs: Runs, bit: int, start: int = 0) -> int:
    """Return the end of an unbroken run, in blocks, of blocks with a bit from `start` on."""
    at = start
    for mask, end in runs:
        if end > start:
            if not mask & bit:
                break
            at = end
    return at


class KvInformedRule(CountingRule):
    """Base of the rules that take KV events of all tiers."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.index = KvIndex(replicas)

    def stored(self, replica: int, tier: KvTier, blocks: Sequence[int]) -> None:
        """Note that a tier holds blocks."""
        self.index.stored(replica, tier, blocks)

    def removed(self, replica: int, tier: KvTier, blocks: Sequence[int]) -> None:
        """Note that a tier does not hold blocks any more."""
        self.index.removed(replica, tier, blocks)

    def cleared(self, replica: int) -> None:
        """Note that a replica holds nothing."""
        self.index.cleared(replica)


LOWER_TIER_CREDITS: Final[Mapping[KvTier, float]] = MappingProxyType(
    {KvTier.CPU: 0.8, KvTier.REMOTE: 0.6, KvTier.DISK: 0.3}
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
        self, replicas: int, *, credits: Mapping[KvTier, float] = LOWER_TIER_CREDITS
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
        on_gpu = reach(runs, self.index.bits(replica, KvTier.GPU))
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
    A session is forgotten after this time without a request in flight.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoWeights:
    """Parameters of the router, at its defaults."""

    host_credit: float = 0.75
    """What a block in CPU memory counts for, of one on the GPU."""
    disk_credit: float = 0.25
    """The same of blocks on disk, and in a shared store."""
    prefill_scale: float = 1.0
    decode_active_requests: float = 0.0
    predicted_ttl_s: float | None = None
    """How long a request's blocks are taken as held where it was sent; None: not at all."""


class Dynamo(KvInformedRule):
    """Least prefill blocks to do, active ones and the prompt's own, plus blocks of decodes.

    Dynamo 1.3, its documentation's "Routing Concepts" and "Configuration and Tuning"
    (`docs/components/router/router-concepts.md`, `router-configuration.md`), and
    `lib/kv-router/src`: `scheduling/selector/default.rs`, `sequences/`. The tiers are a
    chain: host blocks count where those on the device end, disk blocks after these. Blocks
    of decodes are those of the prompts in flight, each counted once a replica. Its
    temperature is 0 by default: the least cost, equal ones by chance.
    """

    def __init__(self, replicas: int, *, seed: int, weights: DynamoWeights | None = None) -> None:
        """Take the router's defaults, and the seed of its ties."""
        super().__init__(replicas)
        self.active = [ActivePrompts() for _ in range(replicas)]
        self._sent: dict[int, tuple[int, Sequence[int]]] = {}
        self._weights = weights or DynamoWeights()
        self._chooser = random.Random(seed)
        self._expectations = Expectations(replicas, self._weights.predicted_ttl_s or 0.0)

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send a request to the least cost."""
        self._expectations.expire(now_s)
        expected = {each: self._expectations.depth(each, asked.blocks) for each in healthy}
        runs = self.index.runs(asked.blocks, max(expected.values()))
        credits = {each: self._credit(runs, each, expected[each]) for each in healthy}
        costs = {each: self._cost(asked, each, credits[each]) for each in healthy}
        least = min(costs.values())
        replica = self._chooser.choice([each for each in healthy if costs[each] == least])
        # Half a token is rounded up.
        cached_tokens = int(credits[replica] * asked.block_tokens + 0.5)
        self.in_flight.sent(asked.id, replica, asked.prompt_tokens - cached_tokens)
        self.active[replica].add(asked.id, asked.blocks)
        self._sent[asked.id] = (replica, asked.blocks)
        if self._weights.predicted_ttl_s is not None:
            self._expectations.sent(replica, asked.blocks, now_s)
        return replica

    def finished(self, request_id: int, now_s: float) -> None:
        """Release a request and its blocks."""
        super().finished(request_id, now_s)
        if request_id in self._sent:
            replica, blocks = self._sent.pop(request_id)
            self.active[replica].remove(request_id, blocks)

    def _cost(self, asked: Asked, replica: int, credit: float) -> float:
        """Return the cost of a request on a replica, in blocks."""
        to_prefill = self.in_flight.prefill_tokens[replica] + asked.prompt_tokens
        prefill = max(to_prefill / asked.block_tokens - credit, 0.0)
        decode = self.active[replica].blocks_with(asked.blocks)
        requests = self._weights.decode_active_requests * self.in_flight.requests[replica]
        return self._weights.prefill_scale * prefill + decode + requests

    def _credit(self, runs: Runs, replica: int, expected: int) -> float:
        """Return what a replica has of a prompt, in blocks on the device."""
        ends = [max(reach(runs, self.index.bits(replica, KvTier.GPU)), expected)]
        for tier in (KvTier.CPU, KvTier.DISK, KvTier.REMOTE):
            ends.append(reach(runs, self.index.bits(replica, tier), ends[-1]))
        device, host, _, last = ends
        weights = self._weights
        return device + weights.host_credit * (host - device) + weights.disk_credit * (last - host)
