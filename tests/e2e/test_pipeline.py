"""Pipeline parallel replicas: stages of different size are refused at start.

Equal ones are accepted, which is not shown here: vLLM 0.32 computes nothing with pipeline
parallel stages on CPUs (they start, and the second stage fails at its first step).
"""

from pathlib import Path

import pytest

from router.launch.processes import ChildDiedError, ProcessGroup
from tests.e2e.serving import replica_on_free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_stages_of_different_size_are_refused_at_start(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "5,3")
    with ProcessGroup() as group:
        stages = ["--pipeline-parallel-size", "2"]
        replica = replica_on_free_ports(group, "unequal", model_dir, tmp_path, vllm_args=stages)
        replica.start()
        with pytest.raises(ChildDiedError):
            replica.wait_ready()
    told = "ValueError: the pipeline stages of this replica keep different amounts of KV"
    assert told in replica.log
    assert "Choose a --pipeline-parallel-size that divides the number of layers" in replica.log
