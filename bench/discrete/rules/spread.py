"""Rules that know nothing of caches: by load, in turn, by the client's session."""

import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from bench.discrete.rules.in_flight import CountingRule
from bench.discrete.rules.rule import Asked


class PowerOfTwo(CountingRule):
    """Of two replicas drawn by chance, the one with fewer requests in flight.

    vllm-router 0.1.17, `src/policies/power_of_two.rs`; equal load goes to the first drawn.
    """

    def __init__(self, replicas: int, *, seed: int) -> None:
        super().__init__(replicas)
        self._chooser = random.Random(seed)

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Draw two and send to the less loaded."""
        drawn = self._chooser.sample(list(healthy), min(2, len(healthy)))
        replica = self.in_flight.least(drawn)
        self.in_flight.sent(asked.id, replica)
        return replica


class RoundRobin(CountingRule):
    """One after the other: vllm-router 0.1.17, `src/policies/round_robin.rs`."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._picks = 0

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send to the next one."""
        replica = healthy[self._picks % len(healthy)]
        self._picks += 1
        self.in_flight.sent(asked.id, replica)
        return replica


class LeastLoaded(CountingRule):
    """The fewest requests in flight, equal ones in turn: as nginx's `least_conn` does.

    nginx, `ngx_http_upstream_module`, directive `least_conn`, servers of equal weight.
    """

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._replicas = replicas
        self._last = -1

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send to the least loaded that is next in turn."""
        replica = min(
            healthy,
            key=lambda each: (
                self.in_flight.requests[each],
                (each - self._last - 1) % self._replicas,
            ),
        )
        self._last = replica
        self.in_flight.sent(asked.id, replica)
        return replica


class ConsistentHash(CountingRule):
    """A ring of hashes: a session's next point on it, or that of a body without a session.

    vllm-router 0.1.17, `src/policies/consistent_hash.rs`, `docs/load_balancing/README.md`;
    where that replica is not healthy, the first healthy one.
    """

    def __init__(self, replicas: int, *, virtual_nodes: int = 160) -> None:
        """Give each replica so many points on the ring."""
        super().__init__(replicas)
        self._ring = sorted(
            (_hash(f"{replica}:{point}"), replica)
            for replica in range(replicas)
            for point in range(virtual_nodes)
        )

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send to the replica whose point is next."""
        at = bisect_left(self._ring, (_hash(_affinity(asked)), 0)) % len(self._ring)
        target = self._ring[at][1]
        replica = target if target in healthy else healthy[0]
        self.in_flight.sent(asked.id, replica)
        return replica


class StickyLeastLoaded(CountingRule):
    """A new session goes to the replica with the fewest sessions, and stays there.

    vllm-router 0.1.17, `src/policies/sticky_least_loaded.rs`: load is the sessions that were
    heard of within `ttl_s`; equal load goes by rendezvous hashing. Its sweep for old ones
    comes once a minute at most.
    """

    def __init__(self, replicas: int, *, ttl_s: float = 7200.0, sweep_s: float = 60.0) -> None:
        """Forget sessions after `ttl_s`, seen to every `sweep_s`."""
        super().__init__(replicas)
        self.sessions = [0] * replicas
        self._ttl_s = ttl_s
        self._sweep_s = sweep_s
        self._swept_s = 0.0
        self._homes: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Replica and last request of each session, longest unheard of first."""

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send to the session's replica, or to the one with the fewest sessions."""
        self._sweep(now_s)
        replica = self._home(asked.session, healthy, now_s)
        if replica is None:
            replica = self._fewest(_affinity(asked), healthy)
        if asked.session is not None:
            self._homes[asked.session] = (replica, now_s)
            self.sessions[replica] += 1
        self.in_flight.sent(asked.id, replica)
        return replica

    def _home(self, session: str | None, healthy: Sequence[int], now_s: float) -> int | None:
        """Return the replica that a session can stay with, and take the session out."""
        if session is None or session not in self._homes:
            return None
        replica, heard_s = self._homes.pop(session)
        self.sessions[replica] -= 1
        return replica if replica in healthy and now_s - heard_s < self._ttl_s else None

    def _fewest(self, key: str, healthy: Sequence[int]) -> int:
        return min(healthy, key=lambda each: (self.sessions[each], -_hash(f"{key}@{each}")))

    def _sweep(self, now_s: float) -> None:
        if now_s - self._swept_s < self._sweep_s:
            return
        self._swept_s = now_s
        while self._homes:
            session, (replica, heard_s) = next(iter(self._homes.items()))
            if now_s - heard_s < self._ttl_s:
                return
            del self._homes[session]
            self.sessions[replica] -= 1


def _affinity(asked: Asked) -> str:
    """Return what tells a request's session, or else its body."""
    if asked.session is not None:
        return asked.session
    return f"{asked.blocks[-1] if asked.blocks else ''}:{asked.prompt_tokens}"


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
