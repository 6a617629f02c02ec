"""The whole replay: a simulated fleet, ours as a process, the oracle, the bound."""

import json
from pathlib import Path

import pytest

from bench.replay.__main__ import main
from bench.replay.cases import MATRICES, Case, matrix
from bench.replay.contenders import peers
from bench.replay.fleet import FleetOptions
from bench.ttft import BenchError


def chat(turn: int) -> dict[str, object]:
    """One of three chats in turn, each longer than before."""
    ids = [1000 * (turn % 3) + block for block in range(2 * (turn // 3) + 2)]
    tokens = 512 * len(ids)
    return {"timestamp": 2000 * turn, "input_length": tokens, "output_length": 4, "hash_ids": ids}


def test_contenders_are_compared_and_everything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, records = tmp_path / "replay.json", tmp_path / "records.jsonl"
    contenders = ["ours-ttft", "ours-round-robin", "oracle", "no-queue"]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps(chat(turn))}\n" for turn in range(12)))
    small = ["--trace", str(trace), "--time-scale", "1", "--replicas", "2", "--speed", "20"]
    written = ["--out", str(out), "--records", str(records), "--plots", str(tmp_path / "plots")]
    assert main([*small, *written, "--contender", *contenders, "--costliest", "2"]) == 0
    (case,) = json.loads(out.read_text())["cases"]
    told = {each["contender"]: each for each in case["contenders"]}
    assert list(told) == contenders
    assert [(each["requests"], each["errors"]) for each in told.values()] == [(12, 0)] * 4
    assert all(each["hit_gpu"] > 0 for each in told.values())
    assert told["ours-ttft"]["router_cpu_s"] > 0
    assert told["no-queue"]["ttft_mean_s"] <= told["oracle"]["ttft_mean_s"]
    assert len(case["costliest"]) == 2
    assert len(records.read_text().splitlines()) == 48
    assert len(list((tmp_path / "plots").glob("*.png"))) == 3
    assert "where ours-ttft lost most" in capsys.readouterr().out


def test_a_peer_that_is_not_there_is_a_line_and_no_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--workload", "unique", "--requests", "2", "--replicas", "1", "--speed", "40"]
    nobody = ["--peers-python", str(tmp_path / "python")]
    assert main([*small, *nobody, "--contender", "vllm-cache-aware", "no-queue"]) == 0
    assert "cannot be started" in capsys.readouterr().out


def test_the_oracle_sees_what_it_has_just_decided(tmp_path: Path) -> None:
    """Eight equal prompts that share nothing and come at once: four for each of two replicas."""
    trace, out = tmp_path / "trace.jsonl", tmp_path / "replay.json"
    request = {"timestamp": 0, "input_length": 2048, "output_length": 4}
    ids = [{"hash_ids": list(range(4 * number, 4 * number + 4))} for number in range(8)]
    trace.write_text("".join(f"{json.dumps(request | each)}\n" for each in ids))
    small = ["--trace", str(trace), "--time-scale", "1", "--replicas", "2", "--speed", "2"]
    assert main([*small, "--contender", "oracle", "--out", str(out)]) == 0
    (oracle,) = json.loads(out.read_text())["cases"][0]["contenders"]
    assert (oracle["errors"], oracle["balance"]) == (0, 1.0)


def test_a_labelled_load_is_reported_with_what_was_measured(tmp_path: Path) -> None:
    """The bound needs no fleet: the case is made and answered at once."""
    out = tmp_path / "replay.json"
    small = ["--workload", "unique", "--requests", "50", "--replicas", "2", "--load", "0.5"]
    assert main([*small, "--contender", "no-queue", "--out", str(out)]) == 0
    (case,) = json.loads(out.read_text())["cases"]
    assert case["offered"]["real_load"] == pytest.approx(0.5, rel=0.03)
    assert (case["requests"], case["contenders"][0]["requests"]) == (50, 50)
    assert case["requests_not_reported"] >= 50


def test_of_a_matrix_the_impossible_cases_are_told_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Agents at 110% need more KV memory than these replicas have; single prompts do not."""
    cases = tuple(Case(workload=each, load=1.1, requests=1000) for each in ("agents", "unique"))
    monkeypatch.setitem(MATRICES, "workloads", cases)
    assert main(["--matrix", "workloads", "--contender", "no-queue"]) == 1
    told = capsys.readouterr()
    assert "agents at load 1.1 is not bound by the replicas' time: kv_memory" in told.err
    assert "unique, scarce cpu, fast disk, load 1.1: 1000 requests" in told.out


def test_a_time_scale_is_for_traces() -> None:
    with pytest.raises(BenchError, match="--time-scale"):
        Case(workload="unique", time_scale=0.8).work(FleetOptions(), None)


def test_a_matrix_can_be_cut_to_one_workload() -> None:
    agents = matrix("full", workload="agents", requests=10)
    assert {(each.workload, each.requests) for each in agents} == {("agents", 10)}
    assert {(each.cpu, each.disk) for each in agents} == {
        ("scarce", "fast"),
        ("scarce", "slow"),
        ("ample", "fast"),
    }
    assert len(agents) == 9
    with pytest.raises(BenchError, match="full"):
        matrix("regimes", workload="agents")


@pytest.mark.slow
def test_the_peers_serve_every_request(tmp_path: Path) -> None:
    out = tmp_path / "replay.json"
    names = [each.name for each in peers.contenders(peers.PeersPython(None))]
    small = ["--workload", "unique", "--requests", "8", "--replicas", "2", "--speed", "20"]
    assert main([*small, "--contender", *names, "--out", str(out)]) == 0
    (case,) = json.loads(out.read_text())["cases"]
    told = {each["contender"]: (each["why_not"], each["errors"]) for each in case["contenders"]}
    assert told == dict.fromkeys(names, (None, 0))
