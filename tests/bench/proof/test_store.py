"""Result files: what they hold, and that a change by hand is seen."""

import lzma
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from bench.proof.make import NothingFinished, run_case
from bench.proof.records import columns, packed, unpacked
from bench.proof.results import (
    Definition,
    FinishedRuns,
    Store,
    Trace,
    decoded,
    encoded,
    kept_columns,
    result,
    write_whole,
)
from bench.proof.run import Ran, Task, run
from bench.ttft import BenchError
from tests.bench.proof.scripted import BEST, case, failed, made, record, scripted_bench


def runs() -> list[Ran]:
    return run_case(
        case(), scripted_bench(), jobs=1, finished=NothingFinished(), tell=lambda *_: None
    )


def test_a_result_is_read_as_it_was_made_to_six_digits() -> None:
    one = made(case())
    read = decoded(encoded(one))
    assert read.case == one.case
    assert [each.figures.requests for each in read.runs] == [20] * 15
    assert read.runs[0].figures.ttft_p90_s == pytest.approx(
        one.runs[0].figures.ttft_p90_s, rel=1e-5
    )
    assert encoded(read) == encoded(one)


def test_each_run_stands_on_a_line_of_its_own() -> None:
    lines = encoded(made(case())).decode().splitlines()
    assert sum(line.startswith('  {"contender":') for line in lines) == 15


@pytest.mark.parametrize(
    ("before", "after"),
    [(b'"requests":20', b'"requests":21'), (b'"errors":0', b'"errors":1'), (b"0123", b"1123")],
)
def test_a_change_by_hand_is_seen(before: bytes, after: bytes) -> None:
    data = encoded(made(case()))
    assert before in data
    with pytest.raises(BenchError, match=r"was changed after it was made .* --only head"):
        decoded(data.replace(before, after, 1))


def test_what_is_no_result_is_refused() -> None:
    with pytest.raises(BenchError, match=r"not a result of bench.proof"):
        decoded(b"{}")
    with pytest.raises(BenchError, match=r"not a result of bench.proof"):
        decoded(b"{")


def test_a_store_finds_what_it_wrote(tmp_path: Path) -> None:
    store, rans = Store(tmp_path / "proof"), runs()
    definition = Definition(case=case(), sources="a", traces={})
    assert (store.names(), store.has(definition)) == ([], False)
    with pytest.raises(BenchError, match=r"make --only headline-agents-ram1-load0.8"):
        store.read(case().name)
    kept = kept_columns(case(), rans)
    one = result(definition, rans, machine={"commit": "abc"}, records=packed(kept))
    store.write(one, packed(kept))
    assert store.names() == [case().name]
    assert store.has(definition)
    assert store.records(store.read(case().name)) == kept
    assert sorted(each.name for each in store.directory.iterdir()) == [
        f"{case().name}.json",
        f"{case().name}.jsonl.xz",
    ]


def test_results_of_cases_that_no_longer_exist_are_removed(tmp_path: Path) -> None:
    store, rans = Store(tmp_path), runs()
    records = packed(kept_columns(case(), rans))
    for name in ("stays", "goes"):
        definition = Definition(case=case(name=name), sources="a", traces={})
        store.write(result(definition, rans, machine={}, records=records), records)
    assert store.remove_others(["stays", "to come"]) == ["goes"]
    there = [each.name for each in tmp_path.iterdir()]
    assert sorted(there) == ["stays.json", "stays.jsonl.xz"]


@pytest.mark.parametrize(
    "other",
    [
        Definition(case=case(requests=21), sources="a", traces={}),
        Definition(case=case(), sources="b", traces={}),
        Definition(case=case(), sources="a", traces={"agents": Trace(name="a", sha256="0")}),
    ],
)
def test_another_definition_is_another_result(tmp_path: Path, other: Definition) -> None:
    store = Store(tmp_path)
    definition = Definition(case=case(), sources="a", traces={})
    store.write(result(definition, runs(), machine={}, records=b""), b"")
    assert store.has(definition)
    assert not store.has(other)


