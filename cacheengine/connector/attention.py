"""Which models' KV the engine can keep exactly: told by their layers, at start."""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.config import get_current_vllm_config_or_none, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)


def check_groups(layer_names: Sequence[Iterable[str]]) -> None:
    """Raise ValueError, with the way out, unless all layers' KV is in one group.

    Takes the names of each group's layers. Says more in a worker, which knows them.
    """
    if len(layer_names) == 1:
        return
    specs = [spec for names in layer_names for spec in _kv_specs(names)]
    if not all(isinstance(spec, _UNIFIABLE) for spec in specs):
        raise ValueError(_holds_not(specs))
    raise ValueError(
        f"this model has {len(layer_names)} KV cache groups (hybrid or "
        "sliding-window layers beside full attention); the cache engine supports "
        "models with one group. Start vLLM with --disable-hybrid-kv-cache-manager, as "
        "`warmroute replica` does, or without the engine (no --kv-transfer-config)"
    )


_UNIFIABLE = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""What vLLM makes one group of where it is told to."""


def check_attention(layer_names: Iterable[str], blocks_per_chunk: int) -> None:
    """Raise ValueError, with the way out, if chunks of this one KV group could be wrong.

    To be called in a worker process while vLLM builds its KV cache: there the
    layers are known, which the offloading interface does not describe.
    """
    problem = _problem(_kv_specs(layer_names), blocks_per_chunk)
    if problem is not None:
        raise ValueError(problem)


def _kv_specs(layer_names: Iterable[str]) -> list[Any]:
    """Return how each layer keeps its KV; nothing outside a worker."""
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return []
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
    return [layer.get_kv_cache_spec(vllm_config) for layer in layers.values()]


def _problem(kv_specs: Sequence[Any], blocks_per_chunk: int) -> str | None:
    # With one layer of full attention in a group, vLLM keeps every token of
    # the others too (that is what makes it one group).
    if not kv_specs or any(isinstance(spec, FullAttentionSpec) for spec in kv_specs):
        return None
    if not all(isinstance(spec, SlidingWindowSpec) for spec in kv_specs):
        return _holds_not(kv_specs)
    if blocks_per_chunk == 1:
        return None
    # vLLM frees and reuses blocks that leave the window, and stores what is
    # left of a chunk (`_build_store_jobs` skips blocks that are gone). If the
    # pool had no room at first, the chunk is stored late, with a block missing
    # that a shorter prompt still needs: a wrong answer. A chunk of one block
    # is stored whole or not at all.
    window_tokens = min(spec.sliding_window for spec in kv_specs)
    block_tokens = kv_specs[0].block_size
    return (
        f"all layers of this model have a sliding window ({window_tokens} tokens), so vLLM "
        f"may store a chunk of {blocks_per_chunk} blocks in part. Make a chunk one block: "
        f"chunk_size: {block_tokens} in the cache configuration, or --block-size "
        f"{block_tokens * blocks_per_chunk} where the attention backend allows it; or "
        "--disable-sliding-window, which also limits the context to the window"
    )


def _holds_not(kv_specs: Iterable[Any]) -> str:
    kinds = ", ".join(sorted({type(spec).__name__ for spec in kv_specs}))
    return (
        f"this model's layers keep something else than the KV of every token ({kinds}); "
        "the cache engine cannot hold that. Start vLLM without it (no --kv-transfer-config)"
    )
