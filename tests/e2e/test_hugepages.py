"""Real replicas whose pools are on huge pages: they are used, and all of them come back."""

import zlib
from collections.abc import Callable, Iterator
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
)
from tests.huge_pages import counts, free_huge_pages

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

HIT_TOKENS = 3 * CHUNK_TOKENS
POOL_PAGES = 128  # 0.25 GB
SPARE_PAGES = 8

MakeReplica = Callable[..., Replica]


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    """What a test starts; ended with it."""
    with ProcessGroup() as made:
        yield made


@pytest.fixture
def make_replica(model_dir: Path, group: ProcessGroup, tmp_path: Path) -> MakeReplica:
    """Make replicas that ask for huge pages."""

    def make(name: str, *vllm_args: str) -> Replica:
        return replica_on_free_ports(
            group,
            name,
            model_dir,
            tmp_path,
            vllm_args=vllm_args,
            config={"max_local_cpu_size": 0.25, "local_cpu_use_hugepages": True},
        )

    return make


def wait_free(what: str, pages: int) -> None:
    """Wait until so many pages are free."""
    wait_until(what, lambda: counts().available == pages)


def check_warm(replica: Replica) -> None:
    """A prompt is answered from the pool as it was from the GPU tier."""
    prompt = fresh_prompt(HIT_TOKENS + 20, seed=zlib.crc32(replica.name.encode()))
    replica.ask(prompt)
    replica.wait_stored(prompt)
    reference = replica.ask(prompt)
    assert reference.cached_tokens == HIT_TOKENS
    replica.empty_gpu()
    assert replica.ask(prompt) == reference
    replica.empty_gpu()
    replica.empty_cpu()
    assert replica.ask(prompt) == reference


def test_the_pool_takes_huge_pages_and_gives_them_back(make_replica: MakeReplica) -> None:
    replica = make_replica("huge")
    with free_huge_pages(POOL_PAGES + SPARE_PAGES):
        start_together(replica)
        assert counts().available == SPARE_PAGES
        assert f"the pool is made of {POOL_PAGES} huge pages" in replica.log
        check_warm(replica)
        replica.stop()
        wait_free("all pages are back", POOL_PAGES + SPARE_PAGES)


def test_whoever_is_killed_gives_them_back(make_replica: MakeReplica, group: ProcessGroup) -> None:
    replica = make_replica("huge-killed")
    ranks = make_replica("huge-ranks", "--tensor-parallel-size", "2")
    with free_huge_pages(2 * POOL_PAGES + SPARE_PAGES):
        start_together(replica, ranks)
        assert counts().available == SPARE_PAGES, "two ranks share a pool"
        check_warm(ranks)
        check_warm(replica)
        # The server alone is killed: its engine follows, and its memory.
        replica.kill()
        wait_free("its pages are back", POOL_PAGES + SPARE_PAGES)
        # Server, engine and ranks at once.
        group.stop(ranks.name, kill=True)
        wait_free("all pages are back", 2 * POOL_PAGES + SPARE_PAGES)


def test_with_too_few_pages_it_says_so_and_serves(make_replica: MakeReplica) -> None:
    replica = make_replica("too-few")
    with free_huge_pages(POOL_PAGES - 1):
        start_together(replica)
        assert counts().available == POOL_PAGES - 1
        needed = f"{POOL_PAGES} huge pages of 2 MiB are needed and {POOL_PAGES - 1} are free"
        before_vllm, inside = (line for line in replica.log.splitlines() if needed in line)
        assert "too-few.yaml: local_cpu_use_hugepages: " in before_vllm
        assert "ordinary pages" in inside
        assert "sysctl -w vm.nr_hugepages=" in inside
        check_warm(replica)
        replica.stop()
