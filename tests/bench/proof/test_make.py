"""Results made in a repository of their own, by a driver that is made up."""

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.proof.make import UNFINISHED, Maker, require_traces
from bench.proof.results import Store
from bench.proof.run import Bench, FleetPlan
from bench.proof.tree import Tree, is_unused
from bench.ttft import BenchError
from bench.workloads.session import Session
from tests.bench.proof import scripted
from tests.bench.proof.scripted import BEST, NEXT, case, scripted_bench


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", root, *identity, *arguments], check=True, capture_output=True)


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with some sources."""
    git(tmp_path, "init", "-q")
    for path in ("router/a.py", "cacheengine/a.py", "bench/a.py", "bench/results/old.json", "x"):
        write(tmp_path, path, "1")
    write(tmp_path, ".gitignore", ".warmroute/\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def maker(root: Path, said: list[str], bench: Bench | None = None) -> Maker:
    return Maker(
        tree=Tree(root),
        store=Store(root / "bench/results/proof"),
        bench=replace(bench or scripted_bench(), traces={"agents": root / "x"}),
        jobs=1,
        say=said.append,
    )


@pytest.mark.parametrize("path", ["x", "router/a.py", "README.md", "bench/new.py"])
def test_a_tree_that_differs_from_its_commit_is_refused(root: Path, path: str) -> None:
    write(root, path, "changed")
    with pytest.raises(BenchError, match=rf"not as it was committed(.|\n)*{path}(.|\n)*worktree"):
        maker(root, []).make([case()])
    assert not Store(root / "bench/results/proof").names()


def test_results_may_differ_from_the_commit(root: Path) -> None:
    write(root, "bench/results/new.json", "1")
    write(root, "bench/results/old.json", "2")
    assert maker(root, []).make([case()]) == []
    assert Store(root / "bench/results/proof").names() == [case().name]


def test_a_result_tells_its_commit_sources_and_trace(root: Path) -> None:
    maker(root, []).make([case()])
    result = Store(root / "bench/results/proof").read(case().name)
    assert result.machine["commit"] == Tree(root).commit()
    assert len(result.machine["commit"]) == 12
    assert {*result.machine} >= {"cpu", "time", "python", "system"}
    assert result.traces["agents"].name == "x"
    assert str(root) not in (root / f"bench/results/proof/{case().name}.json").read_text()
    assert result.records is not None
    assert result.command == f"python -m bench.proof make --only {case().name}"


def test_what_is_made_is_left_alone_until_its_sources_change(root: Path) -> None:
    said: list[str] = []
    cases = [case(), case(name="other", load=0.5)]
    maker(root, said).make(cases)
    assert said[0] == "0 cases are made, 2 to make"
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "results")
    write(root, "x", "a trace that is another")
    git(root, "commit", "-q", "-a", "-m", "two")
    said.clear()
    maker(root, said).make(cases)
    assert said[0] == "0 cases are made, 2 to make"
    write(root, "bench/proof/tables.py", "no run uses this")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "three")
    said.clear()
    maker(root, said).make(cases)
    assert said == ["2 cases are made, 0 to make"]
    write(root, "router/a.py", "2")
    git(root, "commit", "-q", "-a", "-m", "four")
    said.clear()
    maker(root, said).make([*cases[:1]])
    assert said[0] == "0 cases are made, 1 to make"


def test_a_case_that_fails_leaves_the_others_alone(root: Path) -> None:
    said: list[str] = []
    failures = maker(root, said).make([case(load=1.5), case(name="other", load=0.5)])
    (failure,) = failures
    assert "agents cannot be offered at 1.5" in failure
    assert Store(root / "bench/results/proof").names() == ["other"]


def test_a_stopped_case_goes_on_where_it_was(root: Path) -> None:
    played: list[str] = []

    def stopping(
        contender: str, sessions: Sequence[Session], plan: FleetPlan
    ) -> scripted.ScriptedRun:
        played.append(contender)
        if contender == "shared-infinite-cache":
            raise KeyboardInterrupt
        return scripted.play(contender, sessions, plan)

    one = case(seeds=(101,))
    with pytest.raises(KeyboardInterrupt):
        maker(root, [], replace(scripted_bench(), play=stopping)).make([one])
    assert played == ["ours", NEXT, BEST, "shared-infinite-cache"]
    said: list[str] = []
    assert maker(root, said).make([one]) == []
    assert [line.split(":")[1].strip() for line in said[2:4]] == [
        "shared-infinite-cache, seed 101",
        "no-queue, seed 101",
    ]
    assert not list((root / UNFINISHED).glob("*"))


def test_a_tree_edited_while_a_case_runs_gives_no_result(root: Path) -> None:
    def editing(
        contender: str, sessions: Sequence[Session], plan: FleetPlan
    ) -> scripted.ScriptedRun:
        write(root, "router/a.py", "edited")
        return scripted.play(contender, sessions, plan)

    (failure,) = maker(root, [], replace(scripted_bench(), play=editing)).make([case()])
    assert "not as it was committed" in failure
    assert not Store(root / "bench/results/proof").names()


def test_a_changed_result_is_made_again(root: Path) -> None:
    maker(root, []).make([case()])
    path = root / f"bench/results/proof/{case().name}.json"
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"requests":20', b'"requests":21'))
    said: list[str] = []
    maker(root, said).make([case()])
    assert "was changed after it was made" in said[0]
    assert Store(path.parent).read(case().name).case.requests == 20


def test_a_trace_that_is_not_given_is_asked_for(root: Path) -> None:
    with pytest.raises(BenchError, match="give --agents FILE, or choose others"):
        require_traces([case()], {})
    require_traces([case(workload="rounds")], {})
    gone = maker(root, [])
    gone = replace(gone, bench=replace(gone.bench, traces={"agents": root / "gone"}))
    with pytest.raises(BenchError, match="gone: No such file"):
        gone.make([case()])


def test_what_is_no_repository_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="not a git repository"):
        Tree(tmp_path).commit()


def test_parts_that_no_run_uses() -> None:
    assert is_unused("bench/proof/tables.py")
    assert is_unused("bench/results/a.json")
    assert not is_unused("bench/proof/figures.py")
    assert not is_unused("bench/enginex.py")
