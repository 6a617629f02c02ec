"""Small models of the field's architectures with random weights, each served by vLLM here.

    python -m tests.e2e.families DIRECTORY FAMILY...

serves one after the other in this process and prints a JSON object for each: what was found, or
why vLLM did not start. One process for all: it imports vLLM once.
"""

import json
import os
import sys
import traceback
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.e2e.serving import in_one_process

CHUNK_TOKENS: Final = 256
BLOCK_TOKENS: Final = 128
CHUNKS: Final = 3
VOCABULARY: Final = 512
_LAYERS: Final = 4
_WINDOW_TOKENS: Final = 128


@dataclass(frozen=True)
class Family:
    """A model as ``transformers`` describes it, far smaller."""

    config: str
    """Its class of configurations."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    """In which a cold prefill and a hit give the same; some kernels want another."""


_WINDOWS: Final = {"sliding_window": _WINDOW_TOKENS}
_EVERY_SECOND: Final = {
    "layer_types": ["sliding_attention", "full_attention"] * (_LAYERS // 2),
    **_WINDOWS,
}
_EXPERTS: Final = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
_LATENT: Final = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family("LlamaConfig"),
    "qwen2": Family("Qwen2Config"),
    "qwen3": Family("Qwen3Config"),
    "qwen3-moe": Family("Qwen3MoeConfig", _EXPERTS),
    "mistral": Family("MistralConfig", {"sliding_window": None}),
    "mixtral": Family("MixtralConfig", {**_EXPERTS, "sliding_window": None}),
    "gemma2": Family(
        "Gemma2Config",
        {**_EVERY_SECOND, "query_pre_attn_scalar": 64, "tie_word_embeddings": True},
    ),
    "gemma3": Family("Gemma3TextConfig", {**_EVERY_SECOND, "query_pre_attn_scalar": 64}),
    "gpt-oss": Family("GptOssConfig", {**_EXPERTS, **_EVERY_SECOND}),
    "phi3": Family("Phi3Config", {"sliding_window": None, "pad_token_id": 0}),
    "olmo2": Family("Olmo2Config"),
    "olmo3": Family("Olmo3Config", _EVERY_SECOND),
    "glm4": Family("Glm4Config", {"pad_token_id": 0}),
    "glm4-moe": Family("Glm4MoeConfig", {**_EXPERTS, "n_routed_experts": 4, "pad_token_id": 0}),
    "granite": Family("GraniteConfig"),
    "cohere2": Family("Cohere2Config", {**_EVERY_SECOND, "pad_token_id": 0}),
    "exaone4": Family("Exaone4Config", _EVERY_SECOND),
    "llama4": Family(
        "Llama4TextConfig",
        {**_EXPERTS, "num_experts_per_tok": 1, "attention_chunk_size": _WINDOW_TOKENS},
    ),
    "deepseek-v3": Family("DeepseekV3Config", _LATENT, dtype="bfloat16"),
    "mamba2": Family("Mamba2Config", {"num_heads": 8, "state_size": 64, "n_groups": 1}),
    "falcon-h1": Family("FalconH1Config", {"mamba_d_ssm": 256, "mamba_n_heads": 4}),
    "granite-hybrid": Family(
        "GraniteMoeHybridConfig",
        {**_EXPERTS, "layer_types": ["mamba", "attention"] * (_LAYERS // 2)},
    ),
    "qwen3-next": Family("Qwen3NextConfig", _EXPERTS),
}


def main(directory: Path, names: Sequence[str]) -> None:
    """Serve these families one after the other."""
    os.environ |= in_one_process()
    _serve_one_after_the_other()
    for number, name in enumerate(names):
        try:
            found: dict[str, Any] = _serve(FAMILIES[name], directory / name)
        except Exception as error:  # noqa: BLE001  (whatever vLLM says is the finding)
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps({"family": name, **found}) + "\n")
        sys.stdout.flush()
        if "error" in found:
            # What did not start leaves its layers behind, in which the next would run.
            rest = [str(directory), *names[number + 1 :]]
            os.execv(sys.executable, [sys.executable, "-m", "tests.e2e.families", *rest])


def _serve_one_after_the_other() -> None:
    """Mend what keeps vLLM 0.32 from serving a second model in a process, or makes it slow."""
    from vllm.model_executor.models import registry
    from vllm.triton_utils import dispatcher

    scan = dispatcher._rebind_kernels

    def scan_others(overrides: Any) -> None:
        # It reads every object's __dict__, and llvmlite's library answers with a C function.
        hidden = {each: sys.modules.pop(each) for each in list(sys.modules) if "llvmlite" in each}
        scan(overrides)
        sys.modules.update(hidden)

    dispatcher._rebind_kernels = scan_others
    # It looks at each class in a process of its own, which imports all of vLLM again.
    registry._run_in_subprocess = lambda look: look()


def _make(family: Family, directory: Path) -> Path:
    import torch
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        # Wide enough that attention picks out single tokens: damaged KV must show.
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, family.config)(**{**sizes, **family.changes})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    return directory


def _serve(family: Family, directory: Path) -> dict[str, Any]:
    from vllm import LLM

    from cacheengine.launch.vllm_launch import free_ports

    _make(family, directory / "model")
    (port,) = free_ports(1)
    config = {
        "chunk_size": CHUNK_TOKENS,
        "max_local_cpu_size": 0.1,
        "local_disk": str(directory / "disk"),
        "max_local_disk_size": 1.0,
        "lmcache_worker_port": port,
    }
    path = directory / "cache.yaml"
    path.write_text(json.dumps(config))
    os.environ["LMCACHE_CONFIG_FILE"] = str(path)
    llm = LLM(
        str(directory / "model"),
        skip_tokenizer_init=True,
        dtype=family.dtype,
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=2048,
        max_num_seqs=2,
        num_gpu_blocks_override=64,
        enable_prefix_caching=True,
        disable_hybrid_kv_cache_manager=True,
        kv_transfer_config={
            "kv_connector": "WarmrouteConnector",
            "kv_connector_module_path": "cacheengine.connector.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"block_size": CHUNK_TOKENS},
        },
    )
    try:
        return Served(llm, f"http://127.0.0.1:{port}").find_out()
    finally:
        llm.llm_engine.engine_core.shutdown()


class Served:
    """A model that vLLM serves in this process."""

    def __init__(self, llm: Any, agent_url: str) -> None:
        self._llm = llm
        self._agent_url = agent_url

    def find_out(self) -> dict[str, Any]:
        """Return whether answers from the CPU tier and the disk tier are the GPU tier's."""
        prompt = [3 + (7 * at * at + 11 * at) % 500 for at in range(CHUNKS * CHUNK_TOKENS + 20)]
        # Nothing but its first block differs; no answer may be the same.
        other = [5 + each % 400 for each in prompt[:BLOCK_TOKENS]] + prompt[BLOCK_TOKENS:]
        cold = self._ask(prompt)
        self._wait_in("cpu", prompt)
        from_gpu = self._ask(prompt)
        self._llm.reset_prefix_cache()
        from_cpu = self._ask(prompt)
        self._wait_idle_on_disk(prompt)
        self._llm.reset_prefix_cache()
        from_disk = self._ask(prompt)
        return {
            "cold_cached": cold["cached"],
            "cached": [each["cached"] for each in (from_gpu, from_cpu, from_disk)],
            "same_tokens": from_cpu["tokens"] == from_disk["tokens"] == cold["tokens"],
            "same_to_the_bit": from_cpu == from_gpu and from_disk == from_gpu,
            "looks_back": self._ask(other)["logprobs"] != cold["logprobs"],
        }

    def _ask(self, prompt: list[int], max_tokens: int = 8) -> dict[str, Any]:
        from vllm import SamplingParams

        how = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=1, ignore_eos=True, detokenize=False
        )
        (answer,) = self._llm.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)
        (said,) = answer.outputs
        chosen = [
            step[token].logprob for step, token in zip(said.logprobs, said.token_ids, strict=True)
        ]
        return {
            "tokens": list(said.token_ids),
            "logprobs": chosen,
            "cached": answer.num_cached_tokens,
        }

    def _wait_in(self, tier: str, prompt: list[int]) -> None:
        for _ in range(200):
            if self._tiers(prompt) == [tier] * CHUNKS:
                return
            # vLLM hears of the end of a copy at its next step.
            self._ask([3, 4, 5], 1)
        raise TimeoutError(f"not in the {tier} tier: {self._tiers(prompt)}")

    def _wait_idle_on_disk(self, prompt: list[int]) -> None:
        for _ in range(200):
            self._call("/clear", {"tiers": ["cpu"]})
            if self._tiers(prompt) == ["disk"] * CHUNKS:
                return
            self._ask([3, 4, 5], 1)
        raise TimeoutError(f"not on disk alone: {self._tiers(prompt)}")

    def _tiers(self, prompt: list[int]) -> list[str]:
        tiers: list[str] = self._call("/lookup", {"tokens": prompt})["tiers"]
        return tiers

    def _call(self, path: str, body: object) -> Any:
        request = urllib.request.Request(
            self._agent_url + path,
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as response:
            return json.loads(response.read())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
