"""The identity of the model that vLLM serves, and whether the engine can keep its KV exactly.

`identify` collects everything that a token's KV depends on: weights, options, build, attention
backend. Every option counts unless it is known not to change KV: losing a cache costs time, but
reusing a wrong one gives wrong answers. `check_groups` and `check_attention` refuse models whose
layers keep something other than the KV of every token.
"""

import dataclasses
import enum
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from vllm import __version__ as vllm_version
from vllm.config import (
    VllmConfig,
    get_current_vllm_config_or_none,
    get_layers_from_vllm_config,
    set_current_vllm_config,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from cacheengine.identity.kv_versions import WeightFiles

logger = logging.getLogger("vllm.warmroute")

IDENTITY_KEY: Final = "warmroute_model"
"""Key of `ModelIdentity` in ``kv_connector_extra_config``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """The model's part of `ChunkLayout`; the offloading interface reports the sizes."""

    model: str
    weights: str
    options: str
    build: str
    attention: str
    pages: str
    hash_algorithm: str
    tokenizer: str = ""
    """The directory of its tokenizer on this machine; empty if there is none."""

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> "ModelIdentity":
        """Read what `WarmrouteConnector` has put there; raise ValueError if it is missing."""
        fields = extra_config.get(IDENTITY_KEY)
        if fields is None:
            raise ValueError(
                "kv_connector: the cache engine works only with WarmrouteConnector. "
                'Set "kv_connector": "WarmrouteConnector" and "kv_connector_module_path": '
                '"cacheengine.connector.connector" in --kv-transfer-config, or start the replica '
                "with `warmroute replica`"
            )
        return cls(**fields)


def identify(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, reads_weights: bool
) -> ModelIdentity:
    """Return the identity of the model that a vLLM process serves.

    Workers, which need no weights' identity, do without ``reads_weights``: it may take long.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    files = _files_of(model, load)
    named = model.tokenizer, model.tokenizer_revision
    tokenizer = locate(*named, load.download_dir) or locate(*named)
    return ModelIdentity(
        model=(files and files.hub_name) or model.model,
        weights=_weights(files, model, load) if reads_weights else "",
        options=_options(vllm_config) if reads_weights else "",
        build=_build(),
        attention=_attention(vllm_config, kv_cache_config),
        pages=_pages(kv_cache_config),
        hash_algorithm=str(vllm_config.cache_config.prefix_caching_hash_algo),
        tokenizer="" if tokenizer is None else str(tokenizer.path),
    )


def locate(name: str, revision: str | None = None, cache: str | None = None) -> WeightFiles | None:
    """Find the files of a model or an adapter on this machine, without a download."""
    path = Path(name).expanduser()
    if path.exists():
        return WeightFiles(path.absolute())
    try:
        found = snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
        return None
    return WeightFiles(Path(found))


# --- weights ---


def _files_of(model: Any, load: Any) -> WeightFiles | None:
    return locate(model.model, model.revision, load.download_dir)


def _weights(files: WeightFiles | None, model: Any, load: Any) -> str:
    if load.load_format == "dummy":
        return f"dummy-{model.seed}"
    try:
        doubt = _doubt(files, model)
        if files is not None and doubt is None:
            return files.digest()
    except OSError as error:
        doubt = str(error)
    logger.warning(
        "the weights of %s cannot be identified: %s. Its stored KV will not be reused after a "
        "restart or by other replicas",
        *(model.model, doubt),
    )
    return f"unknown-{uuid.uuid4().hex}"


def _doubt(files: WeightFiles | None, model: Any) -> str | None:
    """Return why the files found now may differ from the loaded ones; None if they are the same."""
    if files is None or model.model_weights:
        return "its files are in no directory or hub cache of this machine"
    # The files were loaded between the start of this process and now.
    if files.changed_since(_process_start_s()):
        return "its files changed while they were loaded"
    loaded = getattr(model.hf_config, "_commit_hash", None)
    if files.hub_name is not None and loaded not in (None, files.path.name):
        return f"its revision moved from {loaded} to {files.path.name} while it was loaded"
    return None


def _process_start_s() -> float:
    """Return when this process began, in seconds since the epoch."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s


# --- options ---

_HARMLESS_OF_MODEL: Final = frozenset(
    {
        # names of the files, which are identified by their content
        *("model", "model_weights", "revision", "hf_config_path", "config_format", "hf_token"),
        # how text becomes tokens, and tokens become text: keys are computed from tokens
        *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"),
        *("served_model_name", "generation_config", "override_generation_config"),
        *("max_logprobs", "logprobs_mode", "logits_processors", "io_processor_plugin"),
        *("use_fp64_gumbel", "return_sampling_mask", "pooler_config", "enable_prompt_embeds"),
        # what requests may contain, and how media are loaded; their content is in the keys
        *("allowed_local_media_path", "allowed_media_domains", "limit_mm_per_prompt"),
        *("mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb"),
        *("skip_mm_profiling", "renderer_num_workers", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb"),
        # where and when the model runs
        *("enforce_eager", "enable_sleep_mode", "sleep_mode_backend"),
        *("sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names"),
        *("enable_nccl_comm_suspend", "enable_cumem_allocator", "enable_trace_replay"),
        # what a seed changes: samples, and dummy weights, which are identified by it
        *("seed", "spec_target_max_model_len"),
        # whether the model may be loaded at all
        *("trust_remote_code", "allow_deprecated_quantization"),
    }
)
_ROPES_BY_LENGTH: Final = frozenset({"longrope", "su", "dynamic"})
"""Kinds of rotary embedding that depend on ``--max-model-len``."""
_HARMLESS_OF_CACHE: Final = frozenset(
    {
        *("gpu_memory_utilization", "num_gpu_blocks_override", "num_gpu_blocks"),
        *("num_cpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
        *("kv_cache_memory_bytes", "kv_offloading_size", "kv_offloading_backend"),
        *("enable_prefix_caching", "prefix_cache_retention_interval", "swap_space"),
        *("user_specified_block_size", "cpu_offload_gb", "cpu_kvcache_space_bytes"),
        # fields of the layout
        *("prefix_caching_hash_algo", "block_size", "hash_block_size"),
    }
)
_HARMLESS_OF_LORA: Final = frozenset({"max_loras", "max_cpu_loras", "specialize_active_lora"})
_OF_LOADING: Final = ("load_format", "model_loader_extra_config", "ignore_patterns")
_HARMLESS_OF_DRAFT: Final = frozenset(
    {
        *("target_model_config", "target_parallel_config", "draft_parallel_config"),
        *("draft_load_config", "rejection_sample_method", "draft_sample_method"),
        *("num_speculative_tokens", "enforce_eager"),
    }
)
_NOT_OF_THE_MODEL: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})


def _options(vllm_config: VllmConfig) -> str:
    """Return a digest of the options that change a token's KV for equal weights."""
    draft = vllm_config.speculative_config
    draft_model = draft and draft.draft_model_config
    load = vllm_config.load_config
    options = {
        "model": _fields(vllm_config.model_config, _HARMLESS_OF_MODEL),
        "cache": _fields(vllm_config.cache_config, _HARMLESS_OF_CACHE),
        "attention": _plain(vllm_config.attention_config),
        "lora": _fields(vllm_config.lora_config, _HARMLESS_OF_LORA),
        "loading": {name: _plain(getattr(load, name)) for name in _OF_LOADING},
        # The draft model's layers keep KV in the same chunks.
        "draft": _fields(draft, _HARMLESS_OF_DRAFT),
        "draft weights": draft_model and _weights(_files_of(draft_model, load), draft_model, load),
        "more": _plain(vllm_config.additional_config),
    }
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:32]


