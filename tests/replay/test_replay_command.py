"""``warmroute replay``: a log that a router wrote, before fleets of other sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.discrete.replayed import Fleet, agreement, record
from replay.player import Player, recorded_figures
from replay.recorded import read_log
from replay.replay_command import replay
from simulator.model.replica_machine import Machine, Rates, Shape

SMALL = Fleet(
    workload="conversation",
    load=0.6,
    requests=100,
    replicas=2,
    machine=Machine(
        shape=Shape(gpu_tokens=200_000, block_tokens=128), cpu_tokens=100_000, disk_tokens=0
    ),
)
MACHINE = {
    "shape": {"gpu_tokens": 200_000, "block_tokens": 128},
    "rates": {"prefill_tokens_per_s": 8_000},
    "cpu_tokens": 100_000,
    "disk_tokens": 0,
}


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return record(SMALL, 3)


@pytest.fixture
def log(lines: list[bytes], tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path


def machine_file(tmp_path: Path, value: Any = MACHINE) -> str:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(value))
    return str(path)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(replay, [str(each) for each in arguments])


def test_the_replay_agrees_with_what_was_recorded() -> None:
    found = agreement("small", SMALL, 4)
    assert found.is_met, found.errors
    assert found.recorded.answered == found.replayed.answered == found.recorded.requests


def test_a_replay_can_be_made_again(lines: list[bytes]) -> None:
    requests = read_log(lines).requests
    player = Player(machine=SMALL.machine, replicas=2)
    assert player.play(requests) == player.play(requests)


def test_fewer_and_slower_replicas_answer_later(lines: list[bytes]) -> None:
    requests = read_log(lines).requests
    slow = Machine(shape=SMALL.machine.shape, rates=Rates(prefill_tokens_per_s=4_000.0))
    figures = [
        Player(machine=machine, replicas=replicas).play(requests)
        for machine, replicas in ((SMALL.machine, 4), (SMALL.machine, 1), (slow, 1))
    ]
    p90 = [each.ttft.p90 for each in figures if each.ttft is not None]
    assert p90 == sorted(p90) and len({*p90}) == 3


def test_it_prints_each_fleet(log: Path, tmp_path: Path) -> None:
    machine = machine_file(tmp_path)
    done = run(log, "--replicas", "1,2", "--ram", "1,2x", "--machine", machine)
    assert done.exit_code == 0, done.output
    header, *rows = done.output.splitlines()
    assert header.split()[:4] == ["answered", "TTFT", "p50", "p90"]
    names = [row.split("  ")[0] for row in rows]
    assert names == [
        "recorded",
        *("1 replicas, 1x RAM", "1 replicas, 2x RAM", "2 replicas, 1x RAM", "2 replicas, 2x RAM"),
    ]


def test_it_prints_json(log: Path, tmp_path: Path, lines: list[bytes]) -> None:
    scaling = {"models": [{"model": "model", "machine": MACHINE}]}
    machine = machine_file(tmp_path, scaling)
    done = run(log, "--replicas", "2", "--machine", machine, "--json")
    told = json.loads(done.output)
    recorded = recorded_figures(read_log(lines).requests)
    assert recorded.ttft is not None
    assert told["recorded"]["ttft"]["p50"] == recorded.ttft.p50
    assert told["2 replicas"]["hit_share"] == pytest.approx(recorded.hit_share, abs=0.1)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"cpu_tokens": -1}, "cpu_tokens is -1"),
        ({"memory": 1}, "unknown key"),
        ({"models": [{"model": "model", "machine": {}}]}, "knows no machine"),
        ({"models": []}, "knows no machine"),
    ],
)
def test_a_wrong_machine_is_explained(
    log: Path, tmp_path: Path, value: dict[str, Any], problem: str
) -> None:
    done = run(log, "--replicas", "2", "--machine", machine_file(tmp_path, value))
    assert done.exit_code == 2 and problem in done.output


@pytest.mark.parametrize("sizes", ["0", "2,x", "", "100000"])
def test_a_wrong_size_is_explained(log: Path, sizes: str) -> None:
    done = run(log, "--replicas", sizes)
    assert done.exit_code == 2 and "--replicas" in done.output


def test_without_a_machine_a_router_is_asked(log: Path) -> None:
    done = run(log, "--replicas", "2", "--router", "http://127.0.0.1:1")
    assert done.exit_code == 1 and "no router answers" in done.output
