"""LMCache's local CPU and disk backends as a contender: run by `bench.compare`.

    LMCACHE'S PYTHON -m bench.compare.lmcache WORKLOAD

Runs in LMCache's own environment. Its storage manager with both backends is
taken as it is. Its copy between GPU and CPU memory needs CUDA; in its place
stand torch's copies, one per layer and chunk, between tensors of its own
layout.
"""

import hashlib
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.storage_backend.storage_manager import StorageManager

from bench.compare.rounds import Workload, serve

_GB: Final = 1024**3
_POLL_S: Final = 0.0005
_HEADS: Final = 8


class LmcacheContender:
    """LMCache's `StorageManager` over tensors ``[layer][2, tokens, heads * head_dim]``."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        hidden = workload.chunk_bytes // 2 // 2 // workload.layers // workload.chunk_tokens
        tokens = workload.chunk_tokens
        self._shape = torch.Size((2, workload.layers, tokens, hidden))
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=tokens,
            local_cpu=True,
            max_local_cpu_size=workload.pool_chunks * workload.chunk_bytes / _GB,
            local_disk=f"{workload.directory}/",
            max_local_disk_size=16.0,
            lmcache_instance_id="bench",
        )
        metadata = LMCacheMetadata(
            model_name="m",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(workload.layers, 2, tokens, _HEADS, hidden // _HEADS),
        )
        PinMonitor.GetOrCreate(config)
        self._manager = StorageManager(config, metadata, EventManager())
        self._cpu = self._manager.storage_backends["LocalCPUBackend"]
        self._disk = self._manager.storage_backends["LocalDiskBackend"]
        self._kv = torch.zeros(
            (workload.layers, 2, workload.chunks * tokens, hidden), dtype=torch.bfloat16
        )
        self._keys: list[Any] = []
        self._digest = b""

    @property
    def includes(self) -> dict[str, str]:
        """What a figure of this engine contains that another's may not."""
        return {
            "checksum": "none",
            "copy": "torch, 2 slabs per layer and chunk (its own needs CUDA)",
            "disk": "buffered, 4 threads, written under the final name, index in memory only",
        }

    def begin(self, number: int) -> None:
        """Have a new prompt: fresh keys, fresh bytes in the KV cache."""
        generator = torch.Generator().manual_seed(number)
        words = self._kv.view(torch.int16)
        words.random_(-(1 << 15), 1 << 15, generator=generator)
        self._digest = self._kv_digest()
        first = number * self._workload.chunks
        self._keys = [
            CacheEngineKey("m", 1, 0, first + i, torch.bfloat16)
            for i in range(self._workload.chunks)
        ]

    def store(self) -> None:
        """Allocate, copy, and put: the CPU backend has it at once, the disk backend is told."""
        chunks = self._manager.batched_allocate(self._shape, torch.bfloat16, len(self._keys))
        if chunks is None:
            raise RuntimeError("LMCache has no memory for the prompt")
        self._copy(chunks, store=True)
        self._manager.batched_put(self._keys, chunks)

    def finish_put(self) -> None:
        """Wait until the disk backend has every key."""
        while not all(self._disk.contains(key) for key in self._keys):
            time.sleep(_POLL_S)

    def lookup(self) -> int:
        """Ask as its lookup does: with a pin, which is given back."""
        found, where = self._manager.batched_contains(self._keys, pin=True)
        for location, keys in where.items():
            self._manager.batched_unpin(keys, [location])
        return found if list(where) == ["LocalCPUBackend"] else 0

    def load(self) -> None:
        """Take the chunks from the CPU backend and copy them."""
        chunks = self._manager.batched_get(self._keys, location="LocalCPUBackend")
        if any(chunk is None for chunk in chunks):
            raise RuntimeError("LMCache lost a chunk in its CPU backend")
        self._copy(chunks, store=False)
        for chunk in chunks:
            chunk.ref_count_down()

    def empty_cpu(self) -> None:
        """Clear the CPU backend alone."""
        self._cpu.clear()

    def get(self) -> None:
        """Read all chunks at once; its storage manager puts them into the CPU backend."""
        chunks = self._manager.batched_get(self._keys, location="LocalDiskBackend")
        for chunk in chunks:
            if chunk is not None:
                chunk.ref_count_down()

    def blank(self) -> None:
        """Overwrite the KV cache with zeros."""
        self._kv.zero_()

    def is_intact(self) -> bool:
        """Whether the KV cache holds the prompt's bytes."""
        return self._kv_digest() == self._digest

    def forget(self) -> None:
        """Drop the prompt from every tier."""
        self._manager.batched_remove(self._keys)

    def close(self) -> None:
        """Release everything."""
        self._manager.close()

    def _copy(self, chunks: Sequence[Any], *, store: bool) -> None:
        tokens = self._workload.chunk_tokens
        kv, memory = [], []
        for number, chunk in enumerate(chunks):
            for layer in range(self._workload.layers):
                for half in range(2):
                    kv.append(self._kv[layer, half, number * tokens : (number + 1) * tokens])
                    memory.append(chunk.tensor[half, layer])
        if store:
            torch._foreach_copy_(memory, kv)
        else:
            torch._foreach_copy_(kv, memory)

    def _kv_digest(self) -> bytes:
        return hashlib.blake2b(self._kv.view(torch.uint8).numpy()).digest()


if __name__ == "__main__":
    serve(LmcacheContender)
