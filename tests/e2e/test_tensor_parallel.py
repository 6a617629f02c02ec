"""Two ranks, each with its slice of every chunk row."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheengine.launch import free_ports
from router.processes import ProcessGroup
from tests.e2e.serving import CHUNK_TOKENS, Replica, chunk_hexes, fresh_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

HIT_TOKENS = 3 * CHUNK_TOKENS


@pytest.fixture
def two_ranks(model_dir: Path, processes: ProcessGroup, tmp_path: Path) -> Iterator[Replica]:
    """A replica with tensor parallel size 2."""
    port, agent_port = free_ports(2)
    made = Replica(
        processes,
        "two-ranks",
        model_dir,
        tmp_path,
        port=port,
        agent_port=agent_port,
        of=2,
        vllm_args=["--tensor-parallel-size", "2"],
    )
    made.start()
    made.wait_ready()
    yield made
    made.stop()


def test_warm_answers_equal_across_ranks(two_ranks: Replica) -> None:
    prompt = fresh_prompt(HIT_TOKENS + 20, seed=zlib.crc32(b"two ranks"))
    two_ranks.ask(prompt)
    two_ranks.wait_stored(prompt)
    reference = two_ranks.ask(prompt)
    assert reference.cached_tokens == HIT_TOKENS

    two_ranks.empty_gpu()
    assert two_ranks.ask(prompt) == reference

    two_ranks.empty_gpu()
    two_ranks.empty_cpu()
    assert two_ranks.tiers_of(prompt) == ["disk"] * 3
    assert two_ranks.ask(prompt) == reference

    # One file a chunk, with the bytes of both ranks: 8 KiB of KV a token.
    (path,) = two_ranks.disk.rglob(f"{chunk_hexes(prompt)[0]}.kv")
    payload = path.read_bytes()[4096:]
    assert len(payload) == CHUNK_TOKENS * 8192
    halves = payload[: len(payload) // 2], payload[len(payload) // 2 :]
    assert all(any(half) for half in halves)
    assert halves[0] != halves[1]
