"""The engine's benchmark on a tiny scale: every case runs, and the figures add up."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.engine import __main__ as bench
from bench.engine.cases import Case, Contender, as_json, in_turns, table
from bench.engine.disk import DirectFiles, DiskRig, disk, random_memory
from bench.engine.index import FullTier, index, key_of
from bench.engine.kept import kept
from tests.stored_chunks import stored_chunks


def case(ours: list[float], limit: list[float], *, bar: float | None = None) -> Case:
    return Case(name="a case", unit="ms", ours=ours, limit=limit, moved_bytes=1000, bar=bar)


def test_the_ratio_is_that_of_speeds_round_by_round() -> None:
    assert case([2.0, 10.0, 4.0], [1.0, 10.0, 1.0]).ratio == 0.5


@pytest.mark.parametrize(("cpu", "met"), [(1.5, True), (1.6, False)])
def test_a_bar_of_processor_time_counts_and_not_the_speed(cpu: float, met: bool) -> None:
    slow = replace(case([9.0], [1.0]), ours_cpu=[cpu], limit_cpu=[1.0], most_cpu=1.5)
    assert slow.is_met is met


@pytest.mark.parametrize(
    ("ours", "bar", "met"),
    [(1.1, None, True), (1.2, None, False), (5.0, 5.0, True), (6, 5.0, False)],
)
def test_a_bar_is_a_share_of_the_limit_or_a_most(ours: float, bar: float | None, met: bool) -> None:
    assert case([ours], [1.0], bar=bar).is_met is met


def test_each_turn_is_timed_in_each_round_between_what_is_not() -> None:
    steps: list[str] = []

    def note(what: str) -> Contender:
        return Contender(
            step=lambda: steps.append(what),
            before=lambda: steps.append(f"before {what}"),
            after=lambda: steps.append(f"after {what}"),
        )

    done = in_turns("turns", 2, note("ours"), note("limit"), moved_bytes=1)
    # The first round warms up, and who begins changes.
    order = ["limit", "ours", "ours", "limit", "limit", "ours"]
    assert steps == list(
        itertools.chain.from_iterable((f"before {who}", who, f"after {who}") for who in order)
    )
    lengths = {len(each) for each in (done.ours, done.limit, done.ours_cpu, done.limit_cpu)}
    assert lengths == {2}


def test_the_disk_cases_move_every_byte_and_a_full_tier_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same_files(root: Path, chunks: int, chunk_bytes: int) -> DirectFiles:
        return DirectFiles(root, chunk_bytes, random_memory(chunks * chunk_bytes))

    monkeypatch.setattr("bench.engine.disk._vllm", same_files)
    cases = list(disk(tmp_path, chunks=3, chunk_bytes=8192, rounds=2))
    assert [each.name for each in cases] == [
        "disk put, 3 x 8 KiB, vLLM's tiering",
        "disk get, 3 x 8 KiB, vLLM's tiering",
        "disk put, 3 x 8 KiB, into a full tier, vLLM's tiering",
        "disk put, 3 x 8 KiB, plain O_DIRECT",
        "disk get, 3 x 8 KiB, plain O_DIRECT",
    ]
    assert all(each.moved_bytes == 3 * 8192 for each in cases)
    assert all(len(each.ours) == len(each.limit) == 2 for each in cases)
    # Two cases of 3 rounds (the first is not counted) filled one.
    assert len(stored_chunks(tmp_path / "ours")) == 2 * 3 * 3
    assert len(stored_chunks(tmp_path / "full")) == 3


def test_a_kept_pool_is_sealed_and_served_after_a_restart() -> None:
    cases = list(kept([(4, 4096)], rounds=2))
    assert [each.name.split(" with ")[0] for each in cases] == [
        "kept: seal 4 chunks of 4 KiB",
        "kept: 16 stores of 1 chunk of 4 KiB",
        "kept: restart",
    ]
    assert all(len(each.ours) == len(each.limit) == 2 for each in cases)


def _rows(memory: memoryview | bytes) -> list[bytes]:
    """Return the chunks of 4 KiB in any order."""
    return sorted(bytes(memory[at : at + 4096]) for at in range(0, len(memory), 4096))


def test_what_is_promoted_is_what_was_put(tmp_path: Path) -> None:
    memory = random_memory(3 * 4096)
    before = bytes(memory)
    rig = DiskRig(tmp_path, 4096, memory, capacity_chunks=3)
    rig.new_keys()
    rig.put()
    rig.empty_pool()
    memory[:] = bytes(len(memory))
    rig.get()
    assert _rows(memory) == _rows(before)
    rig.close()


def test_the_index_cases_find_every_chunk() -> None:
    cases = list(index(200, rounds=1))
    assert [each.unit for each in cases] == ["B", "us"] * 2
    assert all(min(each.ours) > 0 for each in cases)


def test_the_tier_without_bytes_holds_its_keys() -> None:
    assert FullTier(2).scan() == [key_of(0), key_of(1)]
    assert FullTier(0).scan() == []


def test_the_table_says_what_is_missed() -> None:
    text = table([case([1.0], [1.0]), case([2.0], [1.0])])
    assert text.count("met (90%)") == 1
    assert text.count("MISSED (90%)") == 1


def test_a_case_as_json_has_both_sides() -> None:
    figures = as_json(case([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]))
    assert figures["ours"]["p50"] == 4.0
    assert figures["limit"]["samples"] == 3
    assert (figures["ratio"], figures["met"]) == (0.5, False)


def test_a_part_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "engine.json"
    arguments = ["--parts", "index", "--index-chunks=100", "--rounds=1", f"--json={out}"]
    assert bench.main(arguments) == 0
    written = json.loads(out.read_text())
    assert written["command"].endswith("--rounds 1 --parts index")
    assert len(written["cases"]) == 4
    assert "index, 100 chunks in cpu" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # importing vLLM warns about its own deprecations
def test_all_of_it_in_miniature(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("vllm")
    out = tmp_path / "engine.json"
    sizes = {"chunks": 3, "chunk-bytes": 131072, "disk-bytes": 131072, "index-chunks": 100}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    assert bench.main([*arguments, "--rounds=1", f"--dir={tmp_path}", f"--json={out}"]) == 0
    names = [each["name"] for each in json.loads(out.read_text())["cases"]]
    assert [sum(name.startswith(each) for name in names) for each in ("cpu", "disk", "index")] == [
        8,
        4 * 5,
        4,
    ]
    assert len(set(names)) == len(names)
