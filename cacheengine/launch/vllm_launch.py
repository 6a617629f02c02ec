"""Reading vLLM's own options, as its parser does."""

import dataclasses
import json
import random
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final

from cacheengine.settings import ConfigError, EngineConfig
from warmroute_common.addresses import join_host_port
from warmroute_common.keys import ALGORITHMS


def has_option(vllm_args: Sequence[str], *names: str) -> bool:
    """Whether one of these options is given; short ones, such as ``-dp``, by their names."""
    return any(_name_of(arg) in names for arg in vllm_args)


def value_of(vllm_args: Sequence[str], default: str, *names: str) -> str:
    """Return the value of an option, the last one where it is given several times."""
    value = default
    for index, arg in enumerate(vllm_args):
        if _name_of(arg) not in names:
            continue
        if "=" in arg:
            value = arg.split("=", 1)[1]
        elif index + 1 < len(vllm_args):
            value = vllm_args[index + 1]
    return value


def _name_of(argument: str) -> str | None:
    """Return the option that vLLM's parser takes an argument for, None if for a value.

    It reads underscores as dashes, and ``--option.key`` as a part of a JSON option.
    """
    if not argument.startswith("-"):
        return None
    name = argument.split("=", 1)[0]
    return name.split(".", 1)[0].replace("_", "-") if name.startswith("--") else name


# TODO of cacheengine.launch.vllm_launch: The data parallel ranks of one replica: vLLM runs a scheduler for each, so each has an engine.
#
# Rank 0 of a machine has what the configuration says. Rank n listens on its ports plus n, keeps
# its chunks in ``dp<n>`` under its directories, and adds ``_dp<n>`` to its name. Sizes are each
# rank's.


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


# TODO of cacheengine.launch.vllm_launch: How a vLLM process is started with the engine inside: arguments and environment.
#
# Pure: the process itself is started by ``cacheengine.launch.replica_command``.

_SETTINGS_KEY: Final = "warmroute"
_HASH_FLAG: Final = "--prefix-caching-hash-algo"
_VLLM_PORT: Final = "8000"
_KV_REPLAY_STEPS: Final = 100_000
"""Batches of KV events that vLLM keeps for a router that starts later."""

_PORTS: Final = range(20_000, 32_768)
"""Below the ports that Linux, unless told otherwise, gives to programs that ask for any."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """What the launcher tells the engine inside vLLM, beside LMCache's configuration."""

    kv_events_port: int | None = None
    """Of data parallel rank 0; vLLM adds the rank."""
    kv_replay_port: int | None = None

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> "ReplicaSettings":
        """Read them back from ``kv_connector_extra_config``; absent ones have defaults."""
        return cls(**extra_config.get(_SETTINGS_KEY, {}))


def vllm_arguments(
    vllm_args: Sequence[str], *, chunk_tokens: int, kv_events_port: int, kv_replay_port: int
) -> list[str]:
    """Return the command that serves a model with the engine inside.

    ``vllm_args`` are the user's own and come last. Raises ValueError, naming
    the option, when they set what only the launcher can.
    """
    for option in ("--kv-transfer-config", "--kv-events-config", "--no-enable-prefix-caching"):
        if has_option(vllm_args, option):
            raise ValueError(
                f"{option}: is set by `warmroute replica` itself; leave it out, "
                "or start vLLM directly"
            )
    settings = ReplicaSettings(
        kv_events_port=kv_events_port,
        kv_replay_port=kv_replay_port,
    )
    transfer = {
        "kv_connector": "WarmrouteConnector",
        "kv_connector_module_path": "cacheengine.connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "block_size": chunk_tokens,
            _SETTINGS_KEY: asdict(settings),
        },
    }
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        # vLLM binds an endpoint with a wildcard and connects to any other.
        "endpoint": f"tcp://*:{kv_events_port}",
        "replay_endpoint": f"tcp://*:{kv_replay_port}",
        "buffer_steps": _KV_REPLAY_STEPS,
    }
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        # Answers then say how many prompt tokens were cached: the router learns from it.
        "--enable-prompt-tokens-details",
        *_one_kv_group(vllm_args),
        *vllm_args,
        "--kv-transfer-config",
        json.dumps(transfer),
        "--kv-events-config",
        json.dumps(events),
    ]


def _one_kv_group(vllm_args: Sequence[str]) -> list[str]:
    """Return what makes vLLM keep all layers' KV alike, unless the user decides that.

    The engine keeps one KV group. Models with windows in some layers have
    several, of which this option makes one that keeps every token; for other
    models it changes nothing. vLLM does so by itself for connectors that
    cannot say that they know better.
    """
    option = "--disable-hybrid-kv-cache-manager"
    return [] if has_option(vllm_args, option, option.replace("--", "--no-", 1)) else [option]


def vllm_environment(
    environment: Mapping[str, str],
    *,
    config_path: str,
    hash_algorithm: str,
    openai_url: str | None = None,
) -> dict[str, str]:
    """Return the environment of that command, from the launcher's own.

    ``openai_url`` is what the configuration does not say.
    """
    added = {"LMCACHE_CONFIG_FILE": config_path}
    if openai_url is not None:
        added["LMCACHE_OPENAI_URL"] = openai_url
    if hash_algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in environment:
        # Without it vLLM's xxhash schemes draw a random seed at each start:
        # then no disk tier outlives a restart and no router can match.
        added["PYTHONHASHSEED"] = "0"
    return {**environment, **added}


def hash_algorithm_of(vllm_args: Sequence[str]) -> str:
    """Return the value of vLLM's ``--prefix-caching-hash-algo``, or its default.

    Raises ValueError for one that cannot be computed outside vLLM.
    """
    algorithm = value_of(vllm_args, "sha256", _HASH_FLAG)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{_HASH_FLAG}: {algorithm!r} is unknown; use {', '.join(ALGORITHMS)}")
    return algorithm


def openai_url_of(vllm_args: Sequence[str]) -> str | None:
    """Return where vLLM will serve, for a router; None where that is no port.

    Without a host where that is every address of this machine.
    """
    if has_option(vllm_args, "--uds"):
        return None
    scheme = "https" if has_option(vllm_args, "--ssl-certfile") else "http"
    host = value_of(vllm_args, "0.0.0.0", "--host").strip("[]")
    known = "" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"{scheme}://{known}:{value_of(vllm_args, _VLLM_PORT, '--port')}"


def free_ports(count: int, *, in_a_row: int = 1) -> list[int]:
    """Return TCP ports that are free now; raises ValueError where there are too few.

    With ``in_a_row`` each is the first of so many that are free, and no two share one.

    None that the kernel gives to programs that ask for any: vLLM takes its own only
    when it has been imported, and another replica that starts meanwhile asks for
    dozens.
    """
    rows = range(_PORTS.start, _PORTS.stop - in_a_row + 1, in_a_row)
    tried = random.SystemRandom().sample(rows, len(rows))
    free = list(islice((p for p in tried if all(map(_is_free, range(p, p + in_a_row)))), count))
    if len(free) < count:
        wanted = f"{count} free ports" if in_a_row == 1 else f"{count} times {in_a_row} free ports"
        raise ValueError(f"no {wanted} from {_PORTS.start} to {_PORTS.stop - 1} here")
    return free


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
