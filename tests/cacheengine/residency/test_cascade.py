"""Which chunks a tier's put queue takes when it cannot take all."""

from collections.abc import Sequence

import pytest

from cacheengine.residency import cascade as module
from cacheengine.residency.decider import Decider
from cacheengine.residency.local_index import LocalIndex
from cacheengine.tiers.tier import PutOutcome
from tests.cacheengine.helpers import key, keys

SLOTS = 16
QUEUED = 8
"""Places of the put queue; chunks stored for the first time get six of them."""


class Replica:
    """A pool and a disk tier whose puts end when told."""

    def __init__(self) -> None:
        self.disk = LocalIndex(100, 1)
        self.decider = Decider(
            SLOTS, "LRU", [self.disk], chunk_bytes=1, local_cpu=True, put_queue_share=0.5
        )
        self.cascade = self.decider.cascades["disk"]

    def store(self, *numbers: int) -> None:
        protected = frozenset(keys(*numbers))
        reserved = self.decider.prepare_store(keys(*numbers), 0.0, protected).keys
        entries = self.decider.end_stores(reserved, 0.0, success=True, prefetched=False)
        self.decider.put_down(entries, 0.0)
        self.decider.check()

    def write(self, count: int) -> Sequence[bytes]:
        """End this many puts; return their chunks."""
        entries, victims = self.cascade.begin(count, 0.0)
        self.cascade.deleted(victims)
        self.cascade.end(entries, [PutOutcome.STORED] * len(entries), 0.0)
        self.decider.check()
        return [entry.key for entry in entries]

    def queued(self, *numbers: int) -> list[bool]:
        return [self.cascade.has(key(number)) for number in numbers]


def _with_lost_chunks() -> Replica:
    """A replica whose queue is full of first uses; 6 to 9 left CPU RAM without being written."""
    replica = Replica()
    replica.store(*range(10))
    assert replica.queued(5, 6, 9) == [True, False, False]
    replica.store(*range(10, 20))
    assert all(replica.decider.pool.get(key(number)) is None for number in range(6, 10))
    return replica


@pytest.mark.parametrize("retried", [False, True])
def test_a_chunk_that_was_lost_once_takes_the_places_that_first_uses_may_not(
    retried: bool,
) -> None:
    replica = _with_lost_chunks()
    if retried:
        # A put ends, so what was dropped is tried again as far as it is in CPU RAM.
        assert replica.write(1) == keys(0)
    replica.store(6, 100, 7, 8)
    assert replica.queued(6, 100, 7, 8) == [True, False, True, False]
    assert replica.cascade.queued_bytes == QUEUED


def test_it_is_written_and_its_second_use_counts_once() -> None:
    replica = _with_lost_chunks()
    replica.store(6)
    assert key(6) in replica.write(7)
    assert key(6) in replica.disk
    assert replica.decider.stats.disk.puts == 7


def test_dropped_first_uses_follow_the_oldest_first() -> None:
    replica = Replica()
    replica.store(*range(8))
    assert replica.queued(*range(8)) == [True] * 6 + [False] * 2
    assert [replica.write(8), replica.write(8)] == [keys(*range(6)), keys(6, 7)]


def test_a_queue_of_one_place_takes_a_first_use() -> None:
    decider = Decider(
        2, "LRU", [LocalIndex(9, 1)], chunk_bytes=1, local_cpu=True, put_queue_share=0.5
    )
    entries = decider.end_stores(
        decider.prepare_store(keys(1), 0.0, ()).keys, 0.0, success=True, prefetched=False
    )
    decider.put_down(entries, 0.0)
    assert decider.cascades["disk"].waiting == 1


@pytest.mark.parametrize("cleared", [None, keys(6, 7)])
def test_clearing_the_tier_forgets_the_lost_chunks(cleared: Sequence[bytes] | None) -> None:
    replica = _with_lost_chunks()
    replica.write(1)
    replica.decider.clear(["disk"], cleared)
    replica.store(6, 7)
    assert replica.queued(6, 7) == [False, False]


def test_the_lost_chunks_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten first."""
    monkeypatch.setattr(module, "_MOST_LOST", 2)
    replica = _with_lost_chunks()
    replica.write(1)
    replica.store(6)
    assert replica.queued(6) == [False]
    replica.store(9)
    assert replica.queued(9) == [True]