def _fields(config: Any, harmless: frozenset[str]) -> Any:
    if config is None:
        return None
    if not _mentions(_plain(getattr(config, "hf_config", None)), _ROPES_BY_LENGTH):
        harmless |= {"max_model_len"}
    names = (field.name for field in dataclasses.fields(config))
    return {name: _plain(getattr(config, name, None)) for name in names if name not in harmless}


def _mentions(plain: Any, words: frozenset[str]) -> bool:
    """Whether one of these texts is a value in what `_plain` returned, at any depth."""
    if isinstance(plain, dict | list):
        values = plain.values() if isinstance(plain, dict) else plain
        return any(_mentions(each, words) for each in values)
    return plain in words


def _plain(value: Any) -> Any:
    """Return a value in JSON's types; an object without content as its type's name."""
    match value:
        case None | bool() | int() | float() | str():
            plain: Any = value
        case enum.Enum():
            plain = value.name
        case Path() | torch.dtype():
            plain = str(value)
        case Mapping():
            plain = {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            plain = [_plain(each) for each in value]
        case set() | frozenset():
            plain = sorted(json.dumps(_plain(each), sort_keys=True) for each in value)
        case _:
            plain = _plain_object(value)
    return plain


def _plain_object(value: Any) -> Any:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "to_dict"):
        content = value.to_dict()
        return {str(k): _plain(v) for k, v in content.items() if k not in _NOT_OF_THE_MODEL}
    if dataclasses.is_dataclass(value):
        return _fields(value, _HARMLESS_OF_MODEL)
    return _plain_object(type(value))


