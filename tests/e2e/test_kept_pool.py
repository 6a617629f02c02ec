"""Replicas that are killed and started again serve the same prompt from CPU RAM, bit for bit."""

import shutil
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.replica.tiers import wait_until
from router.launch.processes import ProcessGroup
from tests.e2e.serving import (
    CHUNK_TOKENS,
    Replica,
    fresh_prompt,
    replica_on_free_ports,
    start_together,
    wait_no_shared_memory,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

CHUNKS = 5
PROMPT = fresh_prompt(CHUNKS * CHUNK_TOKENS + 20, seed=31)


def is_in_cpu(replica: Replica) -> bool:
    return replica.tiers_of(PROMPT) == ["cpu"] * CHUNKS


@pytest.fixture
def replicas(model_dir: Path, tmp_path: Path) -> Iterator[list[Replica]]:
    """Replicas of one rank and of two, which are not started yet."""
    kept = Path(f"/dev/shm/test-{uuid.uuid4()}")
    with ProcessGroup() as group:
        yield [
            replica_on_free_ports(
                group,
                f"ranks{ranks}",
                model_dir,
                tmp_path,
                vllm_args=["--tensor-parallel-size", str(ranks)],
                config={"keep_cpu_dir": str(kept / str(ranks))},
            )
            for ranks in (1, 2)
        ]
    shutil.rmtree(kept)


def test_kill_restart_and_what_cpu_ram_remembers(replicas: list[Replica]) -> None:
    start_together(*replicas)
    answers = []
    for replica in replicas:
        replica.ask(PROMPT)
        replica.wait_stored(PROMPT)
        answers.append(replica.ask(PROMPT))
        assert answers[-1].cached_tokens == CHUNKS * CHUNK_TOKENS

    for replica in replicas:
        replica.kill_all()
        # The disk's copy cannot be what answers.
        shutil.rmtree(replica.disk)
    start_together(*replicas)
    for replica, from_gpu in zip(replicas, answers, strict=True):
        wait_until("the chunks are checked", partial(is_in_cpu, replica))
        assert replica.ask(PROMPT) == from_gpu
        assert replica.vllm_metric("vllm:external_prefix_cache_hits_total") == CHUNKS * CHUNK_TOKENS
    wait_no_shared_memory()
