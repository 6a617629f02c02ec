"""How much KV a replica's GPU holds, as vLLM tells in its ``/metrics``."""

import logging
from collections.abc import Mapping
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from router.config import ReplicaConfig, describe

log = logging.getLogger("warmroute.health")

_CACHE_CONFIG: Final = "vllm:cache_config_info"
"""vLLM's gauge whose labels are its cache's settings; one for each engine of a replica."""


async def fetch_kv_capacity(
    session: aiohttp.ClientSession,
    config: ReplicaConfig,
    *,
    headers: Mapping[str, str],
    timeout_s: float,
) -> int | None:
    """Return the tokens of KV that a replica holds at once, or None if it does not tell."""
    try:
        async with session.get(
            f"{config.url}/metrics",
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            return kv_capacity(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        log.debug("%s does not tell its KV memory: %s", config.name, describe(error))
        return None


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