# --- build and attention ---


def _build() -> str:
    capability = current_platform.get_device_capability()
    device = f"{current_platform.device_type}{capability.to_int() if capability else ''}"
    return f"vllm {vllm_version}, torch {torch.__version__}, {device}"


def _attention(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return the attention backend that vLLM selects for each group of layers."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    with set_current_vllm_config(vllm_config):
        return ", ".join(_backend(vllm_config, spec) for spec in specs)


def _backend(vllm_config: VllmConfig, spec: Any) -> str:
    if not isinstance(spec, AttentionSpec):
        return type(spec).__name__
    try:
        backend = get_attn_backend(
            spec.head_size,
            vllm_config.model_config.dtype,
            vllm_config.cache_config.cache_dtype,
            use_mla=isinstance(spec, MLAAttentionSpec),
            has_sliding_window=getattr(spec, "sliding_window", None) is not None,
        )
    except (ValueError, AssertionError, NotImplementedError, ImportError):
        # Layers of this kind select a backend by their own needs. Builds, devices and options are
        # part of the identity; equal ones select equal backends.
        return "selected by the layers"
    return str(backend.get_name())


def _pages(kv_cache_config: KVCacheConfig) -> str:
    groups = kv_cache_config.kv_cache_groups
    return "; ".join(f"{len(group.layer_names)} x {group.kv_cache_spec}" for group in groups)


# --- which models are supported ---

_UNIFIABLE: Final = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Kinds of layers that vLLM puts into one group with --disable-hybrid-kv-cache-manager."""


def check_groups(layer_names: Sequence[Iterable[str]]) -> None:
    """Raise ValueError, saying what to do, unless all layers' KV is in one group.

    Takes the names of each group's layers. Only a worker knows the layers, so only its message
    names their kinds.
    """
    if len(layer_names) == 1:
        return
    specs = [spec for names in layer_names for spec in _kv_specs(names)]
    if not all(isinstance(spec, _UNIFIABLE) for spec in specs):
        raise ValueError(_unsupported(specs))
    raise ValueError(
        f"this model has {len(layer_names)} KV cache groups (hybrid or "
        "sliding-window layers next to full attention); the cache engine supports "
        "models with one group. Start vLLM with --disable-hybrid-kv-cache-manager, as "
        "`warmroute replica` does, or without the engine (no --kv-transfer-config)"
    )


def check_attention(layer_names: Iterable[str], blocks_per_chunk: int) -> None:
    """Raise ValueError, saying what to do, if chunks of this KV group could be wrong.

    To be called in a worker process while vLLM builds its KV cache: the layers are known there. The
    offloading interface does not describe them.
    """
    kv_specs = _kv_specs(layer_names)
    # If one layer of a group has full attention, vLLM keeps every token for the others too. That is
    # why they can be one group.
    if not kv_specs or any(isinstance(spec, FullAttentionSpec) for spec in kv_specs):
        return
    if not all(isinstance(spec, SlidingWindowSpec) for spec in kv_specs):
        raise ValueError(_unsupported(kv_specs))
    if blocks_per_chunk == 1:
        return
    # vLLM frees and reuses blocks that leave the window, and stores the rest of a chunk
    # (`_build_store_jobs` skips freed blocks). If the pool had no space at first, the chunk is
    # stored late, without a block that a shorter prompt still needs: a wrong answer. A chunk of one
    # block is stored completely or not at all.
    window_tokens = min(spec.sliding_window for spec in kv_specs)
    block_tokens = kv_specs[0].block_size
    raise ValueError(
        f"all layers of this model have a sliding window ({window_tokens} tokens), so vLLM "
        f"may store a chunk of {blocks_per_chunk} blocks in part. Make a chunk one block: "
        f"chunk_size: {block_tokens} in the cache configuration, or --block-size "
        f"{block_tokens * blocks_per_chunk} where the attention backend allows it; or "
        "--disable-sliding-window, which also limits the context to the window"
    )


def _kv_specs(layer_names: Iterable[str]) -> list[Any]:
    """Return how each layer keeps its KV; an empty list outside a worker."""
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return []
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
    return [layer.get_kv_cache_spec(vllm_config) for layer in layers.values()]


def _unsupported(kv_specs: Iterable[Any]) -> str:
    kinds = ", ".join(sorted({type(spec).__name__ for spec in kv_specs}))
    return (
        f"this model's layers keep something other than the KV of every token ({kinds}), which "
        "the cache engine does not support. Start vLLM without it (no --kv-transfer-config)"
    )
