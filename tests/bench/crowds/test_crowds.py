"""Each crowd, small, before a real router; and what is judged."""

import math
from pathlib import Path

import pytest

from bench.crowds.kinds import KINDS, Kind
from bench.crowds.load import p99
from bench.crowds.report import as_json, line, p99_ratio, verdicts
from bench.crowds.rounds import Crowded, Pace, crowd

IDLE, _, UNREAD = KINDS


def crowded(kind: Kind = IDLE, **changes: object) -> Crowded:
    found = Crowded(kind=kind, connections=100)
    found.alone_p99_s, found.crowded_p99_s = [0.010, 0.012], [0.0105, 0.0126]
    found.before_bytes, found.with_bytes, found.open_files = 1000, 2000, 120
    for name, value in changes.items():
        assert hasattr(found, name)
        setattr(found, name, value)
    return found


def test_p99_is_a_request_that_one_in_a_hundred_exceeds() -> None:
    assert p99([float(each) for each in range(1000)]) == 990.0
    assert p99([1.0]) == 1.0


def test_a_ratio_is_of_paired_rounds() -> None:
    estimate = p99_ratio(crowded())
    assert math.isclose(estimate.value, 1.05)
    assert estimate.low <= 1.05 <= estimate.high


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, None),
        ({"crowded_p99_s": [0.012, 0.015]}, "p99 within 10%"),
        ({"with_bytes": 1000 + 101 * IDLE.most_bytes}, "memory bounded"),
        ({"open_files": 99}, "the crowd was there"),
        ({"kind": UNREAD}, "the crowd was there"),
        ({"in_flight": 1.0}, "nothing in flight at the end"),
        ({"bad_lines": ["Traceback"]}, "no traceback in the log"),
    ],
)
def test_what_must_hold_is_judged(changes: dict[str, object], failed: str | None) -> None:
    found = crowded(**changes)  # type: ignore[arg-type]  # by name
    wrong = [what for what, holds in verdicts(found).items() if not holds]
    assert wrong == ([] if failed is None else [failed])
    assert as_json(found)["holds"] is (failed is None)
    assert ("FAILS" in line(found)) is (failed is not None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_a_small_crowd_is_held_and_judged(kind: Kind, tmp_path: Path) -> None:
    said: list[str] = []
    pace = Pace(rounds=1, phase_s=1.0, per_s=20.0)
    found = await crowd(kind, 40, pace, tmp_path, said.append)
    judged = verdicts(found)
    del judged["p99 within 10%"], judged["memory bounded"]  # of so few and so short
    assert all(judged.values()), (judged, found.bad_lines)
    assert len(said) == len(found.alone_p99_s) == len(found.crowded_p99_s) == 1
    assert found.closed == 0
