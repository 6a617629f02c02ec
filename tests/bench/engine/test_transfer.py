"""The benchmark of transfers, on a few small chunks."""

import json
from pathlib import Path

import pytest

from bench.engine import transfer


@pytest.mark.slow
def test_every_way_is_measured_and_written(tmp_path: Path) -> None:
    out = tmp_path / "results" / "transfer.json"
    assert transfer.main(["--chunks", "3", "--mib", "1", "--rounds", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["command"] == "python -m bench.engine.transfer --chunks 3 --mib 1 --rounds 1"
    measured = {(each["what"], each["connections"]) for each in report["results"]}
    assert {("plain socket copy", 1), ("engine to engine", 1), ("engine to engine", 4)} <= measured
    assert all(each["gb_per_s"] > 0 for each in report["results"])


def test_the_table_compares_equal_numbers_of_connections() -> None:
    def result(what: str, connections: int, rate: float) -> transfer.Result:
        return transfer.Result(
            what=what,
            connections=connections,
            gb_per_s=rate,
            p10_gb_per_s=rate,
            p90_gb_per_s=rate,
            cpu_s_per_gb=1.0,
            samples_s=[1.0],
        )

    lines = transfer.table(
        [
            result("memcpy", 1, 10.0),
            result("plain socket copy", 2, 4.0),
            result("engine to engine", 2, 3.0),
        ]
    ).splitlines()
    assert lines[1].split() == ["memcpy", "1", "10.00", "10.00", "10.00"]
    assert lines[3].split()[-1] == "75%"
