"""The interface of a rule, and what several rules share.

That is: requests in flight by replica with their prefill, and prompts as sequences of blocks that
each stand for all blocks before them. Pure: no clock, no I/O; randomness is given at the start.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.index.prompt_keys import KvTier


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request to be placed. Blocks are numbers: equal numbers, equal text up to their end."""

    id: int
    blocks: Sequence[int]
    """Keys of the prompt's full blocks, first to last; each stands for all before it, too."""
    block_tokens: int
    prompt_tokens: int
    session: str | None
    """What the client sends as its session's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMetrics:
    """What a replica's own `/metrics` says, as of its last scrape."""

    waiting: int = 0
    """Requests in its queue."""
    running: int = 0
    kv_used: float = 0.0
    """Share of the GPU's KV cache that requests hold, from 0 to 1."""


class Rule(Protocol):
    """One router's rule over a fleet of replicas numbered from 0; healthy ones only are offered."""

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Return the replica that gets a request, and count it as sent there."""

    def first_token(self, request_id: int, now_s: float) -> None:
        """Note the first token of an answer that is streamed; of others there is none."""

    def finished(self, request_id: int, now_s: float) -> None:
        """Note the end of an answer, whole or not."""

    def stored(self, replica: int, tier: KvTier, blocks: Sequence[int]) -> None:
        """Note that a replica's KV events say that a tier holds these blocks now."""

    def removed(self, replica: int, tier: KvTier, blocks: Sequence[int]) -> None:
        """Note that a replica's KV events say that a tier does not hold these blocks any more."""

    def cleared(self, replica: int) -> None:
        """Note that a replica has restarted, and holds nothing."""

    def scraped(self, replica: int, metrics: ReplicaMetrics, now_s: float) -> None:
        """Note what a replica's metrics say."""


class InFlight:
    """Requests in flight, and the prompt tokens of theirs that are still to be prefilled."""

    def __init__(self, replicas: int) -> None:
        self.requests = [0] * replicas
        self.prefill_tokens = [0] * replicas
        self._sent: dict[int, tuple[int, int]] = {}

    def sent(self, request_id: int, replica: int, prefill_tokens: int = 0) -> None:
        """Count a request as sent to a replica, with the tokens that it must prefill for it."""
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
    """Base of the rules: they count their requests, and need no reports of the replicas."""

    def __init__(self, replicas: int) -> None:
        self.in_flight = InFlight(replicas)

    def first_token(self, request_id: int, now_s: float) -> None:
        """Release a request's prefill: its prompt is computed."""
        self.in_flight.prefilled(request_id)

    def finished(self, request_id: int, now_s: float) -> None:
        """Release a request."""
        self.in_flight.finished(request_id)

    def stored(self, replica: int, tier: KvTier, blocks: Sequence[int]) -> None:
        """Do nothing: the rule takes no KV events."""

    def removed(self, replica: int, tier: KvTier, blocks: Sequence[int]) -> None:
        """Do nothing: the rule takes no KV events."""

    def cleared(self, replica: int) -> None:
        """Do nothing: the rule takes no KV events."""

    def scraped(self, replica: int, metrics: ReplicaMetrics, now_s: float) -> None:
        """Do nothing: the rule reads no metrics."""


class Prompts:
    """Some prompts, and how far another one goes along with any of them."""

    def __init__(self) -> None:
        self._prompts: dict[int, Sequence[int]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, number: int, blocks: Sequence[int]) -> None:
        """Take a prompt in."""
        self._prompts[number] = blocks

    def remove(self, number: int) -> None:
        """Take a prompt out."""
        del self._prompts[number]

    def shared(self, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks one of the prompts has, at most."""
        depth = 0
        for prompt in self._prompts.values():
            most = min(len(prompt), len(blocks))
            if depth < most and prompt[depth] == blocks[depth]:
                depth = _split(prompt, blocks, depth + 1, most)
        return depth


class Expectations:
    """Prompts that replicas are taken to hold for some seconds after they were sent them."""

    def __init__(self, replicas: int, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._prompts = [Prompts() for _ in range(replicas)]
        self._sent: deque[tuple[float, int, int]] = deque()
        self._number = 0

    def sent(self, replica: int, blocks: Sequence[int], now_s: float) -> None:
        """Expect a replica to hold a prompt."""
        self._number += 1
        self._prompts[replica].add(self._number, blocks)
        self._sent.append((now_s + self._ttl_s, replica, self._number))

    def depth(self, replica: int, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks a replica is taken to hold."""
        return self._prompts[replica].shared(blocks)

    def expire(self, now_s: float) -> None:
        """Forget what is too old."""
        while self._sent and self._sent[0][0] <= now_s:
            _, replica, number = self._sent.popleft()
            self._prompts[replica].remove(number)


class ActivePrompts:
    """The prompts in flight on a replica, and how many blocks they are, shared ones once."""

    def __init__(self) -> None:
        self.blocks = 0
        self._prompts = Prompts()

    def blocks_with(self, blocks: Sequence[int]) -> int:
        """Return how many blocks there would be with one more prompt."""
        return self.blocks + len(blocks) - self._prompts.shared(blocks)

    def add(self, number: int, blocks: Sequence[int]) -> None:
        """Take a prompt in."""
        self.blocks = self.blocks_with(blocks)
        self._prompts.add(number, blocks)

    def remove(self, number: int, blocks: Sequence[int]) -> None:
        """Take a prompt out, and the blocks that no other one has."""
        self._prompts.remove(number)
        self.blocks -= len(blocks) - self._prompts.shared(blocks)


def _split(one: Sequence[int], other: Sequence[int], shared: int, most: int) -> int:
    """Return where two prompts part, after `shared` blocks in common, up to `most`."""
    return bisect_left(range(most), True, lo=shared, key=lambda at: one[at] != other[at])
