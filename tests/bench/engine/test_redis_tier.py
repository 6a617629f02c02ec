"""The benchmark of the remote tier: it runs, it checks what it moves, and it says what it found."""

import json
import shutil
from pathlib import Path

import pytest

from bench.engine.redis_tier import OURS, STOCK, Bench, Result, main, server, shares
from bench.ttft import BenchError
from tests.servers import missing, redis_program


@pytest.fixture(autouse=True)
def _has_redis() -> None:
    redis_program()
    if shutil.which("redis-benchmark") is None:
        missing("redis-benchmark")


def test_every_client_moves_every_value_both_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    options = ["--value-bytes", "100000", "--values", "20", "--threads", "1", "2", "--rounds", "2"]
    assert main([*options, "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert len(written["results"]) == 3 * 2 * 2
    for result in written["results"]:
        assert len(result["samples"]) == 2
        assert result["gb_per_s"] > 0
    assert len(written["share_of"]) == 2 * 2 * 2
    assert written["command"] == f"python -m bench.engine.redis_tier {' '.join(options)}"
    assert "put, 1 threads, of redis-benchmark" in capsys.readouterr().out


def test_a_wrong_byte_is_found() -> None:
    with server() as port:
        bench = Bench(port, 10_000, 3)
        try:
            list(bench.round(1))
            bench.check()
            bench._targets[2][1][9_999] ^= 1
            with pytest.raises(BenchError, match="not the one that was stored"):
                bench.check()
        finally:
            bench.close()


def test_shares_are_of_the_same_operation_and_threads() -> None:
    def result(client: str, operation: str, gb_per_s: float) -> Result:
        return Result(
            client=client, operation=operation, threads=1, gb_per_s=gb_per_s, samples=[gb_per_s]
        )

    results = [result(OURS, "put", 1.0), result(OURS, "get", 3.0)]
    results += [result(STOCK, "put", 2.0), result(STOCK, "get", 2.0)]
    assert shares(results) == {
        "put, 1 threads, of redis-benchmark": 0.5,
        "get, 1 threads, of redis-benchmark": 1.5,
    }


def test_without_a_server_it_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main([]) == 1
    assert "apt-get install redis-tools" in capsys.readouterr().err
