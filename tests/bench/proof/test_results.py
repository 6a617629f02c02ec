"""What is committed: results that no hand has changed, and a README that says what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.proof.case import LABEL_TOLERANCE
from bench.proof.results import Store
from bench.proof.tables import PAGES, part_from, rewritten
from bench.proof.tree import RESULTS, is_unused

ROOT = Path(__file__).resolve().parents[3]
STORE = Store(ROOT / RESULTS / "proof")
MOST_RECORDS_BYTES = 15_000_000


@pytest.mark.parametrize("name", STORE.names() or [None])
def test_a_result_is_as_it_was_made_and_its_loads_are_what_they_are_called(
    name: str | None,
) -> None:
    if name is None:
        assert not list(STORE.directory.glob("*"))
        return
    result = STORE.read(name)
    assert str(result.machine["commit"]).strip("0123456789abcdef") == ""
    assert [each.contender for each in STORE.records(result)] == (
        result.records.contenders if result.records else []
    )
    seeds = {each.seed for each in result.workloads}
    assert seeds == {*result.case.seeds}
    for each in result.workloads:
        assert each.real_load == pytest.approx(each.label, rel=LABEL_TOLERANCE)
        if result.case.load is not None:
            assert each.label == result.case.load
    for run in result.runs:
        assert run.figures.requests >= result.case.requests


def test_all_records_together_stay_small() -> None:
    sizes = [path.stat().st_size for path in STORE.directory.glob("*.jsonl.xz")]
    assert sum(sizes) < MOST_RECORDS_BYTES


def test_nothing_lies_there_that_no_result_names() -> None:
    results = [STORE.read(name) for name in STORE.names()]
    named = {f"{each.case.name}.json" for each in results}
    named |= {each.records.file for each in results if each.records is not None}
    there = {path.name for path in STORE.directory.glob("*") if path.suffix != ".png"}
    assert there == named


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_say_what_the_results_say(page: str) -> None:
    """Where it fails: python -m bench.proof readme."""
    text = (ROOT / page).read_text(encoding="utf-8")
    results = [STORE.read(name) for name in STORE.names()]
    directory = os.path.relpath(STORE.directory, (ROOT / page).parent)
    assert rewritten(text, part_from(results, directory)) == text


def test_a_run_imports_nothing_that_results_are_not_told_to_follow_from() -> None:
    """Results are of the digest of all sources but the parts that `is_unused` names."""
    code = (
        "import sys, bench.proof.wired, bench.proof.run\n"
        "print(*(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    files = [Path(each) for each in done.stdout.split()]
    ours = [str(each.relative_to(ROOT)) for each in files if each.is_relative_to(ROOT)]
    assert "bench/discrete/play.py" in ours
    assert [each for each in ours if is_unused(each)] == []
