"""AIPerf's report: what is read of it, and that what is kept names no path."""

import json
from pathlib import Path

import pytest

from bench.aiperf.report import (
    Figures,
    check_nameless,
    kept_texts,
    own_table,
    read_report,
    relative,
    table,
)
from bench.ttft import BenchError
from tests.bench.aiperf.reports import leave, report


def test_figures_are_read_from_the_report(tmp_path: Path) -> None:
    leave(tmp_path)
    figures, version = read_report(tmp_path)
    assert version == "0.13.0"
    assert (figures.requests, figures.errors) == (185, 2)
    assert (figures.ttft_mean_ms, figures.ttft_p90_ms, figures.ttft_p99_ms) == (276.5, 395.0, 522.0)
    assert (figures.good_per_s, figures.good_share) == (28.0, 0.96)
    assert figures.cached_share == pytest.approx(0.655)


def test_replicas_that_tell_no_cached_tokens_are_no_zero() -> None:
    assert Figures.read(report(overall_usage_prompt_cache_read_pct=None)).cached_share is None


def test_a_report_without_answers_is_an_error_that_says_why() -> None:
    with pytest.raises(BenchError, match=r"time_to_first_token.*503"):
        Figures.read(report(time_to_first_token=None, error_summary=[{"code": 503}]))


@pytest.mark.parametrize("changes", [{"was_cancelled": True}, {"is_complete": False}])
def test_a_run_that_did_not_finish_is_an_error(tmp_path: Path, changes: dict[str, bool]) -> None:
    leave(tmp_path, **changes)
    with pytest.raises(BenchError, match="did not finish"):
        read_report(tmp_path)


def test_no_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no report"):
        read_report(tmp_path)


def test_kept_texts_are_relative_to_the_working_directory(tmp_path: Path) -> None:
    leave(tmp_path / "artifacts")
    kept = kept_texts(tmp_path / "artifacts", tmp_path)
    assert json.loads(kept["json"])["artifacts"]["dir"] == "artifacts"
    assert str(tmp_path) not in "".join(kept.values())


def test_a_report_that_names_another_path_is_not_kept(tmp_path: Path) -> None:
    leave(tmp_path / "artifacts", error_summary=["cannot read /home/me/tokenizer.json"])
    with pytest.raises(BenchError, match=r"/home/me/tokenizer\.json"):
        kept_texts(tmp_path / "artifacts", tmp_path)


def test_only_the_directory_itself_is_cut_off() -> None:
    assert relative("'/tmp/a/b' /tmp/a /tmp/ab", Path("/tmp/a")) == "'b'  /tmp/ab"


@pytest.mark.parametrize(
    "text",
    ["/some/me", "--artifact-dir '/some/x/artifacts'", "dir=/some/.cache/hub", '"/some/py3/bin"'],
)
def test_paths_are_found(text: str) -> None:
    with pytest.raises(BenchError, match="path of this machine"):
        check_nameless(text)


@pytest.mark.parametrize(
    "text",
    [
        "tokens/sec/user",
        "Throughput (requests/sec)",
        "http://127.0.0.1:8080/v1/chat/completions",
        "warmroute/served",
        "--out bench/results/aiperf",
        "2 x Intel(R) Xeon(R) / 8 GiB",
    ],
)
def test_units_and_addresses_are_no_paths(text: str) -> None:
    check_nameless(text)


def test_its_own_table_is_the_one_of_all_metrics(tmp_path: Path) -> None:
    leave(tmp_path)
    shown = own_table(tmp_path)
    assert "Time to First Token" in shown
    assert "Usage Prompt Tokens" not in shown


def test_runs_stand_beside_each_other() -> None:
    figures = Figures.read(report())
    lines = table("a fleet", {"router": figures, "in-turn": figures}).splitlines()
    assert lines[0] == "a fleet"
    assert [line.split()[0] for line in lines[3:]] == ["router", "in-turn"]
    assert lines[3].split()[1:3] == ["185", "2"]
    assert len({len(line) for line in lines[1:]}) == 1