def test_changed_files_are_named(tmp_path: Path) -> None:
    store, rans = Store(tmp_path), runs()
    definition = Definition(case=case(), sources="a", traces={})
    records = packed(kept_columns(case(), rans))
    path = store.write(result(definition, rans, machine={}, records=records), records)
    beside = tmp_path / f"{case().name}.jsonl.xz"
    beside.write_bytes(lzma.compress(b""))
    with pytest.raises(BenchError, match=rf"{beside.name} is missing or was changed"):
        store.records(store.read(case().name))
    other = path.rename(tmp_path / "other.json")
    with pytest.raises(BenchError, match=r"other.json is the result of headline-agents"):
        store.read("other")
    content = orjson.loads(other.read_bytes())
    content["case"]["requests"] = 50
    other.write_bytes(orjson.dumps(content))
    with pytest.raises(BenchError, match=r"other.json was changed after it was made"):
        store.read("other")


def test_records_keep_what_is_needed_to_explain_a_request() -> None:
    more = {"headers": {"reason": "session"}, "predicted_ttft_s": 0.9004}
    told = columns(
        "ours",
        101,
        [
            record(
                7,
                turn=1,
                ttft_s=1.2345,
                instance_id="b",
                due_s=3.14159,
                arrived_s=10.0,
                first_token_s=11.0,
                **more,
            ),
            record(6, headers={}),
            failed(9, status=429, instance_id=None),
            failed(10, status=None),
        ],
    )
    (read,) = unpacked(packed([told]))
    assert read == told
    assert read.number == [6, 7, 9, 10]
    assert read.ttft_ms == [1000, 1234, -1, -1]
    assert read.total_ms == [2000, 2234, -1, -1]
    assert read.failed == {9: 429, 10: 0}
    assert read.ttfts_s[2] == float("inf")
    assert read.sessions == [6, 6, 9, 10]
    assert read.row(1) == {
        "turn": 1, "due_s": 3.1, "prompt_tokens": 1000, "ttft_ms": 1234, "replica": "b",
        "gpu": 200, "cpu": 100, "disk": 0, "computed": 700, "status": 200,
        "reason": "session", "predicted_ms": 900, "before_ms": 234,
        "total_ms": 2234, "output_tokens": 11,
    }  # fmt: skip
    assert (read.row(2)["replica"], read.row(2)["status"]) == (None, 429)
    assert columns("x", 1, [record(0)]).reason == []


def test_which_records_are_kept() -> None:
    rans = runs()
    assert [each.contender for each in kept_columns(case(), rans)] == [*case().contenders]
    small = case(set="regimes")
    assert [each.contender for each in kept_columns(small, rans)] == [
        "ours",
        BEST,
        "shared-infinite-cache",
    ]
    assert [each.contender for each in kept_columns(case(set="ablations"), rans)] == ["ours"]


def test_a_workload_that_differs_between_contenders_is_refused() -> None:
    one, *others = runs()
    (played,) = one.plays
    offered_more = replace(played.workload, real_load=0.81)
    other = replace(one, plays=(replace(played, workload=offered_more),))
    with pytest.raises(BenchError, match="not the same for all contenders"):
        result(
            Definition(case=case(), sources="", traces={}),
            [other, *others],
            machine={},
            records=b"",
        )


def test_finished_runs_are_found_again(tmp_path: Path) -> None:
    finished = FinishedRuns(tmp_path / "runs")
    task = Task(case=case(), seed=101, contender="ours")
    assert finished.get(task) is None
    ran = run(task, scripted_bench())
    finished.put(task, ran)
    assert finished.get(task) == ran
    assert finished.get(Task(case=case(), seed=102, contender="ours")) is None
    finished.remove()
    assert finished.get(task) is None


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"one")
    with pytest.raises(TypeError):
        write_whole(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"one"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
