"""Dynamo's rule: least prefill to do and blocks to decode with."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.discrete.rules.kv_index import KvInformedRule, Runs, reach
from bench.discrete.rules.prompts import ActivePrompts, Expectations
from bench.discrete.rules.rule import Asked
from router.index.prompt_keys import Tier


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
        ends = [max(reach(runs, self.index.bits(replica, Tier.GPU)), expected)]
        for tier in (Tier.CPU, Tier.DISK, Tier.REMOTE):
            ends.append(reach(runs, self.index.bits(replica, tier), ends[-1]))
        device, host, _, last = ends
        weights = self._weights
        return device + weights.host_credit * (host - device) + weights.disk_credit * (last - host)
