"""vLLM started directly, in one process with the engine: commands come as lines of JSON.

``{"open": {...}}``, ``{"ask": {...}}`` and so on; each is answered by one line on stdout.
"""

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

GPU_BLOCKS = 36
_IMPORTED_ONCE = (
    "vllm.entrypoints.llm",
    "vllm.lora.request",
    "vllm.model_executor.models.llama",
    "vllm.v1.worker.cpu_worker",
    "cacheengine.connector.connector",
)
"""vLLM imports most of itself when it is used, which each child would do again."""


class Served:
    """One vLLM at a time, and what is done with it."""

    def __init__(self) -> None:
        self._llm: Any = None

    def open(self, *, model: str, config: dict[str, Any], lora: bool = False) -> dict[str, Any]:
        """Load a model, and say what the engine's chunks are called after."""
        from vllm import LLM
        from vllm.config import KVTransferConfig

        path = Path(config["path"])
        path.write_text(json.dumps(config["settings"]))
        os.environ["LMCACHE_CONFIG_FILE"] = str(path)
        self._llm = LLM(
            model=model,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=2,
            block_size=128,
            num_gpu_blocks_override=GPU_BLOCKS,
            enable_lora=lora,
            max_lora_rank=8,
            disable_hybrid_kv_cache_manager=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="WarmrouteConnector",
                kv_connector_module_path="cacheengine.connector.connector",
                kv_role="kv_both",
            ),
        )
        return dataclasses.asdict(self._manager.engine.layout)

    def ask(self, *, prompt: list[int], lora: list[Any] | None = None) -> dict[str, Any]:
        """Complete a prompt, and have what it stored be stored."""
        said = self._generate(prompt, lora)
        self._generate([1, 2, 3], None)
        engine = self._manager.engine
        # vLLM notes in its steps what has been copied. Held is what is being copied or written.
        while engine.stats().cpu_held_bytes or engine.stats().put_queue_bytes:
            self._generate([1, 2, 3], None)
        return said

    def _generate(self, prompt: list[int], lora: list[Any] | None) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        request = LoRARequest(*lora) if lora else None
        parameters = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
        (output,) = self._llm.generate(
            {"prompt_token_ids": prompt}, parameters, lora_request=request, use_tqdm=False
        )
        return {
            "token_ids": list(output.outputs[0].token_ids),
            "logprob": output.outputs[0].cumulative_logprob,
            "cached": output.num_cached_tokens,
        }

    def call_workers(self, *, method: str) -> bool:
        """Call a method of the workers, as a weight update does."""
        self._llm.collective_rpc(method)
        return True

    def pause(self) -> bool:
        """Pause and resume, clearing caches, as vLLM does before it sleeps."""
        core = self._llm.llm_engine.engine_core.engine_core
        core.pause_scheduler(mode="abort", clear_cache=True)
        core.resume_scheduler()
        return True

    def empty_gpu(self) -> bool:
        """Empty the GPU tier alone."""
        return bool(self._llm.reset_prefix_cache())

    def close(self) -> bool:
        """End vLLM and the engine."""
        self._llm.llm_engine.engine_core.shutdown()
        return True

    @property
    def _manager(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler.connector._manager


def serve(first: str, answers: TextIO) -> None:
    """Answer commands from an "open" to its "close"."""
    served = Served()
    line = first
    while line:
        ((name, arguments),) = json.loads(line).items()
        print(json.dumps(getattr(served, name)(**arguments)), file=answers, flush=True)
        if name == "close":
            return
        line = sys.stdin.readline()


def main() -> None:
    """Have each model served by a process of its own, forked when vLLM has been imported.

    vLLM can be started once in a process, and its import takes most of the time.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own output is not an answer
    for each in _IMPORTED_ONCE:
        importlib.import_module(each)
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            serve(line, answers)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit("a child has failed")  # else the test would wait for its answer


if __name__ == "__main__":
    main()
