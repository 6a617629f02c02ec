"""What the router asks of a replica's OpenAI server, and how it reads the answers."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from router.config import ReplicaConfig
from router.prompt import ServedModel
from warmroute_common.config_error import describe

log = logging.getLogger("warmroute.health")

_CACHE_CONFIG: Final = "vllm:cache_config_info"
"""vLLM's gauge whose labels are its cache's settings; one for each engine of a replica."""

_LOAD: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")


async def fetch_models(
    session: aiohttp.ClientSession,
    config: ReplicaConfig,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
) -> list[dict[str, object]] | None:
    """Return the entries of a replica's ``/v1/models``, or None if it does not tell."""
    told = await fetch(session, config, "/v1/models", headers=headers, timeout_s=timeout_s)
    if told is None:
        return None
    try:
        return list(model_entries(orjson.loads(told)))
    except ValueError as error:
        log.debug("%s does not tell its models: %s", config.name, describe(error))
        return None


async def fetch(
    session: aiohttp.ClientSession,
    config: ReplicaConfig,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
) -> bytes | None:
    """Return what a replica answers at a path, or None if it does not answer that well.

    Without ``headers`` the router asks with the replica's own key.
    """
    try:
        async with session.get(
            f"{config.url}{path}",
            headers=authorization(config) if headers is None else headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            return await response.read() if response.status == 200 else None
    except (aiohttp.ClientError, OSError) as error:
        log.debug("%s does not answer at %s: %s", config.name, path, describe(error))
        return None


def model_entries(answer: object) -> Iterable[dict[str, object]]:
    """Yield the models in an answer of ``/v1/models``."""
    data = answer.get("data") if isinstance(answer, dict) else None
    for each in data if isinstance(data, list) else []:
        if isinstance(each, dict) and isinstance(each.get("id"), str):
            yield each


def served_models(entries: Sequence[Mapping[str, object]]) -> list[ServedModel]:
    """Return the models listed.

    vLLM's entries name a model's root, and an adapter's base model as its
    parent (``show_available_models`` of 0.32): the tokenizer is the base's, the
    root is the adapter's path, which is part of its keys.
    """
    roots = {str(each["id"]): str(each.get("root") or each["id"]) for each in entries}
    served = []
    for each in entries:
        name, parent = str(each["id"]), each.get("parent")
        served.append(
            ServedModel(
                id=name,
                root=roots.get(str(parent), roots[name]),
                adapter_path=None if parent is None else roots[name],
            )
        )
    return served


def authorization(config: ReplicaConfig) -> dict[str, str]:
    """Return the header for the router's own requests to a replica."""
    return {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}


def load(metrics: str) -> tuple[int, int]:
    """Return how many requests run and wait, from vLLM's gauges; none where it does not tell."""
    counts = dict.fromkeys(_LOAD, 0)
    for line in metrics.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in counts:
            with suppress(ValueError, OverflowError):  # no number: other engines' are counted
                counts[name] += int(float(line.rpartition(" ")[2]))
    running, waiting = counts.values()
    return running, waiting


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
