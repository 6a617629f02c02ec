"""`warmroute waste` before two real vLLM replicas: five planted mistakes, named with tokens."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.replica.tiers import call, knows_replicas, metric, wait_until
from cacheengine.launch.vllm_launch import free_ports
from router.launch.processes import ProcessGroup
from tests.e2e.serving import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    MODEL,
    Replica,
    Router,
    fresh_prompt,
    replica_on_free_ports,
    start_together,
)
from tests.router.waste.planted import Agent, Planted, access, of_key, report

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

_CHUNK_BYTES = 8192 * CHUNK_TOKENS
_POOL_CHUNKS = 10
"""The CPU RAM is too small for what the agents have under way."""

_TOOL_CALLS = ("--enable-auto-tool-choice", "--tool-call-parser", "pythonic")


@pytest.fixture(scope="module")
def replicas(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    """Two replicas with little CPU RAM, and no disk."""
    directory = tmp_path_factory.mktemp("waste")
    with ProcessGroup() as group:
        config = {
            "max_local_cpu_size": (_POOL_CHUNKS + 0.5) * _CHUNK_BYTES / 1024**3,
            "local_disk": None,
            "max_local_disk_size": 0.0,
        }
        made = [
            replica_on_free_ports(
                *(group, name, model_dir, directory), vllm_args=_TOOL_CALLS, config=config
            )
            for name in ("waste1", "waste2")
        ]
        start_together(*made)
        yield made


@pytest.fixture
def router(replicas: list[Replica], processes: ProcessGroup, tmp_path: Path) -> Iterator[Router]:
    """A router with a key for each mistake."""
    (port,) = free_ports(1)
    listed = [
        {"url": each.url, "agent_url": each.agent_url, "instance_id": each.name}
        for each in replicas
    ]
    # At home always: a short prefill may be cheaper elsewhere, which costs tokens by no mistake.
    settings = {"port": port, "replicas": listed, "access": access(), "policy": "session"}
    with Router(processes, "router-waste", tmp_path, settings) as made:
        # Its start waits 1 s for that; prompts before are matched by their text.
        wait_until(
            "the router knows the replicas' tokens",
            partial(knows_replicas, made.url, MODEL, len(replicas)),
        )
        yield made


def test_five_planted_mistakes_are_named_with_their_tokens(
    replicas: list[Replica], router: Router
) -> None:
    """The causes of each key add up to what vLLM computed, by its own counters."""
    planted = Planted(router.url, MODEL)
    history = planted.history(6)[:4]

    def is_held() -> bool:
        shown = call(f"{router.url}/explain", {"model": MODEL, "messages": history})
        return any(sum(each["matched_tokens"].values()) for each in shown["candidates"])

    def evict() -> None:
        for replica in replicas:
            for seed in range(4):
                replica.ask(fresh_prompt(3800, seed=seed), max_tokens=1)
        wait_until("its KV has left all caches", lambda: not is_held())

    def computed() -> float:
        name, source = "vllm:prompt_tokens_by_source_total", "local_compute"
        return sum(metric(each.url, name, source=source) for each in replicas)

    before = computed()
    agents = [planted.sound(), planted.stamp(), planted.tools(), planted.salt()]
    cut, kept = planted.cut()
    stamp, tools, salt = agents[1:]
    by_counters = computed() - before
    shown, _ = report(router.url)
    assert abs(shown["computed_tokens"] - by_counters) <= 0.02 * by_counters

    ram = planted.ram(evict)
    shown, text = report(router.url)
    assert shown["unreported_tokens"] == 0

    def of(agent: Agent, cause: str) -> int:
        found = of_key(shown, agent.key)
        assert found["computed_tokens"] == agent.computed
        return int(found["causes"].get(cause, {"tokens": 0})["tokens"])

    for agent, cause, lost in (
        (stamp, "changed", stamp.lost(BLOCK_TOKENS)),
        (tools, "changed", tools.lost(BLOCK_TOKENS)),
        (cut, "changed", kept // BLOCK_TOKENS * BLOCK_TOKENS - cut.cached[-1]),
        (salt, "declined", salt.lost(BLOCK_TOKENS)),
        (ram, "evicted", ram.lost(BLOCK_TOKENS)),
    ):
        assert lost > 0.2 * agent.computed, "the mistake costs something"
        assert abs(of(agent, cause) - lost) <= 0.02 * agent.computed, (agent.key, lost, text)
    flat = " ".join(text.split())
    for words in (
        "the key 'stamp' sends something that changes near the beginning of messages[0].content",
        "the key 'tools' sends the same tools in changing orders",
        "the key 'cut' sends histories whose beginnings were cut",
        "the key 'salt' sends prompts of one session with changing salts",
        "the key 'ram' sends prompts whose KV had left the",
    ):
        assert words in flat, text
