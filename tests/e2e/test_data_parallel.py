"""One replica of two data parallel ranks: each has an engine, an agent and a directory of its own.

In float32, where a cold prefill and a hit give the same tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.replica.tiers import call
from cacheengine.launch.vllm_launch import free_ports
from router.launch.processes import ProcessGroup
from tests.e2e.serving import CHUNK_TOKENS, Answer, Replica, fresh_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

CHUNKS = 4
HIT_TOKENS = CHUNKS * CHUNK_TOKENS


class Rank(NamedTuple):
    """One rank as the test sees it: its agent and its disk, and the server of both."""

    number: int
    tiers: Replica

    def ask(self, prompt: list[int]) -> Answer:
        """Have this rank answer."""
        return self.tiers.ask(prompt, headers={"X-data-parallel-rank": str(self.number)})


@pytest.fixture(scope="module")
def ranks(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Rank]]:
    """The ranks of a replica that serves."""
    directory = tmp_path_factory.mktemp("ranks")
    (port,) = free_ports(1)
    (agent_port,) = free_ports(1, in_a_row=2)
    with ProcessGroup() as group:
        whole, second = (
            Replica(
                group,
                f"rank{rank}",
                model_dir,
                directory,
                port=port,
                agent_port=agent_port + rank,
                of=2,
                vllm_args=["--dtype", "float32", "--data-parallel-size", "2"],
            )
            for rank in range(2)
        )
        # The process is started once; the second is a view of its second rank.
        second.disk = whole.disk / "dp1"
        whole.start()
        whole.wait_ready()
        yield [Rank(0, whole), Rank(1, second)]


def test_each_rank_keeps_and_finds_what_it_computed(ranks: list[Rank]) -> None:
    first, second = ranks
    prompt = fresh_prompt(HIT_TOKENS + 20, seed=1)
    cold = first.ask(prompt)
    assert cold.cached_tokens == 0
    first.tiers.wait_stored(prompt)
    assert second.tiers.tiers_of(prompt) == [], "the other rank's engine is another one"
    assert list(first.tiers.disk.glob("*/*.kv"))
    assert not list(second.tiers.disk.glob("*/*.kv"))

    assert second.ask(prompt) == cold
    second.tiers.wait_stored(prompt)
    assert list(second.tiers.disk.glob("*/*.kv"))

    for rank in ranks:
        rank.tiers.empty_gpu()
        from_cpu = rank.ask(prompt)
        assert (from_cpu.cached_tokens, from_cpu.token_ids) == (HIT_TOKENS, cold.token_ids)
        rank.tiers.empty_gpu()
        rank.tiers.empty_cpu()
        assert rank.tiers.tiers_of(prompt) == ["disk"] * CHUNKS
        assert rank.ask(prompt) == from_cpu


def test_each_rank_tells_its_own_name_and_ports(ranks: list[Rank]) -> None:
    first, second = (call(f"{rank.tiers.agent_url}/info") for rank in ranks)
    assert second["instance_id"] == f"{first['instance_id']}_dp1"
    assert second["kv_events_port"] == first["kv_events_port"] + 1
    assert second["kv_replay_port"] == first["kv_replay_port"] + 1
    sources = call(f"{ranks[0].tiers.url}/kv_event_sources")
    told = [sources[str(rank)]["endpoint"].rpartition(":")[2] for rank in range(2)]
    assert told == [str(first["kv_events_port"]), str(second["kv_events_port"])]
