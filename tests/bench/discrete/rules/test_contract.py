"""What every rule keeps to, whatever it goes by."""

import pickle
import random
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from bench.discrete.rules.catalogue import rules
from bench.discrete.rules.kv_aware import Dynamo
from bench.discrete.rules.rule import Asked, CountingRule, ReplicaMetrics, Rule
from router.index.prompt_keys import KvTier

REPLICAS = 4
# So large that the bounds of trees and tables, which are in tokens, are some 60 blocks.
BLOCK_TOKENS = 2**16
NAMES = sorted(rules(REPLICAS, BLOCK_TOKENS, 100, 1))


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest) -> Callable[[], Rule]:
    return rules(REPLICAS, BLOCK_TOKENS, 100, seed=5)[request.param]


class Traffic:
    """Requests of sessions that come, go on and end, and replicas that tell what they hold."""

    def __init__(self, rule: Rule, seed: int) -> None:
        self._rule = rule
        self._chooser = random.Random(seed)
        self._fresh = count(1)
        self._numbers = count()
        self._sessions = [self._new() for _ in range(12)]
        self._flying: list[int] = []
        self._held: list[tuple[int, KvTier, list[int]]] = []
        self._now_s = 0.0

    def run(self, requests: int, *, healthy: Callable[[], list[int]], step_s: float) -> list[int]:
        """Send requests, each `step_s` after the one before; return where they went."""
        return [self._request(healthy(), step_s) for _ in range(requests)]

    def finish_all(self) -> None:
        """End what is in flight, without a first token."""
        for request in self._flying:
            self._rule.finished(request, self._now_s)
        self._flying.clear()

    def _new(self) -> tuple[str | None, list[int]]:
        name = next(self._fresh)
        return (f"s{name}" if self._chooser.random() < 0.8 else None), []

    def _request(self, healthy: list[int], step_s: float) -> int:
        self._now_s += step_s
        asked = self._ask()
        replica = self._rule.pick(asked, healthy, self._now_s)
        assert replica in healthy
        self._flying.append(asked.id)
        self._tell(replica, list(asked.blocks))
        self._end_some()
        return replica

    def _ask(self) -> Asked:
        at = self._chooser.randrange(len(self._sessions))
        if self._chooser.random() < 0.2:
            self._sessions[at] = self._new()
        session, said = self._sessions[at]
        said += [next(self._fresh) for _ in range(self._chooser.randrange(6))]
        return Asked(
            id=next(self._numbers),
            blocks=tuple(said),
            block_tokens=BLOCK_TOKENS,
            prompt_tokens=len(said) * BLOCK_TOKENS + self._chooser.randrange(1, BLOCK_TOKENS),
            session=session,
        )

    def _tell(self, replica: int, blocks: list[int]) -> None:
        """Store a prompt in some tier, lose an older one, and be scraped."""
        tier = self._chooser.choice(list(KvTier))
        self._rule.stored(replica, tier, blocks)
        self._held.append((replica, tier, blocks))
        if len(self._held) > 30:
            self._rule.removed(*self._held.pop(0))
        load = ReplicaMetrics(
            waiting=self._chooser.randrange(5), kv_used=self._chooser.random(), running=3
        )
        self._rule.scraped(replica, load, self._now_s)
        if self._chooser.random() < 0.02:
            self._rule.cleared(replica)
            self._held = [each for each in self._held if each[0] != replica]

    def _end_some(self) -> None:
        while len(self._flying) > self._chooser.randrange(4, 20):
            request = self._flying.pop(self._chooser.randrange(len(self._flying)))
            if self._chooser.random() < 0.5:
                self._rule.first_token(request, self._now_s)
            self._rule.finished(request, self._now_s)


def everyone() -> list[int]:
    return list(range(REPLICAS))


def test_every_pick_is_healthy(make: Callable[[], Rule]) -> None:
    chooser = random.Random(2)

    def some() -> list[int]:
        return sorted(chooser.sample(range(REPLICAS), chooser.randrange(1, REPLICAS + 1)))

    picks = Traffic(make(), 1).run(400, healthy=some, step_s=0.3)
    assert set(picks) == set(everyone())


def test_the_same_seed_makes_the_same_picks(make: Callable[[], Rule]) -> None:
    runs = [Traffic(make(), 1).run(300, healthy=everyone, step_s=0.3) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_request_that_ends_is_released_without_a_first_token(make: Callable[[], Rule]) -> None:
    rule = make()
    traffic = Traffic(rule, 3)
    traffic.run(200, healthy=everyone, step_s=0.3)
    assert isinstance(rule, CountingRule)
    assert any(rule.in_flight.requests)
    traffic.finish_all()
    assert not any(rule.in_flight.requests)
    assert not any(rule.in_flight.prefill_tokens)
    if isinstance(rule, Dynamo):
        assert not any(each.blocks for each in rule.active)


def test_what_is_not_known_is_no_matter(make: Callable[[], Rule]) -> None:
    """A request ends twice, or was never sent; blocks go that were never stored."""
    rule = make()
    asked = Asked(id=1, blocks=(), block_tokens=16, prompt_tokens=3, session=None)
    rule.pick(asked, [2], 0.0)
    for request in (1, 1, 99):
        rule.first_token(request, 1.0)
        rule.finished(request, 1.0)
        rule.first_token(request, 1.0)
    rule.removed(0, KvTier.GPU, [7, 8])
    rule.cleared(3)
    assert isinstance(rule, CountingRule)
    assert rule.in_flight.requests == [0] * REPLICAS


def sizes(traffic: Traffic, rule: Rule) -> Iterator[int]:
    """Yield a rule's size after each part of a long run."""
    while True:
        traffic.run(300, healthy=everyone, step_s=60.0)
        yield len(pickle.dumps(rule))


def test_nothing_grows_without_bound(make: Callable[[], Rule]) -> None:
    """Sessions and prompts are ever new: after five hours, what comes goes."""
    rule = make()
    parts = sizes(Traffic(rule, 4), rule)
    first = max(next(parts) for _ in range(3))
    last = max(next(parts) for _ in range(6))
    assert last < 1.5 * first + 500
