"""Large inputs are applied in pieces, with the event loop free between them."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import zmq.asyncio

from router.config.settings import ReplicaConfig, RouterConfig
from router.feeds.kv_receiver import KvReceiver
from router.feeds.kv_subscriber import KvEndpoints, KvSubscriber
from router.fleet.fleet import Fleet
from router.index.kv_events import KvBatch, KvEventReader
from router.index.prefix_index import PrefixIndex
from router.index.prompt_keys import KvTier
from tests.router.agent_server import AgentServer, serving, until
from tests.router.feeds.helpers import feeding
from tests.router.feeds.kv_publisher import publisher, stored

LARGEST_PIECE_KEYS = 5_000
KEYS = list(range(23_000))


class Turns:
    """Counts the event loop's turns, and the keys that the index is given in each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.keys: Counter[int] = Counter()
        self.first_piece: Callable[[], None] = lambda: None
        for change in ("add", "remove"):
            monkeypatch.setattr(PrefixIndex, change, self._counted(getattr(PrefixIndex, change)))

    def _counted(self, change: Callable[..., None]) -> Callable[..., None]:
        def counted(index: PrefixIndex, slot: int, tier: KvTier, keys: Sequence[int]) -> None:
            if not self.keys:
                self.first_piece()
            self.keys[self.now] += len(keys)
            change(index, slot, tier, keys)

        return counted

    async def count(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)


async def test_a_snapshot_and_a_long_batch_are_taken_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns, agent = Turns(monkeypatch), AgentServer()
    agent.held = {"cpu": KEYS[:7_000], "disk": KEYS}
    counting = asyncio.create_task(turns.count())
    async with serving(agent.app()) as url, feeding(agent_url=url) as fleet:
        assert fleet.index.held(0) == {KvTier.CPU: 7_000, KvTier.DISK: len(KEYS)}
        await agent.change("remote", True, KEYS)
        await until(lambda: fleet.index.held(0).get(KvTier.REMOTE) == len(KEYS))
        fleet.index.check()
    counting.cancel()
    assert turns.keys.total() == 7_000 + 2 * len(KEYS)
    assert max(turns.keys.values()) <= LARGEST_PIECE_KEYS


async def test_what_changes_while_a_snapshot_is_taken_wins_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns, agent = Turns(monkeypatch), AgentServer()
    agent.held = {"disk": KEYS}
    changes: list[asyncio.Task[None]] = []

    def change() -> None:
        changes.append(asyncio.create_task(agent.change("disk", False, KEYS[-2:])))

    turns.first_piece = change
    async with serving(agent.app()) as url, feeding(agent_url=url) as fleet:
        await until(lambda: turns.keys.total() == len(KEYS) + 2)
        assert fleet.index.held(0) == {KvTier.DISK: len(KEYS) - 2}
        assert not fleet.index.match(0, KEYS[-2:]).runs
    assert agent.calls.count("/snapshot") == 1


async def test_messages_that_wait_are_taken_a_few_at_a_time() -> None:
    """Each has 9 KB; four of them are 32 KB and some."""
    context, turns, taken = zmq.asyncio.Context(), [0], Counter[int]()

    class Sink:
        def following(self) -> None: ...

        def forget(self) -> None: ...

        def apply(self, batch: KvBatch) -> None:
            taken[turns[0]] += 1

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async with contextlib.aclosing(KvReceiver()) as receiver, publisher(context) as source:
        endpoints = KvEndpoints(source.endpoint, source.replay_endpoint)
        subscriber = KvSubscriber(receiver, endpoints, KvEventReader(), Sink())
        tasks = [asyncio.create_task(subscriber.run()), asyncio.create_task(count())]
        await source.subscribed()
        keys = [2**63 + key for key in range(1_000)]
        for _ in range(50):
            await source.publish(stored(keys))
        await until(lambda: taken.total() == 50)
        assert max(taken.values()) <= 4
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)


@pytest.mark.parametrize("claim_keys", [1, 500])
def test_a_tick_ends_some_claims_and_the_next_ones_the_others(claim_keys: int) -> None:
    fleet = Fleet(RouterConfig(replicas=(ReplicaConfig(url="http://127.0.0.1:1"),)))
    for at in range(0, len(KEYS), claim_keys):
        fleet.index.believe(0, KEYS[at : at + claim_keys], until_s=1.0)
    left = [len(fleet.index)]
    while left[-1]:
        fleet.tick(2.0)
        left.append(len(fleet.index))
    ended = [before - after for before, after in pairwise(left)]
    assert max(ended) <= 10_000
    assert len(ended) <= 30
    fleet.index.check()
