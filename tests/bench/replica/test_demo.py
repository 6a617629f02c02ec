"""The demo's table and verdict, and what it says when it cannot start."""

import socket
from pathlib import Path

import pytest

from bench.replica import demo
from bench.replica.demo import Sample, caption, strays, table


def sample(
    row: str, ttft_s: float, replica: str = "replica1", why: str = "longest-match"
) -> Sample:
    return Sample(
        row=row, ttft_s=ttft_s, prompt_tokens=15_000, replica=replica, why=why, matched="-"
    )


ROUNDS = [
    sample("cold", 8.0, why="no-information"),
    sample("gpu", 0.1),
    sample("disk", 0.2),
    sample("other", 8.1, replica="replica2", why="asked directly"),
    sample("cold", 6.0, replica="replica2"),
    sample("gpu", 0.1, replica="replica2"),
    sample("disk", 0.2, replica="replica2"),
    sample("other", 6.1, replica="replica1"),
]


def test_the_table_has_a_line_for_each_measured_row_with_its_ratio() -> None:
    lines = table(ROUNDS).splitlines()[2:]
    assert len(lines) == 4
    assert lines[0].split("it", 1)[1].split()[:3] == ["7.000", "1.0", "replica2"]
    assert lines[1].split("tier", 1)[1].split()[:2] == ["0.100", "70.0"]


def test_the_caption_names_the_model_and_the_machine() -> None:
    small = caption(None, {"cpu": "2 x CPU", "gpu": None})
    assert "27 million parameters" in small
    assert "on 2 x CPU." in small
    assert "of org/large,\non H100." in caption("org/large", {"cpu": "2 x CPU", "gpu": "H100"})


def test_a_warm_row_that_went_elsewhere_is_said() -> None:
    assert strays(ROUNDS) == []
    wrong = [sample("cold", 8.0), sample("gpu", 0.1, replica="replica2"), sample("other", 1.0)]
    first, second = strays(wrong)
    assert "GPU" in first
    assert "served by replica2" in first
    assert "other" in second


def test_a_taken_port_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setattr(demo, "PLAIN_ROUTER_PORT", listening.getsockname()[1])
        assert demo.main(["--model", "unused"]) == 1
        port = listening.getsockname()[1]
    assert f"already on port {port}" in capsys.readouterr().err
    assert not (tmp_path / ".warmroute" / "demo").exists()


def test_a_machine_without_vllm_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMROUTE_REPLICA", "vlm")
    assert demo.main([]) == 1
    assert "WARMROUTE_REPLICA" in capsys.readouterr().err


def test_too_short_a_prompt_is_refused() -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--tokens", "10"])
    assert stopped.value.code == 2
