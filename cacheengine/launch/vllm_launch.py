"""How vLLM is started with the engine inside: its options, data parallel ranks, environment.

vLLM runs one scheduler for each data parallel rank, so each rank has its own engine. Rank 0 of a
machine uses the configuration as it is. Rank n listens on the configured ports plus n, keeps its
chunks in ``dp<n>`` below the configured directories, and adds ``_dp<n>`` to its name. Sizes apply
to each rank.
"""

import dataclasses
import json
import random
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final

from cacheengine.settings.engine_config import EngineConfig
from warmroute_common.addresses import join_host_port
from warmroute_common.config_reader import ConfigError
from warmroute_common.keys import ALGORITHMS

_SETTINGS_KEY: Final = "warmroute"
_HASH_FLAG: Final = "--prefix-caching-hash-algo"
_VLLM_PORT: Final = "8000"
_BLOCK_TOKENS: Final = "16"
"""vLLM's smallest default block size."""
_KV_REPLAY_STEPS: Final = 100_000
"""Batches of KV events that vLLM keeps for routers that start later."""

_PORTS: Final = range(20_000, 32_768)
"""Below the ports that Linux by default gives to programs that ask for any."""


def has_option(vllm_args: Sequence[str], *names: str) -> bool:
    """Whether one of these options is given, long or short."""
    return any(_name_of(arg) in names for arg in vllm_args)


def value_of(vllm_args: Sequence[str], default: str, *names: str) -> str:
    """Return the value of an option; the last one if it is given several times."""
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
    """Return the option in an argument as vLLM's parser reads it; None for a value.

    The parser reads underscores as dashes, and ``--option.key`` as part of a JSON option.
    """
    if not argument.startswith("-"):
        return None
    name = argument.split("=", 1)[0]
    return name.split(".", 1)[0].replace("_", "-") if name.startswith("--") else name


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
        keep_cpu_dir=config.keep_cpu_dir and config.keep_cpu_dir / f"dp{rank}",
        # One server answers for all ranks, and rank 0 reports it.
        openai_url=None,
    )


def _transfer_url(config: EngineConfig, rank: int) -> str | None:
    if config.transfer_address is None:
        return None
    host, port = config.transfer_address
    return join_host_port(host, port and port + rank)


@dataclass(frozen=True)
class Ranks:
    """Number of data parallel ranks."""

    here: int
    """Ranks that this command starts."""
    everywhere: int
    """Ranks on all machines."""


def ranks_of(vllm_args: Sequence[str]) -> Ranks:
    """Return the data parallel ranks that vLLM's own options ask for.

    Raises ValueError for a count that is not a number.
    """
    everywhere = _count(vllm_args, 1, "--data-parallel-size", "-dp")
    here = _count(vllm_args, everywhere, "--data-parallel-size-local", "-dpl")
    alone = ("--data-parallel-rank", "-dpn", "--data-parallel-external-lb", "-dpe")
    return Ranks(1 if has_option(vllm_args, *alone) else max(here, 1), everywhere)


def _count(vllm_args: Sequence[str], default: int, *names: str) -> int:
    value = value_of(vllm_args, str(default), *names)
    if not value.isdigit():
        raise ValueError(f"{names[0]}: {value!r} is not a number of ranks; give one, such as 2")
    return int(value)


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """What the launcher passes to the engine inside vLLM, in addition to its configuration."""

    kv_events_port: int | None = None
    """Port for data parallel rank 0; vLLM adds the rank."""
    kv_replay_port: int | None = None
    chat_template: str | None = None
    """The value of vLLM's ``--chat-template``, which vLLM's engine process is not given."""

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> "ReplicaSettings":
        """Read them from ``kv_connector_extra_config``; missing ones have defaults."""
        return cls(**extra_config.get(_SETTINGS_KEY, {}))


def vllm_arguments(
    vllm_args: Sequence[str],
    *,
    chunk_tokens: int,
    kv_events_port: int,
    kv_replay_port: int,
    nixl: bool = False,
) -> list[str]:
    """Return the command that serves a model with the engine inside.

    ``vllm_args`` are the user's. ``nixl``: with NixlConnector too, which comes first: what another
    replica lends is not looked for in the engine. Raises ValueError, naming the option, if they set
    an option that only the launcher may set.
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
        chat_template=value_of(vllm_args, "", "--chat-template") or None,
    )
    transfer: dict[str, Any] = {
        "kv_connector": "WarmrouteConnector",
        "kv_connector_module_path": "cacheengine.connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "block_size": chunk_tokens,
            _SETTINGS_KEY: asdict(settings),
        },
    }
    if nixl:
        connectors = [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, transfer]
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": connectors},
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
        # Answers then report the cached prompt tokens, which the router learns from.
        "--enable-prompt-tokens-details",
        *_one_kv_group(vllm_args),
        *vllm_args,
        "--kv-transfer-config",
        json.dumps(transfer),
        "--kv-events-config",
        json.dumps(events),
    ]


def _one_kv_group(vllm_args: Sequence[str]) -> list[str]:
    """Return the option for one KV group, unless the user sets it.

    The engine keeps one KV group. Models with sliding windows in some layers have several; this
    option merges them into one that keeps every token. For other models it changes nothing.
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

    ``openai_url`` is passed on if the configuration does not set it.
    """
    added = {"LMCACHE_CONFIG_FILE": config_path}
    if openai_url is not None:
        added["LMCACHE_OPENAI_URL"] = openai_url
    if hash_algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in environment:
        # Without it vLLM's xxhash schemes draw a random seed at each start: then chunks on disk
        # are useless after a restart, and a router cannot match prompts.
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


def check_chunk_size(vllm_args: Sequence[str], config: EngineConfig) -> None:
    """Raise `ConfigError` for chunks that are not whole blocks of vLLM."""
    block = value_of(vllm_args, _BLOCK_TOKENS, "--block-size")
    if block.isdigit() and int(block) and config.chunk_size % int(block):
        raise ConfigError(
            config.source,
            "chunk_size",
            f"{config.chunk_size} is not a multiple of vLLM's block size, {block}",
            f"set {-(-config.chunk_size // int(block)) * int(block)}, or vLLM's --block-size",
        )


def openai_url_of(vllm_args: Sequence[str]) -> str | None:
    """Return the URL of vLLM's server for a router; None for a Unix socket.

    The URL has no host if vLLM listens on every address of this machine.
    """
    if has_option(vllm_args, "--uds"):
        return None
    scheme = "https" if has_option(vllm_args, "--ssl-certfile") else "http"
    host = value_of(vllm_args, "0.0.0.0", "--host").strip("[]")
    known = "" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"{scheme}://{known}:{value_of(vllm_args, _VLLM_PORT, '--port')}"


def free_ports(count: int, *, in_a_row: int = 1, besides: Collection[int] = ()) -> list[int]:
    """Return TCP ports that are free now; raises ValueError if there are too few.

    With ``in_a_row`` each is the first of that many free ports, and the ranges do not overlap.
    None is one of ``besides``, which others will take.
    The ports are outside the range that the kernel gives to programs that ask for any: vLLM binds
    its ports late, and another replica that starts meanwhile asks for dozens.
    """
    rows = range(_PORTS.start, _PORTS.stop - in_a_row + 1, in_a_row)
    tried = random.SystemRandom().sample(rows, len(rows))

    def may_be_had(port: int) -> bool:
        return port not in besides and _is_free(port)

    free = list(islice((p for p in tried if all(map(may_be_had, range(p, p + in_a_row)))), count))
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
