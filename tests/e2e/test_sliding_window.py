"""Models whose layers do not all look back to the beginning: exact, or refused at start.

Of layers that all have a window vLLM keeps, and stores, the end of a prompt
alone: what an equal or longer prompt needs.
"""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.tiers import call, wait_until
from cacheengine.keys import HashScheme, chunk_keys
from cacheengine.launch import free_ports
from router.processes import ChildDied, ProcessGroup
from tests.e2e.serving import BLOCK_TOKENS, CHUNK_TOKENS, Replica, fresh_prompt
from tests.e2e.window_models import hybrid, windowed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

# Eight layers see 8 * 128 tokens back, less than the prompt.
WINDOW_TOKENS = 128
PROMPT_TOKENS = 5 * CHUNK_TOKENS + 20
HIT_TOKENS = 5 * CHUNK_TOKENS

MakeReplica = Callable[..., Replica]


@pytest.fixture
def make_replica(tmp_path: Path) -> Iterator[MakeReplica]:
    """Start replicas of a model; they end with the test, which may see them die."""
    group = ProcessGroup()

    def make(name: str, model: Path, *vllm_args: str, chunk_tokens: int = CHUNK_TOKENS) -> Replica:
        port, agent_port = free_ports(2)
        made = Replica(
            group,
            name,
            model,
            tmp_path,
            port=port,
            agent_port=agent_port,
            of=2,
            vllm_args=vllm_args,
            config={"chunk_size": chunk_tokens},
        )
        made.start()
        return made

    with group:
        yield make


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> list[int]:
    """A prompt of its own for each test."""
    return fresh_prompt(PROMPT_TOKENS, seed=zlib.crc32(request.node.nodeid.encode()))


def tier_of_last_chunk(replica: Replica, prompt: list[int], chunk_tokens: int) -> list[str]:
    """Return the fastest tier that holds a prompt's last whole chunk, in a list; [] for none."""
    chain = HashScheme().chain(prompt, BLOCK_TOKENS)
    keys = [key.hex() for key in chunk_keys(chain, chunk_tokens // BLOCK_TOKENS)]
    tiers: list[str] = call(f"{replica.agent_url}/lookup", {"keys": keys[-1:]})["tiers"]
    return tiers


def check_every_tier(replica: Replica, prompt: list[int], chunk_tokens: int) -> None:
    """Answers from the CPU tier and from disk equal the GPU tier's of the same length."""

    def last_chunk_in(tier: str) -> Callable[[], bool]:
        return lambda: tier_of_last_chunk(replica, prompt, chunk_tokens) == [tier]

    assert replica.ask(prompt).cached_tokens == 0
    wait_until("the prompt is stored", last_chunk_in("cpu"))
    replica.settle()
    reference = replica.ask(prompt)
    assert reference.cached_tokens == HIT_TOKENS

    replica.empty_gpu()
    assert replica.ask(prompt) == reference

    replica.empty_gpu()
    replica.empty_cpu()
    assert last_chunk_in("disk")()
    assert replica.ask(prompt) == reference

    # The next turn: what was generated is a part of its prompt.
    spoken = prompt + list(replica.ask(prompt, max_tokens=300).token_ids)
    next_turn = spoken + fresh_prompt(30, seed=3)
    replica.ask(next_turn)
    wait_until(
        "the next turn is stored",
        lambda: tier_of_last_chunk(replica, next_turn, chunk_tokens) == ["cpu"],
    )
    replica.settle()
    reference = replica.ask(next_turn)
    assert reference.cached_tokens == len(next_turn) // CHUNK_TOKENS * CHUNK_TOKENS
    replica.empty_gpu()
    assert replica.ask(next_turn) == reference


def test_windows_in_all_layers_with_a_chunk_of_one_block(
    make_replica: MakeReplica, model_dir: Path, tmp_path: Path, prompt: list[int]
) -> None:
    model = windowed(model_dir, tmp_path / "windowed", window_tokens=WINDOW_TOKENS)
    replica = make_replica("windowed", model, chunk_tokens=BLOCK_TOKENS)
    replica.wait_ready()
    check_every_tier(replica, prompt, BLOCK_TOKENS)

    # The windows are real: what lies before them all changes nothing.
    other = fresh_prompt(BLOCK_TOKENS, seed=4) + prompt[BLOCK_TOKENS:]
    cold = replica.ask(other)
    assert cold.cached_tokens == 0
    replica.empty_gpu()
    replica.empty_cpu()
    call(f"{replica.agent_url}/clear", {})
    assert replica.ask(prompt).token_ids == cold.token_ids


def test_windows_in_all_layers_with_larger_chunks_are_refused(
    make_replica: MakeReplica, model_dir: Path, tmp_path: Path
) -> None:
    model = windowed(model_dir, tmp_path / "windowed", window_tokens=WINDOW_TOKENS)
    replica = make_replica("windowed-refused", model)
    with pytest.raises(ChildDied):
        replica.wait_ready()
    assert "ValueError: all layers of this model have a sliding window (128 tokens)" in replica.log
    assert "chunk_size: 128 in the cache configuration" in replica.log


def test_windows_beside_full_attention(
    make_replica: MakeReplica, model_dir: Path, tmp_path: Path, prompt: list[int]
) -> None:
    """The launcher has vLLM keep every token of all layers: one group, and prefixes of it."""
    model = hybrid(model_dir, tmp_path / "hybrid", window_tokens=WINDOW_TOKENS)
    replica = make_replica("hybrid", model)
    replica.wait_ready()
    check_every_tier(replica, prompt, CHUNK_TOKENS)
    assert len(replica.tiers_of(prompt)) == HIT_TOKENS // CHUNK_TOKENS


def test_several_kv_groups_are_refused(
    make_replica: MakeReplica, model_dir: Path, tmp_path: Path
) -> None:
    model = hybrid(model_dir, tmp_path / "hybrid", window_tokens=WINDOW_TOKENS)
    more_blocks = ("--num-gpu-blocks-override", "128")
    replica = make_replica(
        "hybrid-refused", model, "--no-disable-hybrid-kv-cache-manager", *more_blocks
    )
    with pytest.raises(ChildDied):
        replica.wait_ready()
    assert "KV cache groups (hybrid or sliding-window layers" in replica.log
    assert "Start vLLM with --disable-hybrid-kv-cache-manager" in replica.log
