"""Which models are refused at start, told by their layers' kinds."""

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
    # Importing vLLM and its dependencies warns about their own deprecations.
    pytest.mark.filterwarnings("default"),
]

BLOCK_TOKENS = 128
EACH_A_GROUP = 0


def kv_spec(kind: str) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    heads = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 4,
        "head_size": 64,
        "dtype": torch.bfloat16,
    }
    match kind:
        case "full":
            return FullAttentionSpec(**heads)
        case "latent":
            return MLAAttentionSpec(**{**heads, "num_kv_heads": 1})
        case "window":
            return SlidingWindowSpec(**heads, sliding_window=4096)
        case "local":
            return ChunkedLocalAttentionSpec(**heads, attention_chunk_size=4096)
        case _:
            return MambaSpec(block_size=BLOCK_TOKENS, shapes=((4, 4),), dtypes=(torch.bfloat16,))


class LayerMemory:
    """Stands for an attention layer of a model."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def get_kv_cache_spec(self, vllm_config: object) -> Any:
        return kv_spec(self._kind)


def check(monkeypatch: pytest.MonkeyPatch, kinds: list[str], blocks_per_chunk: int) -> None:
    from cacheengine.connector import model_identity as attention

    layers = {f"layer{i}": LayerMemory(kind) for i, kind in enumerate(kinds)}

    def layers_of(config: object, layer_type: object, names: Any) -> dict[str, LayerMemory]:
        return {name: layers[name] for name in names}

    monkeypatch.setattr(attention, "get_current_vllm_config_or_none", object)
    monkeypatch.setattr(attention, "get_layers_from_vllm_config", layers_of)
    attention.check_groups([layers] if blocks_per_chunk else [[name] for name in layers])
    attention.check_attention(layers, blocks_per_chunk)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        # vLLM makes one group of these where it is told to.
        (["full", "window"], "2 KV cache groups .* --disable-hybrid-kv-cache-manager"),
        (["full", "local", "window"], "3 KV cache groups"),
        # Of these it cannot.
        (["full", "mamba"], r"FullAttentionSpec, MambaSpec.*does not support. Start vLLM without"),
    ],
)
def test_several_groups_are_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(monkeypatch, kinds, blocks_per_chunk=EACH_A_GROUP)


@pytest.mark.parametrize(
    ("kinds", "blocks_per_chunk"),
    [
        (["full", "full"], 2),
        (["latent"], 16),
        # One group with both: vLLM keeps every token of all layers.
        (["window", "full"], 2),
        (["local", "full"], 2),
        # A chunk of one block is whole or not there.
        (["window", "window"], 1),
    ],
)
def test_models_whose_chunks_are_whole(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], blocks_per_chunk: int
) -> None:
    check(monkeypatch, kinds, blocks_per_chunk)


@pytest.mark.parametrize(
    ("kinds", "blocks_per_chunk", "message"),
    [
        (["window", "window"], 2, "4096 tokens.*chunk_size: 128 .* --block-size 256"),
        (["mamba"], 1, r"MambaSpec.*does not support"),
        (["local"], 1, r"ChunkedLocalAttentionSpec.*does not support"),
        (["window", "mamba"], 1, r"MambaSpec, SlidingWindowSpec"),
    ],
)
def test_models_that_are_refused(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], blocks_per_chunk: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(monkeypatch, kinds, blocks_per_chunk)


def test_outside_a_worker_there_is_nothing_to_look_at() -> None:
    from cacheengine.connector.model_identity import check_attention

    check_attention(["layer0"], 2)
