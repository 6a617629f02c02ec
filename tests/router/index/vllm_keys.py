"""vLLM's own keys, events and model list for requests with salts, adapters and media.

A process of its own. Prints one JSON object: by algorithm, for each case its block
hashes and its KV event's message, both in hex; the entries of ``/v1/models``; the
adapters used; for each hybrid model the messages of its `KVCacheManager`; and those of
a prompt whose reused blocks are reported.
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


class Engine:
    """A `KVCacheManager` with these cache groups, and its messages in hex."""

    def __init__(self, groups: list[tuple[str, int]], num_blocks: int) -> None:
        sizes = [size for _, size in groups]
        hasher = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hasher)
        self._hasher = kv_cache_utils.get_request_block_hasher(math.gcd(*sizes), hasher)
        specs = [KVCacheGroupSpec([f"layer{at}"], spec(*each)) for at, each in enumerate(groups)]
        self._manager = KVCacheManager(
            KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=specs),
            max_model_len=4096,
            scheduler_block_size=math.lcm(*sizes),
            hash_block_size=math.gcd(*sizes),
            enable_kv_cache_events=True,
        )

    def ask(self, tokens: list[int], **more: str) -> tuple[int, str]:
        """Compute a prompt; return how many of its tokens were cached, and the message."""
        request = Request(
            request_id="r",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1, extra_args=dict(more)),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        blocks, cached, _ = self._manager.get_computed_blocks(request)
        new = len(tokens) - cached
        assert self._manager.allocate_slots(request, new, cached, blocks) is not None
        self._manager.free(request)
        batch = KVEventBatch(ts=1.0, events=self._manager.take_events())
        return cached, msgspec.msgpack.encode(batch).hex()


def hybrid(groups: list[tuple[str, int]], prompts: list[list[int]]) -> list[str]:
    """Return what a hybrid model publishes of prompts, one message each."""
    engine = Engine(groups, num_blocks=500)
    return [engine.ask(tokens)[1] for tokens in prompts]


def reported(prompt: list[int]) -> list[tuple[int, str]]:
    """Return cached tokens and message of each request: a prompt, it with its reused blocks
    reported, others that evict it, and the same two again."""
    engine = Engine([("full", BLOCK)], num_blocks=len(prompt) // BLOCK + 2)
    full = {"kv_cache_report_mode": "full"}
    other = [1 + token for token in prompt]
    each = [(prompt, {}), (prompt, full), (prompt, full), (other, {}), (prompt, {}), (other, {})]
    return [engine.ask(tokens, **more) for tokens, more in each]


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
        "reported": reported(question["cases"][0]["tokens"]),
    }
    sys.stdout.write(json.dumps(said) + "\n")


main()
