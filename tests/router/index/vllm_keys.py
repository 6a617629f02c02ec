"""vLLM's own keys, events and model list for requests with salts, adapters and media.

A process of its own. Prints one JSON object: by algorithm, for each case its block
hashes and its KV event's message, both in hex; the entries of ``/v1/models``; the
adapters used; and for each hybrid model the messages of its `KVCacheManager`.
"""

import asyncio
import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry, OpenAIServingModels
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

BLOCK = 16


def adapter(name: str, path: str, number: int = 1) -> LoRARequest:
    """Return an adapter as it comes to the engine: over a wire."""
    sent = msgspec.msgpack.encode(LoRARequest(name, number, path, base_model_name="base"))
    return msgspec.msgpack.decode(sent, type=LoRARequest)


def feature(offset: int, length: int) -> MultiModalFeatureSpec:
    """Return an image of N tokens."""
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier="image hash",
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def spec(kind: str, block_tokens: int) -> KVCacheSpec:
    """Return the spec of a cache group of a hybrid model."""
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    if kind == "mamba":
        state: dict[str, Any] = {"shapes": ((8,),), "dtypes": (torch.float32,)}
        return MambaSpec(block_size=block_tokens, mamba_cache_mode="align", **state)
    if kind == "sliding":
        return SlidingWindowSpec(block_size=block_tokens, sliding_window=128, **shape)
    return FullAttentionSpec(block_size=block_tokens, **shape)


def hybrid(groups: list[tuple[str, int]], prompts: list[list[int]]) -> list[str]:
    """Return what a hybrid model publishes of prompts: its messages in hex, one a prompt."""
    hasher = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hasher)
    sizes = [size for _, size in groups]
    specs = [KVCacheGroupSpec([f"layer{at}"], spec(*each)) for at, each in enumerate(groups)]
    config = KVCacheConfig(num_blocks=500, kv_cache_tensors=[], kv_cache_groups=specs)
    manager = KVCacheManager(
        config,
        max_model_len=4096,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=math.gcd(*sizes),
        enable_kv_cache_events=True,
    )
    messages = []
    for number, tokens in enumerate(prompts):
        request = Request(
            request_id=f"r{number}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=kv_cache_utils.get_request_block_hasher(math.gcd(*sizes), hasher),
        )
        assert manager.allocate_slots(request, len(tokens)) is not None
        batch = KVEventBatch(ts=1.0, events=manager.take_events())
        messages.append(msgspec.msgpack.encode(batch).hex())
    return messages


def answers(algorithm: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what vLLM makes of all cases with one algorithm."""
    hasher = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hasher)
    return [answer(case, hasher) for case in cases]


def answer(case: dict[str, Any], hasher: Any) -> dict[str, Any]:
    """Return what vLLM makes of one case."""
    request = Request(
        request_id="r",
        prompt_token_ids=case["tokens"],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=adapter(*case["lora"]) if case["lora"] else None,
        cache_salt=case["salt"],
        mm_features=[feature(*case["medium"])] if case["medium"] else None,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, hasher),
    )
    count = len(request.block_hashes)
    pool = BlockPool(count + 2, True, BLOCK, enable_kv_cache_events=True)
    pool.cache_full_blocks(request, pool.get_new_blocks(count), 0, count, BLOCK, 0)
    batch = KVEventBatch(ts=1.0, events=pool.take_events())
    return {
        "keys": [one.hex() for one in request.block_hashes],
        "event": msgspec.msgpack.encode(batch).hex(),
    }


def used(models: Any, body: dict[str, Any]) -> list[str] | None:
    """Return name and path of the adapter that a chat request gets."""
    serving = object.__new__(BaseServing)
    serving.models = models
    request = SimpleNamespace(model=body.get("model"), messages=body["messages"])
    found = serving._maybe_get_adapters(request, supports_default_mm_loras=True)
    return [found.lora_name, found.lora_path] if found else None


def main() -> None:
    """Answer the question on standard input."""
    question = json.load(sys.stdin)
    base = [SimpleNamespace(name="base", model_path="/models/base")]
    models = object.__new__(OpenAIServingModels)
    models.base_model_paths = base
    models.registry = OpenAIModelRegistry(SimpleNamespace(max_model_len=4096), base)
    models.lora_requests = {
        name: adapter(name, path, number)
        for number, (name, path) in enumerate(question["adapters"].items(), 1)
    }
    entries = asyncio.run(models.show_available_models()).model_dump()["data"]
    said = {
        "cases": {each: answers(each, question["cases"]) for each in question["algorithms"]},
        "models": entries,
        "used": [used(models, body) for body in question["bodies"]],
        "hybrids": [hybrid(each, question["prompts"]) for each in question["hybrids"]],
    }
    sys.stdout.write(json.dumps(said) + "\n")


main()
