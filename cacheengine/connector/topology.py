"""Whether the ranks of a replica can share chunk rows: asked among them, at start.

A chunk is one row of memory in which every rank has a slice, as large as any other's. So the
ranks must see the same memory, and each must keep as many bytes of a block as the others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from vllm.distributed.parallel_state import get_inner_dp_world_group, get_world_group

_MACHINE: Final = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY: Final = Path("/dev/shm")


class Rank(NamedTuple):
    """What a rank tells the others of itself."""

    memory: str
    """The machine, and the mount of its shared memory: containers may have one each."""
    kv_bytes_per_block: int


def check_ranks(kv_bytes_per_block: int) -> None:
    """Raise ValueError, with the way out, if the ranks' slices do not make up whole chunks.

    To be called in every worker of a replica at once, while vLLM builds its KV cache.
    """
    memory = f"{_MACHINE.read_text().strip()}:{_SHARED_MEMORY.stat().st_dev}"
    problem = problem_of(_told_by_all(Rank(memory, kv_bytes_per_block)))
    if problem is not None:
        raise ValueError(problem)


def problem_of(ranks: Sequence[Rank]) -> str | None:
    """Return why the cache engine cannot keep the KV of these ranks, and what to do instead."""
    machines = len({rank.memory for rank in ranks})
    if machines > 1:
        return (
            f"the {len(ranks)} tensor or pipeline parallel ranks of this replica are on {machines} "
            "machines (or in containers that do not share /dev/shm), and the cache engine keeps "
            "the KV of one. Start one replica for each machine, or start vLLM without the engine "
            "(no --kv-transfer-config)"
        )
    sizes = [rank.kv_bytes_per_block for rank in ranks]
    if len(set(sizes)) > 1:
        return (
            "the pipeline stages of this replica keep different amounts of KV "
            f"({', '.join(map(str, sizes))} bytes of a block), and the cache engine needs equal "
            "ones. Choose a --pipeline-parallel-size that divides the number of layers, or equal "
            "stages in VLLM_PP_LAYER_PARTITION, or start vLLM without the engine "
            "(no --kv-transfer-config)"
        )
    return None


def _told_by_all(own: Rank) -> list[Rank]:
    if not torch.distributed.is_initialized():
        return [own]
    group = _ranks_of_replica()
    told: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(told, own, group=group.cpu_group)
    return told


def _ranks_of_replica() -> Any:
    try:
        return get_inner_dp_world_group()
    except AssertionError:  # no data parallel ranks: the world is one replica
        return get_world_group()
