"""What two replicas have counted: hits by tier, evictions, preemptions, bytes moved.

The GPU's evictions are told by nobody but the KV events, of which both kinds of
replicas send the same; all else is in their metrics.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import zmq

from bench.calibration.replica import Fleet
from bench.replica.tiers import ReplicaTiers, call, metric

_POLL_MS: Final = 200
_SOURCES: Final = {"gpu": "device", "cpu": "host", "disk": "disk"}
"""vLLM's names of the tiers that cached tokens came from."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of all replicas together, since their start."""

    gpu_hit_tokens: float = 0.0
    cpu_hit_tokens: float = 0.0
    disk_hit_tokens: float = 0.0
    """Read from disk while the request waited; what was prefetched counts as CPU."""
    cpu_evicted_chunks: float = 0.0
    disk_evicted_chunks: float = 0.0
    stored_bytes: float = 0.0
    store_drops: float = 0.0
    put_drops: float = 0.0
    promoted_bytes: float = 0.0
    prefetch_unused_bytes: float = 0.0
    preemptions: float = 0.0

    def since(self, before: "Counts") -> "Counts":
        """Return what was counted after ``before``."""
        return Counts(
            **{
                each.name: getattr(self, each.name) - getattr(before, each.name)
                for each in fields(Counts)
            }
        )


def read_counts(fleet: Fleet) -> Counts:
    """Return the counts of now."""
    total: dict[str, float] = {}
    for each in (_of_replica(replica) for replica in fleet.replicas):
        for name, value in asdict(each).items():
            total[name] = total.get(name, 0.0) + value
    if fleet.control_url is not None:
        total |= _of_simulated(fleet.control_url)
    return Counts(**total)


def _of_replica(replica: ReplicaTiers) -> Counts:
    def engine(name: str) -> float:
        return metric(replica.agent_url, f"warmroute_engine_{name}_total")

    hits = {
        f"{tier}_hit_tokens": metric(
            replica.url, "vllm:prompt_tokens_cached_by_source_total", source=source
        )
        for tier, source in _SOURCES.items()
    }
    return Counts(
        **hits,
        cpu_evicted_chunks=engine("evictions"),
        disk_evicted_chunks=metric(
            replica.agent_url, "warmroute_engine_tier_evictions_total", tier="disk"
        ),
        stored_bytes=engine("store_bytes"),
        store_drops=engine("store_drops"),
        put_drops=engine("put_drops"),
        promoted_bytes=engine("promoted_bytes"),
        prefetch_unused_bytes=engine("prefetch_unused_bytes"),
        preemptions=metric(replica.url, "vllm:num_preemptions_total"),
    )


def _of_simulated(control_url: str) -> dict[str, float]:
    """Return the hits by tier of a simulated fleet, which its replicas' metrics do not tell."""
    truth: Sequence[dict[str, Any]] = call(f"{control_url}/truth")
    return {
        f"{tier}_hit_tokens": sum(each["cached_tokens"][tier] for each in truth)
        for tier in _SOURCES
    }


class GpuEvictions:
    """Counts the blocks that replicas drop from their GPU caches, while the context lasts."""

    def __init__(self, fleet: Fleet) -> None:
        self._endpoints = [
            source["endpoint"].replace("*", "127.0.0.1")
            for replica in fleet.replicas
            for source in call(f"{replica.url}/kv_event_sources").values()
        ]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self.blocks = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _listen(self) -> None:
        with ExitStack() as undo:
            context = undo.enter_context(zmq.Context())
            socket = undo.enter_context(context.socket(zmq.SUB))
            socket.subscribe(b"")
            for each in self._endpoints:
                socket.connect(each)
            while not self._ended.is_set():
                if socket.poll(_POLL_MS):
                    self.blocks += removed_from_gpu(socket.recv_multipart()[-1])


def removed_from_gpu(payload: bytes) -> int:
    """Return how many blocks a message of KV events tells to have left a GPU's cache."""
    _, events, *_ = msgspec.msgpack.decode(payload)
    return sum(
        len(each["block_hashes"])
        for each in events
        if each["type"] == "BlockRemoved" and each.get("medium", "GPU") == "GPU"
    )
