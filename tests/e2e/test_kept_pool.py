"""A replica that is killed and started again serves the same prompt from CPU RAM, bit for bit."""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.replica.tiers import wait_until
from router.launch.processes import ProcessGroup
from tests.e2e.serving import CHUNK_TOKENS, Replica, fresh_prompt, replica_on_free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

CHUNKS = 5
PROMPT = fresh_prompt(CHUNKS * CHUNK_TOKENS + 20, seed=31)


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def replica(request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path) -> Iterator[Replica]:
    kept = Path(f"/dev/shm/test-{uuid.uuid4()}")
    with ProcessGroup() as group:
        yield replica_on_free_ports(
            group,
            "kept",
            model_dir,
            tmp_path,
            vllm_args=["--tensor-parallel-size", str(request.param)],
            config={"keep_cpu_dir": str(kept)},
        )
    shutil.rmtree(kept)


def test_kill_restart_and_what_cpu_ram_remembers(replica: Replica) -> None:
    replica.start()
    replica.wait_ready()
    replica.ask(PROMPT)
    replica.wait_stored(PROMPT)
    from_gpu = replica.ask(PROMPT)
    assert from_gpu.cached_tokens == CHUNKS * CHUNK_TOKENS

    replica.kill_all()
    # The disk's copy cannot be what answers.
    shutil.rmtree(replica.disk)
    replica.start()
    replica.wait_ready()
    wait_until("the chunks are checked", lambda: replica.tiers_of(PROMPT) == ["cpu"] * CHUNKS)
    assert replica.ask(PROMPT) == from_gpu
    assert replica.vllm_metric("vllm:external_prefix_cache_hits_total") == CHUNKS * CHUNK_TOKENS
    assert not list(Path("/dev/shm").glob("vllm_offload_*"))
