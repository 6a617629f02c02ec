"""The comparison of engines: what a round measures, refuses, and how it is told."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.compare import __main__ as compare_engines
from bench.compare.plain import PlainContender
from bench.compare.rounds import Contender, Workload, run_round
from bench.ttft import BenchError

SMALL = {"chunks": 3, "chunk_bytes": 1 << 16, "layers": 2, "pool_chunks": 38}


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    return Workload(**SMALL, directory=tmp_path)


def ticking() -> Callable[[], float]:
    """A clock that moves on by one second at each reading."""
    return iter(range(100_000)).__next__


def test_a_workload_survives_the_way_to_another_process(workload: Workload) -> None:
    assert Workload.of_json(workload.to_json()) == workload
    assert workload.bytes_moved == 3 << 16
    assert workload.page_bytes * workload.blocks_per_chunk * workload.layers == 1 << 16


def test_a_round_times_every_step(workload: Workload) -> None:
    contender: Contender = PlainContender(workload)
    seconds = run_round(contender, workload, 1, ticking())
    assert set(seconds) == set(compare_engines.FIGURES)
    assert all(seconds[name] == 1.0 for name in seconds if name != "put_disk_and_sync")
    assert seconds["put_disk_and_sync"] == 2.0, "on the device: after it was put"
    assert not list(workload.directory.iterdir()), "nothing is left of a round"


def test_the_check_sees_other_bytes(workload: Workload) -> None:
    contender = PlainContender(workload)
    contender.begin(1)
    assert contender.is_intact()
    contender.blank()
    assert not contender.is_intact()


class Forgetful(PlainContender):
    """Finds one chunk too few."""

    def lookup(self) -> int:
        return super().lookup() - 1


class Damaging(PlainContender):
    """Flips a bit of what it reads back from disk."""

    def get(self) -> None:
        super().get()
        self._pool[1, 77] ^= 1


@pytest.mark.parametrize(
    ("contender", "message"),
    [(Forgetful, "lookup: 2 chunks of 3"), (Damaging, "get_disk_warm: the bytes .* others")],
)
def test_a_round_that_lost_something_is_no_figure(
    workload: Workload, contender: type[PlainContender], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        run_round(contender(workload), workload, 1, ticking())


def test_the_summary_is_the_median_and_the_ninth_of_ten() -> None:
    figure = compare_engines.summary([float(n) for n in (5, 1, 9, 3, 10, 2, 7, 4, 8, 6)], 11)
    assert (figure.median_s, figure.p90_s, figure.best_s) == (5.5, 9.0, 1.0)
    assert figure.median_gb_per_s == pytest.approx(2e-9)
    assert compare_engines.summary([2.0], None).median_gb_per_s is None


@pytest.mark.slow
def test_processes_take_turns_and_are_told_of(
    tmp_path: Path, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the bare machine: the whole way, with processes, in a second."""
    engines = {"one": "bench.compare.plain", "two": "bench.compare.plain"}
    monkeypatch.setattr(compare_engines, "ENGINES", engines)
    pythons = dict.fromkeys(engines, sys.executable)
    seconds, includes = compare_engines.measure(pythons, workload, turns=2, rounds=1)
    assert {name: len(each) for name, each in seconds["two"].items()} == dict.fromkeys(
        compare_engines.FIGURES, 2
    )
    assert includes["one"]["checksum"] == "none"
    assert not list(workload.directory.iterdir()), "the directories go"

    results = compare_engines.figures(seconds, workload)
    table = compare_engines.table(results, workload)
    assert "3 chunks of 0.0625 MiB" in table
    assert all(title in table for title in compare_engines.FIGURES.values())
    told = compare_engines.report(["--rounds", "2"], workload, 2, results, includes)
    assert json.loads(json.dumps(told))["results"]["one"]["lookup"]["median_s"] > 0
    assert str(tmp_path) not in json.dumps(told), "no machine's paths in a committed file"


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_named(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_engines, "ENGINES", {"none": "bench.no_such_module"})
    with pytest.raises(BenchError, match="none has ended"):
        compare_engines.measure({"none": sys.executable}, workload, turns=1, rounds=1)


@pytest.mark.slow
def test_ours_and_vllms_do_a_round(workload: Workload) -> None:
    """Real engines; every byte that comes back is checked."""
    pytest.importorskip("vllm")
    pythons = dict.fromkeys(["warmroute", "vllm tiering"], sys.executable)
    seconds, includes = compare_engines.measure(pythons, workload, turns=1, rounds=1)
    assert set(seconds) == set(includes) == set(pythons)
    assert all(len(each) == 1 for steps in seconds.values() for each in steps.values())
