"""How much KV a replica's GPU holds, as vLLM tells in its ``/metrics``. Pure."""

from typing import Final

from prometheus_client.parser import text_string_to_metric_families

_CACHE_CONFIG: Final = "vllm:cache_config_info"
"""vLLM's gauge whose labels are its cache's settings; one for each engine of a replica."""


def kv_capacity(metrics: str) -> int | None:
    """Return the tokens of KV from Prometheus' text format; None if vLLM's gauge is not in it.

    Raises ValueError for what is not that format.
    """
    # All of it takes the parser many milliseconds of the event loop.
    told = "".join(line for line in metrics.splitlines(True) if line.startswith(_CACHE_CONFIG))
    tokens = 0
    for family in text_string_to_metric_families(told):
        for sample in family.samples:
            blocks, per_block = (sample.labels.get(n, "") for n in ("num_gpu_blocks", "block_size"))
            if blocks.isdecimal() and per_block.isdecimal():
                tokens += int(blocks) * int(per_block)
    return tokens or None
