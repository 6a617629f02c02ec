"""Replays against CPU RAM and a disk tier, on workloads that can be counted by hand."""

import pytest

from bench.engine.eviction import chunk_keys
from bench.engine.write_rules import (
    TieredCase,
    TieredReplay,
    WriteRule,
    agents_requests,
    measure_tiers,
)
from bench.workloads.session import Session, Span, Turn


def _case(rule: WriteRule, writes_per_access: float | None = None) -> TieredCase:
    """LRU, four chunks in CPU RAM and ten on disk; the put queue has two places."""
    return TieredCase(
        slots=4,
        disk_chunks=10,
        rule=rule,
        policy="LRU",
        disk_policy="LRU",
        writes_per_access=writes_per_access,
    )


def _replay(case: TieredCase, requests: list[list[int]]) -> TieredReplay:
    replay = TieredReplay(case)
    for request in chunk_keys(requests):
        replay.access(request)
        replay.check()
    return replay


@pytest.mark.parametrize(
    ("rule", "hits_disk", "writes"),
    [
        (WriteRule.ENGINE, 3, 8),
        (WriteRule.STORED, 3, 8),
        (WriteRule.SPARED, 3, 8),
        (WriteRule.SECOND_USE, 1, 3),  # 1 with the third request, then 2 and 3
        (WriteRule.LEAVING, 3, 7),  # 7 is still in CPU RAM
        (WriteRule.SECOND_USE_OR_LEAVING, 3, 7),
    ],
)
def test_what_each_rule_finds_and_writes(rule: WriteRule, hits_disk: int, writes: int) -> None:
    requests = [[1, 2], [3, 4], [1], [5, 6], [7, 8], [1, 2], [3]]
    replay = _replay(_case(rule), requests)
    assert (replay.hits_cpu, replay.hits_disk, replay.writes) == (1, hits_disk, writes)


def test_a_slow_disk_writes_as_much_as_it_can() -> None:
    requests = [[number, number + 1] for number in range(0, 40, 2)]
    for rule in WriteRule:
        replay = _replay(_case(rule, 0.25), requests)
        assert replay.writes == (0 if rule is WriteRule.SECOND_USE else 10), rule


def test_a_restart_keeps_what_is_on_disk() -> None:
    requests = chunk_keys([[1, 2], [3], [1, 2, 3], [3]])
    kept = {rule: measure_tiers(requests, _case(rule)).kept_by_restart for rule in WriteRule}
    assert (kept[WriteRule.STORED], kept[WriteRule.LEAVING]) == (1.0, 0.0)


def test_the_requests_of_agents_come_in_the_order_of_their_times() -> None:
    def session(number: int, pause_s: float) -> Session:
        opening = Turn((Span(0, 512), Span(number, 512)), 100)
        return Session(0.0, (opening, Turn((Span(number + 10, 1024),), 100, pause_s)))

    first, *others = agents_requests([session(1, 1000.0), session(2, 0.0)], seed=1)
    assert [len(first), *map(len, others)] == [2, 2, 4, 4]
    assert [each[0] for each in others] == [first[0]] * 3, "one text begins all"
    assert [each[1] == first[1] for each in others] == [False, False, True]
