"""The data parallel ranks of one replica: vLLM runs a scheduler for each, so each has an engine.

Rank 0 of a machine has what the configuration says. Rank n listens on its ports plus n, keeps
its chunks in ``dp<n>`` under its directories, and adds ``_dp<n>`` to its name. Sizes are each
rank's.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cacheengine.launch.options import has_option, value_of
from cacheengine.settings import ConfigError, EngineConfig
from warmroute_common.addresses import join_host_port


def config_of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """Return the configuration of a data parallel rank, counted from 0 on its machine."""
    if rank == 0:
        return config
    port = config.lmcache_worker_port
    return dataclasses.replace(
        config,
        lmcache_instance_id=f"{config.lmcache_instance_id}_dp{rank}",
        lmcache_worker_port=port and port + rank,
        distributed_url=_transfer_url(config, rank),
        local_disk=tuple(directory / f"dp{rank}" for directory in config.local_disk),
        # One server answers for all ranks, and rank 0 has told of it.
        openai_url=None,
    )


def _transfer_url(config: EngineConfig, rank: int) -> str | None:
    if config.transfer_address is None:
        return None
    host, port = config.transfer_address
    return join_host_port(host, port and port + rank)


@dataclass(frozen=True)
class Ranks:
    """How many data parallel ranks there are."""

    here: int
    """Ranks that this command starts."""
    everywhere: int
    """Ranks of all machines."""

    def configs(self, config: EngineConfig) -> Iterator[EngineConfig]:
        """Yield what each rank here is told."""
        for rank in range(self.here):
            yield config_of_rank(config, rank)

    def check_memory(self, config: EngineConfig, memory_bytes: int) -> None:
        """Raise `ConfigError` where the pools of all ranks here cannot be in memory at once."""
        if self.here * config.max_local_cpu_bytes > memory_bytes:
            raise ConfigError(
                config.source,
                "max_local_cpu_size",
                f"{config.max_local_cpu_size} GB for each of {self.here} data parallel ranks is "
                "more than this machine's memory",
                f"set less than {memory_bytes / self.here / 1024**3:.1f}; the size is each rank's",
            )


def ranks_of(vllm_args: Sequence[str]) -> Ranks:
    """Return the data parallel ranks that vLLM's own options ask for.

    Raises ValueError for a number that is none.
    """
    everywhere = _count(vllm_args, 1, "--data-parallel-size", "-dp")
    here = _count(vllm_args, everywhere, "--data-parallel-size-local", "-dpl")
    alone = ("--data-parallel-rank", "-dpn", "--data-parallel-external-lb", "-dpe")
    return Ranks(1 if has_option(vllm_args, *alone) else max(here, 1), everywhere)


def _count(vllm_args: Sequence[str], default: int, *names: str) -> int:
    value = value_of(vllm_args, str(default), *names)
    if not value.isdigit():
        raise ValueError(f"{names[0]}: {value!r} is no number of ranks; give one, such as 2")
    return int(value)
