"""Models whose layers do not all look back to the beginning: exact, or refused at start.

Of layers that all have a window vLLM keeps, and stores, the end of a prompt
alone: what an equal or longer prompt needs.
"""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.replica.tiers import call, wait_until
from router.launch.processes import ChildDiedError, ProcessGroup
from tests.e2e.serving import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    Replica,
    fresh_prompt,
    replica_on_free_ports,
    start_together,
)
from tests.e2e.window_models import hybrid, windowed
from warmroute_common.keys import HashScheme, chunk_keys

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

# Eight layers see 8 * 128 tokens back, less than the prompt.
WINDOW_TOKENS = 128
PROMPT_TOKENS = 5 * CHUNK_TOKENS + 20
HIT_TOKENS = 5 * CHUNK_TOKENS

MakeReplica = Callable[..., Replica]


@pytest.fixture(scope="module")
def make_replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeReplica]:
    """Make replicas of a model; they end with the module, which may see them die."""
    group = ProcessGroup()

    def make(name: str, model: Path, *vllm_args: str, chunk_tokens: int = CHUNK_TOKENS) -> Replica:
        return replica_on_free_ports(
            group,
            name,
            model,
            tmp_path_factory.mktemp(name),
            vllm_args=vllm_args,
            config={"chunk_size": chunk_tokens},
        )

    with group:
        yield make


class Pair(NamedTuple):
    """Replicas of the model whose layers all have windows, and of the one where every second has.

    They are started at once.
    """

    windowed: Replica
    hybrid: Replica


@pytest.fixture(scope="module")
def models(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The windowed model and the hybrid one."""
    directory = tmp_path_factory.mktemp("models")
    return (
        windowed(model_dir, directory / "windowed", window_tokens=WINDOW_TOKENS),
        hybrid(model_dir, directory / "hybrid", window_tokens=WINDOW_TOKENS),
    )


@pytest.fixture(scope="module")
def serving(make_replica: MakeReplica, models: tuple[Path, Path]) -> Iterator[Pair]:
    """Replicas that serve, each with the settings that its model needs."""
    pair = Pair(
        windowed=make_replica("windowed", models[0], chunk_tokens=BLOCK_TOKENS),
        hybrid=make_replica("hybrid", models[1]),
    )
    start_together(*pair)
    yield pair
    # The refused pair starts next.
    for each in pair:
        each.stop()


@pytest.fixture(scope="module")
def refused(make_replica: MakeReplica, models: tuple[Path, Path]) -> Pair:
    """Replicas that end while they start, since their settings do not suit their models."""
    more_blocks = ("--num-gpu-blocks-override", "128")
    pair = Pair(
        windowed=make_replica("windowed-refused", models[0]),
        hybrid=make_replica(
            "hybrid-refused", models[1], "--no-disable-hybrid-kv-cache-manager", *more_blocks
        ),
    )
    for each in pair:
        each.start()
    for each in pair:
        with pytest.raises(ChildDiedError):
            each.wait_ready()
    return pair


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


def test_windows_in_all_layers_with_a_chunk_of_one_block(serving: Pair, prompt: list[int]) -> None:
    replica = serving.windowed
    check_every_tier(replica, prompt, BLOCK_TOKENS)

    # The windows are real: what lies before them all changes nothing.
    other = fresh_prompt(BLOCK_TOKENS, seed=4) + prompt[BLOCK_TOKENS:]
    cold = replica.ask(other)
    assert cold.cached_tokens == 0
    replica.empty_gpu()
    replica.empty_cpu()
    call(f"{replica.agent_url}/clear", {})
    assert replica.ask(prompt).token_ids == cold.token_ids


def test_windows_beside_full_attention(serving: Pair, prompt: list[int]) -> None:
    """The launcher has vLLM keep every token of all layers: one group, and prefixes of it."""
    check_every_tier(serving.hybrid, prompt, CHUNK_TOKENS)
    assert len(serving.hybrid.tiers_of(prompt)) == HIT_TOKENS // CHUNK_TOKENS


def test_windows_in_all_layers_with_larger_chunks_are_refused(refused: Pair) -> None:
    log = refused.windowed.log
    assert "ValueError: all layers of this model have a sliding window (128 tokens)" in log
    assert "chunk_size: 128 in the cache configuration" in log


def test_several_kv_groups_are_refused(refused: Pair) -> None:
    assert "KV cache groups (hybrid or sliding-window layers" in refused.hybrid.log
    assert "Start vLLM with --disable-hybrid-kv-cache-manager" in refused.hybrid.log
