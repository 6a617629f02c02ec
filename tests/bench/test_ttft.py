"""The TTFT script against a scripted server: what it times, sends, reports and refuses."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from bench import ttft
from bench.ttft import Answer, BenchError, Round, ask, percentile, run_round, summarize, table
from tests.bench.scripted_openai import ScriptedOpenAI, scripted_openai


@pytest.fixture
def server() -> Iterator[ScriptedOpenAI]:
    with scripted_openai(ScriptedOpenAI()) as running:
        yield running


@pytest.fixture
def client(server: ScriptedOpenAI) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def answer(ttft_s: float) -> Answer:
    return Answer(ttft_s=ttft_s, total_s=ttft_s, prompt_tokens=10, text="x")


def test_time_runs_to_the_first_text_not_to_the_role(
    server: ScriptedOpenAI, client: openai.OpenAI
) -> None:
    times = iter([100.0, 103.0, 109.0])
    got = ask(client, model="m", content="abcdef", max_tokens=4, clock=lambda: next(times))
    assert (got.ttft_s, got.total_s, got.text, got.prompt_tokens) == (3.0, 9.0, "Well", 2)
    assert server.bodies[0]["stream"] is True
    assert server.bodies[0]["temperature"] == 0.0


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "function": {"name": "f"}}]},
    ],
)
def test_thought_and_tool_calls_count_as_a_first_token(
    server: ScriptedOpenAI, client: openai.OpenAI, delta: dict[str, object]
) -> None:
    server.deltas = [{"role": "assistant", "content": None}, delta]
    assert ask(client, model="m", content="x", max_tokens=4).text


def test_the_routers_headers_are_kept_and_no_others(
    server: ScriptedOpenAI, client: openai.OpenAI
) -> None:
    server.headers = {"X-Warmroute-Replica": "r2", "x-other": "1"}
    got = ask(client, model="m", content="x", max_tokens=1, session="s1")
    assert got.headers == {"x-warmroute-replica": "r2"}
    assert server.asked_headers[0]["x-session-id"] == "s1"


def test_cached_tokens_are_told_if_the_server_tells_them(
    server: ScriptedOpenAI, client: openai.OpenAI
) -> None:
    assert ask(client, model="m", content="x", max_tokens=1).cached_tokens is None
    server.usage = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert ask(client, model="m", content="x", max_tokens=1).cached_tokens == 0


def test_refusals_errors_and_empty_answers_are_said(
    server: ScriptedOpenAI, client: openai.OpenAI
) -> None:
    server.status = 400
    with pytest.raises(BenchError, match="no room"):
        ask(client, model="m", content="x", max_tokens=1)
    server.status, server.error = 200, "out of blocks"
    with pytest.raises(BenchError, match="out of blocks"):
        ask(client, model="m", content="x", max_tokens=1)
    server.error, server.deltas = None, [{"role": "assistant", "content": ""}]
    with pytest.raises(BenchError, match="empty"):
        ask(client, model="m", content="x", max_tokens=1)


def test_a_round_repeats_its_context_and_no_other_rounds(
    server: ScriptedOpenAI, client: openai.OpenAI
) -> None:
    for _ in range(2):
        run_round(client, model="m", context="The text.", max_tokens=1, session=None)
    first_cold, first_warm, second_cold, _ = server.prompts()
    assert first_cold.split("\n\n")[:2] == first_warm.split("\n\n")[:2]
    assert first_cold != first_warm
    assert first_cold.split("\n\n")[0] != second_cold.split("\n\n")[0]


def test_summary_and_table() -> None:
    rounds = [
        Round(cold=answer(c), warm=answer(w)) for c, w in [(8.0, 0.2), (6.0, 0.1), (7.0, 0.1)]
    ]
    summary = summarize(rounds)
    assert summary["cold_ttft_p50_s"] == 7.0
    assert summary["warm_ttft_p50_s"] == 0.1
    assert summary["cold_ttft_p90_s"] == 8.0
    assert summary["ratio_p50"] == pytest.approx(60.0)
    assert summary["saved_p50_s"] == pytest.approx(6.9)
    assert "60.0" in table(rounds).splitlines()[-2]


@pytest.mark.parametrize(("share", "expected"), [(0.5, 5), (0.9, 9), (0.91, 10), (1.0, 10), (0, 1)])
def test_percentile_is_the_nearest_rank(share: float, expected: float) -> None:
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], share) == expected


def test_the_command_measures_ones_own_file(
    server: ScriptedOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "results" / "out.json"
    text.write_text("0123456789" * 2000)
    argv = ["--base-url", server.url, "--file", str(text), "--tokens", "1000", "--rounds", "2"]
    assert ttft.main([*argv, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [each["cold"]["prompt_tokens"] for each in report["rounds"]] == [
        pytest.approx(1000, abs=40)
    ] * 2
    assert {"commit", "cpu", "time"} <= report["machine"].keys()
    assert report["summary"]["ratio_p50"] > 0
    assert "median" in capsys.readouterr().out


def test_the_command_has_text_of_its_own(server: ScriptedOpenAI) -> None:
    assert ttft.main(["--base-url", server.url, "--tokens", "500", "--rounds", "1"]) == 0
    assert len(server.prompts()[-1]) == pytest.approx(1500, abs=150)


def test_a_server_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ttft.main(["--base-url", "http://127.0.0.1:9/v1"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    missing = ["--file", str(tmp_path / "none"), "--model", "m"]
    assert ttft.main([*missing, "--base-url", "http://127.0.0.1:9/v1"]) == 1
    assert "--file" in capsys.readouterr().err


def test_nonsense_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        ttft.main(["--rounds", "0"])
    assert stopped.value.code == 2
    assert "--rounds" in capsys.readouterr().err


def test_the_script_runs_alone_away_from_its_package(
    server: ScriptedOpenAI, tmp_path: Path
) -> None:
    script = shutil.copy(ttft.__file__, tmp_path / "ttft.py")
    text = tmp_path / "text.txt"
    text.write_text("Some words. " * 1000)
    options = ["--base-url", server.url, "--file", str(text), "--tokens", "100", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, script, *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "median" in done.stdout
