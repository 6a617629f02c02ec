"""A prompt of more chunks than the CPU tier takes at once: none of them is lost."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.launch.processes import ProcessGroup
from tests.e2e.serving import (
    CHUNK_TOKENS,
    MAX_MODEL_TOKENS,
    Replica,
    chunk_hexes,
    fresh_prompt,
    replica_on_free_ports,
)
from tests.stored_chunks import stored_chunks

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

POOL_CHUNKS = 4
PROMPT_CHUNKS = 13
_CHUNK_BYTES = 8192 * CHUNK_TOKENS


@pytest.fixture(scope="module")
def replica(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A replica whose CPU tier holds a third of the prompt, and whose disk holds all of it."""
    with ProcessGroup() as group:
        replica = replica_on_free_ports(
            group,
            "small-pool",
            model_dir,
            tmp_path_factory.mktemp("small-pool"),
            config={"max_local_cpu_size": (POOL_CHUNKS + 0.5) * _CHUNK_BYTES / 1024**3},
        )
        replica.start()
        replica.wait_ready()
        yield replica


def test_chunks_that_found_no_room_are_stored_while_the_request_runs(replica: Replica) -> None:
    """vLLM offers a prompt's chunks once; chunks refused because the pool is full come again."""
    prompt = fresh_prompt(PROMPT_CHUNKS * CHUNK_TOKENS + 5, seed=11)
    # It runs as long as it can: the disk has that time to make room.
    replica.ask(prompt, max_tokens=MAX_MODEL_TOKENS - len(prompt))
    replica.settle()
    stored = {chunk.hex() for chunk in stored_chunks(replica.disk)}
    hexes = chunk_hexes(prompt)
    lost = [number for number, each in enumerate(hexes) if each not in stored]
    assert len(hexes) == PROMPT_CHUNKS and lost == []
