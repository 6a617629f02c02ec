"""Replicas of one rank and of two, each with its slice of every chunk row; pools of huge pages.

In float32, where a cold prefill and a hit give the same tokens: in bfloat16
vLLM's own hits differ from it in the last bits. On huge pages, where root may
set their number: they are used, and all of them come back.
"""

import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.replica.tiers import call, wait_until
from router.launch.processes import ProcessGroup
from tests.e2e.serving import (
    CHUNK_TOKENS,
    Replica,
    chunk_hexes,
    fresh_prompt,
    replica_on_free_ports,
    start_together,
)
from tests.huge_pages import counts, free_huge_pages
from tests.stored_chunks import stored_chunks

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

CHUNKS = 5
HIT_TOKENS = CHUNKS * CHUNK_TOKENS
# 8 layers, keys and values, 4 heads of 64, 4 bytes each: what both ranks hold of a token.
TOKEN_BYTES = 8 * 2 * 4 * 64 * 4
POOL_PAGES = 128  # 0.25 GB
SPARE_PAGES = 8


class Pair(NamedTuple):
    """Two replicas that are started at once."""

    one_rank: Replica
    two_ranks: Replica


@pytest.fixture(scope="module")
def has_huge_pages() -> Iterator[bool]:
    """Whether there are huge pages for both pools: elsewhere they are of ordinary ones."""
    with ExitStack() as stack:
        try:
            stack.enter_context(free_huge_pages(2 * POOL_PAGES + SPARE_PAGES))
            found = True
        except pytest.skip.Exception:
            found = False
        yield found


@pytest.fixture(scope="module")
def pair(
    model_dir: Path, has_huge_pages: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Replicas with tensor parallel size 1 and 2."""
    with ProcessGroup() as group:

        def make(name: str, *vllm_args: str) -> Replica:
            return replica_on_free_ports(
                group,
                name,
                model_dir,
                tmp_path_factory.mktemp(name),
                vllm_args=["--dtype", "float32", *vllm_args],
                config={"local_cpu_use_hugepages": has_huge_pages},
            )

        made = Pair(
            one_rank=make("one-rank"),
            two_ranks=make("two-ranks", "--tensor-parallel-size", "2"),
        )
        start_together(*made)
        yield made


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> list[int]:
    """A prompt of its own for each test."""
    return fresh_prompt(HIT_TOKENS + 20, seed=zlib.crc32(request.node.nodeid.encode()))


def check_every_tier(replica: Replica, prompt: list[int]) -> None:
    """Answers from every tier are the GPU tier's, whose tokens are the cold prefill's."""
    cold = replica.ask(prompt)
    assert cold.cached_tokens == 0
    replica.wait_stored(prompt)
    from_gpu = replica.ask(prompt)
    assert from_gpu.cached_tokens == HIT_TOKENS
    assert from_gpu.token_ids == cold.token_ids

    replica.empty_gpu()
    assert replica.ask(prompt) == from_gpu

    replica.empty_gpu()
    replica.empty_cpu()
    assert replica.tiers_of(prompt) == ["disk"] * CHUNKS
    assert replica.ask(prompt) == from_gpu


def test_warm_answers_of_one_rank_equal_the_cold_one(pair: Pair, prompt: list[int]) -> None:
    check_every_tier(pair.one_rank, prompt)


def test_warm_answers_of_two_ranks_equal_the_cold_one(pair: Pair, prompt: list[int]) -> None:
    check_every_tier(pair.two_ranks, prompt)


def test_a_chunk_is_one_row_with_the_bytes_of_both_ranks(pair: Pair, prompt: list[int]) -> None:
    two_ranks = pair.two_ranks
    two_ranks.ask(prompt, max_tokens=1)
    two_ranks.wait_stored(prompt)
    assert call(f"{two_ranks.agent_url}/info")["chunk_bytes"] == CHUNK_TOKENS * TOKEN_BYTES

    path, start = stored_chunks(two_ranks.disk)[bytes.fromhex(chunk_hexes(prompt)[0])]
    payload = path.read_bytes()[start : start + CHUNK_TOKENS * TOKEN_BYTES]
    halves = payload[: len(payload) // 2], payload[len(payload) // 2 :]
    assert all(any(half) for half in halves)
    assert halves[0] != halves[1]
    # Every page of either rank was written, not only the first.
    pages = [half[at : at + 4096] for half in halves for at in range(0, len(half), 4096)]
    assert all(any(page) for page in pages)


def test_both_pools_are_of_huge_pages_and_give_them_back(pair: Pair, has_huge_pages: bool) -> None:
    """The last test here: it ends the replicas, one in order, one by killing its server alone."""
    if not has_huge_pages:
        pytest.skip("this machine cannot have the huge pages of two pools")
    assert counts().available == SPARE_PAGES, "two ranks share a pool"
    for each in pair:
        assert f"the pool uses {POOL_PAGES} huge pages" in each.log
    pair.one_rank.stop()
    wait_free(POOL_PAGES + SPARE_PAGES)
    pair.two_ranks.kill()
    wait_free(2 * POOL_PAGES + SPARE_PAGES)


def wait_free(pages: int) -> None:
    wait_until(f"{pages} pages are free", lambda: counts().available == pages)
