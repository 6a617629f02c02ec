"""vLLM's own tiering as a contender: run by `bench.compare`.

    python -m bench.compare.vllm WORKLOAD

`TieringOffloadingSpec` with its ``fs`` tier, as shipped, over the copy worker
of the CPU platform in place of its own, which needs a GPU.
"""

from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from bench.compare.kv import KvSide, OffloadingContender
from bench.compare.rounds import Workload, files_under, serve


class TieringContender(OffloadingContender):
    """`TieringOffloadingManager` with a CPU tier and a file system tier."""

    def __init__(self, workload: Workload) -> None:
        kv = KvSide(workload)
        manager = TieringOffloadingSpec(_config(workload, kv.engine_id)).get_manager()
        kv.region.forget_name()
        super().__init__(workload, kv, manager)

    @property
    def includes(self) -> dict[str, str]:
        """What a figure of this engine contains that another's may not."""
        return {
            "checksum": "none",
            "copy": "the copy worker of the CPU platform (its own needs CUDA)",
            "disk": "O_DIRECT where the file system allows it, 16 threads each way, "
            "temporary name and rename, no capacity limit",
        }

    def finish_put(self) -> None:
        """Wait until the file system tier has no transfer left."""
        for tier in self.manager.secondary_tiers:
            tier.drain_jobs()
        self.lookup()

    def empty_cpu(self) -> None:
        """Reset the CPU tier; files stay."""
        self.manager.reset_cache()
        self.ask_anew(f"{self.context.req_id}, again")

    def forget(self) -> None:
        """Drop the prompt from every tier."""
        self.manager.reset_cache()
        for path in files_under(self.workload.directory):
            if path.suffix == ".bin":
                path.unlink()


def _config(workload: Workload, engine_id: str) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(
            OffloadingGroupConfig(
                tokens_per_block=workload.block_tokens, layer_names=("layer",), group_id=0
            ),
        ),
        worker_kv_bytes_per_block=workload.chunk_bytes // workload.blocks_per_chunk,
        enable_kv_cache_events=True,
        extra_config={
            "cpu_bytes_to_use": workload.pool_chunks * workload.chunk_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(workload.directory)}],
        },
        engine_id=engine_id,
        model=OffloadingModelConfig(name="m", dtype="bfloat16"),
        cache=OffloadingCacheConfig(
            tokens_per_hash=workload.block_tokens, blocks_per_chunk=workload.blocks_per_chunk
        ),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


if __name__ == "__main__":
    serve(TieringContender)
