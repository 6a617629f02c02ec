"""Warmroute's engine as a contender: run by `bench.compare`.

python -m bench.compare.ours WORKLOAD
"""

import time
from typing import Final

from vllm.v1.kv_offload.base import get_offload_block_hash

from bench.compare.kv import KvSide, OffloadingContender
from bench.compare.rounds import Workload, serve
from cacheengine.connector.manager import WarmrouteManager
from cacheengine.engine.engine import CacheEngine
from cacheengine.identity import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.settings.settings import EngineConfig

_GB: Final = 1024**3
_POLL_S: Final = 0.0005


class WarmrouteContender(OffloadingContender):
    """The engine as a replica has it: default threads, pool in shared memory."""

    def __init__(self, workload: Workload) -> None:
        kv = KvSide(workload)
        kv.region.forget_name()
        pool = Pool(
            kv.region.create_kv_memoryview(),
            num_slots=workload.pool_chunks,
            slot_bytes=workload.chunk_bytes,
        )
        config = EngineConfig(
            chunk_size=workload.chunk_tokens,
            max_local_cpu_size=workload.pool_chunks * workload.chunk_bytes / _GB,
            local_disk=(workload.directory,),
            max_local_disk_size=16.0,
        )
        layout = ChunkLayout(
            model="m",
            dtype="bfloat16",
            block_tokens=workload.block_tokens,
            chunk_tokens=workload.chunk_tokens,
            chunk_bytes=workload.chunk_bytes,
        )
        self._engine = CacheEngine(config, layout, pool)
        manager = WarmrouteManager(
            self._engine, group_idx=0, enable_events=True, on_shutdown=self._engine.close
        )
        super().__init__(workload, kv, manager)

    @property
    def includes(self) -> dict[str, str]:
        """What a figure of this engine contains that another's may not."""
        return {
            "checksum": "of every chunk, at put and at get",
            "copy": "the copy worker of the CPU platform",
            "disk": "temporary name and rename, capacity accounting, events",
        }

    def finish_put(self) -> None:
        """Wait until the engine lists every chunk on disk."""
        chunks = self._chunks()
        while self._engine.held_in(chunks, "disk") < len(chunks):
            time.sleep(_POLL_S)

    def empty_cpu(self) -> None:
        """Clear the CPU tier alone."""
        self._engine.clear(["cpu"])
        self.ask_anew(f"{self.context.req_id}, again")

    def forget(self) -> None:
        """Drop the prompt from every tier."""
        self._engine.clear()

    def _chunks(self) -> list[bytes]:
        return [get_offload_block_hash(key) for key in self.keys]


if __name__ == "__main__":
    serve(WarmrouteContender)
