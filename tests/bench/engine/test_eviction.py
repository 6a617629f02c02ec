"""The replay of accesses, to exact counts on workloads that can be counted by hand."""

import json
from pathlib import Path

import pytest

from bench.engine import eviction
from bench.engine.write_rules import WriteRule
from bench.ttft import BenchError
from cacheengine.residency.eviction_policies import POLICY_NAMES
from cacheengine.residency.pool_index import PoolIndex


def _hits(requests: list[list[int]], slots: int, policy: str = "LRU") -> int:
    index = PoolIndex(slots, policy)
    hits = eviction.replay(eviction.chunk_keys(requests), index)
    index.check()
    return hits


@pytest.mark.parametrize(
    ("requests", "slots", "hits"),
    [
        ([[1, 2, 3], [1, 2, 4]], 4, 2),
        ([[1, 2], [3, 4], [1, 2]], 4, 2),
        ([[1, 2], [3, 4], [1, 2]], 2, 0),
        ([[2, 3], [1, 2, 3]], 4, 0),  # there, but not after the prefix
        ([[1, 2, 3, 4], [1, 2]], 2, 2),  # of a prompt longer than the pool, its beginning
        ([[1, 2, 3], [4], [1, 2, 3]], 3, 2),  # the end of a prefix goes first
        ([[1, 1, 1]], 3, 0),
        ([[]], 1, 0),
    ],
)
def test_hits(requests: list[list[int]], slots: int, hits: int) -> None:
    assert _hits(requests, slots) == hits


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_with_room_for_all_every_policy_hits_the_same(policy: str) -> None:
    requests = eviction.scan_heavy(200, seed=3)
    slots = len({key for request in requests for key in request})
    result = eviction.measure(
        "w", requests, policy, slots, rounds=1, clock=iter([1.0, 3.0]).__next__
    )
    assert result.hit_rate == pytest.approx(eviction.most_hits(requests))
    assert result.us_per_access == pytest.approx(2e6 / result.accesses)


def test_the_generated_workload_is_the_seeds() -> None:
    assert eviction.scan_heavy(50, seed=3) == eviction.scan_heavy(50, seed=3)
    assert eviction.scan_heavy(50, seed=3) != eviction.scan_heavy(50, seed=4)


def test_arc_keeps_more_than_lru_when_scans_pass() -> None:
    requests = eviction.scan_heavy(1000, seed=3)
    lru, arc = (eviction.measure("w", requests, name, 1000, rounds=1) for name in ("LRU", "ARC"))
    assert arc.hits > 1.5 * lru.hits


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no request"),
        ('{"hash_ids": []}', "has no request"),
        ('{"hash_ids": [1]}\n{"hash_ids": ["a"]}\n', "line 2: write one object"),
        ("[]\n", "line 1"),
        ("{\n", "line 1"),
        (f'{{"hash_ids": [{2**300}]}}\n', "line 1"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=problem):
        eviction.read_trace(path)


def test_the_command_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n\n{"hash_ids": [1, 2, 3]}\n')
    out = tmp_path / "new" / "out.json"
    agents = tmp_path / "a.jsonl"
    agents.write_text(
        '{"session_id": "s", "input_length": 1024, "output_length": 9, "hash_ids": [1, 2]}\n'
    )
    options = f"--trace {trace} --agents {agents} --slots 2 4 --requests 20 --rounds 1 --json {out}"
    assert eviction.main(options.split()) == 0
    written = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    assert written["command"] == (
        "python -m bench.engine.eviction --trace t.jsonl --agents a.jsonl "
        "--slots 2 4 --requests 20 --rounds 1 --json out.json"
    )
    assert len(written["results"]) == 2 * 2 * len(POLICY_NAMES)
    assert written["most_hits"]["trace t.jsonl"] == pytest.approx(0.4)
    assert {each["workload"] for each in written["tiers"]} == {
        "trace t.jsonl",
        "scan-heavy, generated",
        "agents a.jsonl",
    }
    assert {each["rule"] for each in written["tiers"]} == {*WriteRule}
    printed = capsys.readouterr().out
    assert "40.00%" in printed
    assert all(name in printed for name in POLICY_NAMES)


def test_the_command_names_a_trace_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eviction.main(["--trace", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err
