"""What a replica says about itself: its models, its KV memory, its load and its speeds.

The functions read vLLM's ``/v1/models`` and ``/metrics``, and LMCache's metrics among these.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from router.config.settings import ReplicaConfig
from router.fleet.cost_model import CostPart
from router.fleet.counter_speeds import SpeedCounters, series_of
from router.prompt.prompt_source import ServedModel
from warmroute_common.config_reader import describe
from warmroute_common.connection_errors import connection_problem

log = logging.getLogger("warmroute.health")

_CACHE_CONFIG: Final = "vllm:cache_config_info"
"""vLLM's gauge whose labels are its cache's settings; one for each engine of a replica."""

_LOAD: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_PULLED: Final = ("vllm:nixl_bytes_transferred_sum", "vllm:nixl_xfer_time_seconds_sum")
SLEEP_STATE: Final = "vllm:engine_sleep_state{"
_LEAST_TOKENS: Final = 2048
"""Fewer tokens, prefilled or loaded, say little about the speed."""
_LEAST_OUTPUT_TOKENS: Final = 64


async def fetch_models(
    session: aiohttp.ClientSession,
    config: ReplicaConfig,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
) -> list[dict[str, object]] | None:
    """Return the entries of a replica's ``/v1/models``, or None if it does not tell."""
    body = await fetch(session, config, "/v1/models", headers=headers, timeout_s=timeout_s)
    if body is None:
        return None
    try:
        return list(model_entries(orjson.loads(body)))
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
        problem = connection_problem(error, config.url)
        log.debug("%s does not answer at %s: %s", config.name, path, problem)
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
    root is the adapter's path, which is part of its keys. The context is the base's too.
    """
    lengths = {str(each["id"]): each.get("max_model_len") for each in entries}
    roots = {str(each["id"]): str(each.get("root") or each["id"]) for each in entries}
    served = []
    for each in entries:
        name, parent = str(each["id"]), each.get("parent")
        length = lengths.get(str(parent), lengths[name])
        served.append(
            ServedModel(
                id=name,
                root=roots.get(str(parent), roots[name]),
                adapter_path=None if parent is None else roots[name],
                max_model_len=length if isinstance(length, int) and length > 0 else None,
            )
        )
    return served


def authorization(config: ReplicaConfig) -> dict[str, str]:
    """Return the header for the router's own requests to a replica."""
    return {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}


def load(metrics: str) -> tuple[int, int]:
    """Return how many requests run and wait, from vLLM's gauges; none where it does not tell."""
    running, waiting = _sums(metrics, _LOAD)
    return int(running), int(waiting)


def pulled(metrics: str) -> tuple[float, float]:
    """Return the bytes that vLLM has pulled by NixlConnector, and the seconds that this took."""
    nbytes, seconds = _sums(metrics, _PULLED)
    return nbytes, seconds


def _sums(metrics: str, names: Sequence[str]) -> list[float]:
    """Return the sum of each metric over the engines of a replica."""
    return [sum(value for _, value in each) for each in series_of(metrics, names).values()]


def sleeps(metrics: str) -> bool:
    """Whether vLLM's gauge says that one of the replica's engines sleeps."""
    return any(
        each.startswith(SLEEP_STATE)
        and 'sleep_state="awake"' in each
        and each.endswith((" 0", " 0.0"))
        for each in metrics.splitlines()
    )


def kv_capacity(metrics: str) -> int | None:
    """Return the tokens of KV from Prometheus' text format; None if vLLM's gauge is not in it.

    Raises ValueError for what is not that format.
    """
    # All of it takes the parser many milliseconds of the event loop.
    lines = "".join(line for line in metrics.splitlines(True) if line.startswith(_CACHE_CONFIG))
    tokens = 0
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            blocks, per_block = (sample.labels.get(n, "") for n in ("num_gpu_blocks", "block_size"))
            if blocks.isdecimal() and per_block.isdecimal():
                tokens += int(blocks) * int(per_block)
    return tokens or None


def engines(metrics: str) -> int:
    """Return how many engines (data-parallel ranks) a vLLM's metrics are of; 1 if none tells."""
    return max(1, sum(line.startswith(f"{_CACHE_CONFIG}{{") for line in metrics.splitlines()))


def vllm_counters(kv_bytes_per_token: float) -> tuple[SpeedCounters, ...]:
    """Return the counters of stock vLLM's speeds, and of the LMCache inside it.

    LMCache (``lmcache/observability.py`` of 0.5.6, which vLLM's ``/metrics`` includes if
    ``PROMETHEUS_MULTIPROC_DIR`` is set) times its copies to the GPU and its blocking reads from the
    remote store, on each rank. It counts and times nothing of its disk, and of the remote reads of
    ``enable_async_loading`` only the bytes: those rates keep their start values.
    """
    return (
        SpeedCounters(
            part=CostPart.PREFILL,
            amount="vllm:request_prefill_kv_computed_tokens_sum",
            time="vllm:request_prefill_time_seconds_sum",
            least=_LEAST_TOKENS,
        ),
        SpeedCounters(
            part=CostPart.OUTPUT_TOKEN,
            amount="vllm:inter_token_latency_seconds_count",
            time="vllm:inter_token_latency_seconds_sum",
            least=_LEAST_OUTPUT_TOKENS,
        ),
        SpeedCounters(
            part=CostPart.LOAD,
            amount="lmcache:num_hit_tokens_total",
            time="lmcache:retrieve_to_gpu_time_sum",
            unit=kv_bytes_per_token,
            least=_LEAST_TOKENS,
        ),
        SpeedCounters(
            part=CostPart.REMOTE,
            amount="lmcache:num_remote_read_bytes_total",
            time="lmcache:remote_time_to_get_sync_sum",
            unit=1000.0,  # its time is in ms
            adds_ranks=True,
        ),
    )
