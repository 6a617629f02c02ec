"""Ranks that cannot share chunk rows are refused, after they have asked each other."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cacheengine.launch.vllm_launch import free_ports

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(240),
    # Importing vLLM and its dependencies warns about their own deprecations.
    pytest.mark.filterwarnings("default"),
]

ONE_RANK = """
import sys
from pathlib import Path
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment
from cacheengine.connector import spec

def check(kv_bytes):
    try:
        spec.check_ranks(kv_bytes)
    except ValueError as error:
        print(f"refused: {error}")
    else:
        print("accepted")

rank, port, machine = sys.argv[1:]
with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(2, int(rank), f"tcp://127.0.0.1:{port}", int(rank), "gloo")
    check(4096)
    check(4096 * (1 + int(rank)))
    spec._BOOT_ID = Path(machine)
    check(4096)
"""


def test_ranks_ask_each_other_and_come_to_the_same(tmp_path: Path) -> None:
    machines = [tmp_path / "here", tmp_path / "there"]
    for machine in machines:
        machine.write_text(f"{machine.name}\n")
    (port,) = free_ports(1)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_RANK, str(rank), str(port), str(machine)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, machine in enumerate(machines)
    ]
    for rank in ranks:
        alike, stages, apart = rank.communicate(timeout=200)[0].splitlines()[-3:]
        assert alike == "accepted"
        assert "keep different amounts of KV (4096, 8192 bytes per block)" in stages
        assert "--pipeline-parallel-size that divides the number of layers" in stages
        assert "the 2 tensor or pipeline parallel ranks of this replica are on 2 machines" in apart
        assert "Start one replica on each machine" in apart


def test_a_rank_alone_has_nobody_to_ask() -> None:
    from cacheengine.connector.spec import check_ranks

    check_ranks(4096)
