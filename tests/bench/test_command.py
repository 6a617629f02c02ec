"""What a result says of its command."""

from pathlib import Path

import pytest

from bench.command import origin

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--json", "/home/me/soak.json"], "--json soak.json"),
        (["--json=/home/me/soak.json", "--logs", "/var/x/"], "--json=soak.json --logs x"),
        (["--json", f"{ROOT}/bench/results/soak.json"], "--json bench/results/soak.json"),
        (
            ["router", "--minutes", "1.5", "--json", "a/b.json"],
            "router --minutes 1.5 --json a/b.json",
        ),
    ],
)
def test_a_command_names_no_directory_outside_of_the_tree(given: list[str], shown: str) -> None:
    assert origin("bench.soak", given, None)["command"] == f"python -m bench.soak {shown}"
