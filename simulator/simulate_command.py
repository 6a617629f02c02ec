"""``warmroute simulate``: a fleet of simulated replicas on this machine."""

import contextlib
import dataclasses
import errno
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
import orjson
import yaml

from simulator.model.replica_machine import Rates, Shape
from simulator.simulated_fleet import run
from simulator.simulator_settings import SimulatorSettings
from warmroute_common.command_line import NumberRange, WholeNumberRange
from warmroute_common.fleet_secret import read_fleet_secret

_F = TypeVar("_F", bound=Callable[..., Any] | click.Command)


class _Option(Protocol):
    def __call__(self, command: _F, /) -> _F: ...


_RATES = Rates()
_SHAPE = Shape()
_FLEET = SimulatorSettings(directory=Path())
_EXIT_CANNOT = 2


def _tokens(name: str, default: int, text: str, *, least: int = 1) -> _Option:
    return click.option(
        name,
        type=WholeNumberRange(least),
        default=default,
        metavar="N",
        show_default=True,
        help=text,
    )


def _rate(name: str, default: float, text: str) -> _Option:
    return click.option(
        name,
        type=NumberRange(0, min_open=True),
        default=default,
        metavar="X",
        show_default=True,
        help=text,
    )


def _number(name: str, default: float, text: str) -> _Option:
    return click.option(
        name, type=NumberRange(0), default=default, metavar="X", show_default=True, help=text
    )


@click.command(
    epilog="Example: warmroute simulate --replicas 4 > router.yaml, and in another terminal "
    "warmroute serve --config router.yaml."
)
@_tokens("--replicas", _FLEET.replicas, "Number of replicas.")
@_tokens(
    "--gpu-tokens",
    _SHAPE.gpu_tokens,
    "Capacity of a GPU's KV cache, in tokens.",
)
@_tokens("--cpu-tokens", _FLEET.cpu_tokens, "Capacity of a replica's CPU tier, in tokens.")
@_tokens(
    "--disk-tokens",
    _FLEET.disk_tokens,
    "Capacity of its disk tier, in tokens; 0: no disk.",
    least=0,
)
@_rate("--prefill-tokens-per-s", _RATES.prefill_tokens_per_s, "Speed of prefill.")
@_rate("--load-tokens-per-s", _RATES.load_tokens_per_s, "Speed from CPU RAM to the GPU.")
@_rate("--store-tokens-per-s", _RATES.store_tokens_per_s, "Speed from the GPU to CPU RAM.")
@_number(
    "--transfer-slowdown",
    _RATES.transfer_slowdown,
    "How much longer a step takes while KV is loaded or stored; 0.1 is 10%.",
)
@_rate("--disk-tokens-per-s", _RATES.disk_tokens_per_s, "Speed from disk to CPU RAM.")
@_rate("--peer-tokens-per-s", _RATES.peer_tokens_per_s, "Speed of copies out of a replica.")
@_rate("--receive-tokens-per-s", _RATES.receive_tokens_per_s, "Speed of copies into a replica.")
@_rate(
    "--pull-tokens-per-s",
    _RATES.pull_tokens_per_s,
    "Speed from another replica's GPU to a replica's, with --nixl.",
)
@_number("--step-s", _RATES.step_s, "Shortest time of a step, in seconds.")
@_number(
    "--decode-s-per-sequence",
    _RATES.decode_s_per_sequence,
    "Time that each decoding sequence adds to a step, in seconds.",
)
@_number(
    "--decode-s-per-context-token",
    _RATES.decode_s_per_context_token,
    "Time that each token of a decoding sequence's context adds, in seconds.",
)
@_number(
    "--attention-tokens",
    _RATES.attention_tokens,
    "Context length at which a token's prefill takes twice as long; 0: off.",
)
@_number(
    "--request-s",
    _RATES.request_s,
    "Time that each request takes before it is queued, in seconds.",
)
@_tokens(
    "--max-batched-tokens",
    _SHAPE.max_batched_tokens,
    "Most tokens in one step: one for each decoding sequence, the rest for prefill.",
)
@_tokens("--max-sequences", _SHAPE.max_sequences, "Most requests that run at the same time.")
@_tokens("--block-tokens", _SHAPE.block_tokens, "Tokens in a block of the GPU's KV cache.")
@_tokens("--chunk-tokens", _SHAPE.chunk_tokens, "Tokens in a chunk of the cache engine.")
@_tokens("--chunk-bytes", _FLEET.chunk_bytes, "Bytes that are really stored for a chunk's KV.")
@_tokens(
    "--output-tokens", _FLEET.output_tokens, "Length of an answer if the request sets no limit."
)
@_tokens(
    "--stream-interval-tokens",
    _FLEET.stream_interval_tokens,
    "Tokens in one event of a stream; the first event has one token.",
)
@_rate("--speed", _FLEET.speed, "Speed of simulated time; 10 is ten times faster than the clock.")
@click.option(
    "--seed",
    metavar="N",
    default=_FLEET.seed,
    show_default=True,
    help="Another seed gives other answers.",
)
@click.option("--model", default=_FLEET.model, show_default=True, help="Name of the model.")
@click.option("--host", default=_FLEET.host, show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=WholeNumberRange(0, 65535),
    metavar="N",
    default=_FLEET.port,
    show_default=True,
    help="Port of the first replica; the others use the next ones. 0: free ports.",
)
@click.option(
    "--agent-port",
    type=WholeNumberRange(0, 65535),
    metavar="N",
    default=_FLEET.agent_port,
    show_default=True,
    help="Port of the first replica's agent; the others use the next ones. 0: free ports.",
)
@_tokens("--first", _FLEET.first, "Number in the first replica's name, to run several fleets.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for the tokenizer, which is kept.  [default: a temporary directory]",
)
@click.option(
    "--nixl",
    is_flag=True,
    help="Replicas pull KV from each other's GPUs, as vLLM does with NixlConnector.",
)
@click.option(
    "--disk-files",
    is_flag=True,
    help="Keep the disk tiers in files there instead of in memory; slower.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print all addresses as one line of JSON instead."
)
def simulate(directory: Path | None, as_json: bool, **given: Any) -> None:
    """Run a fleet of simulated replicas until Ctrl-C.

    Each replica behaves like vLLM with the cache engine inside, but needs no
    GPU. The OpenAI API, the KV events, the cache engine and its agent are real.
    The answers are meaningless words, and the time of GPU, disk and network is
    simulated. Rates and sizes are per replica.

    Prints the router's configuration for this fleet once all replicas are ready.
    """
    try:
        with contextlib.ExitStack() as undo:
            where = directory
            if where is None:
                where = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-")))
            settings = _settings(where.resolve(), given)
            _run(settings, as_json=as_json)
    except OSError as error:
        what = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            what = f"a port is already in use ({error}); choose others with --port and --agent-port"
        click.echo(f"warmroute simulate: {what}", err=True)
        sys.exit(_EXIT_CANNOT)
    except ValueError as error:
        click.echo(f"warmroute simulate: {error}", err=True)
        sys.exit(_EXIT_CANNOT)


def _settings(directory: Path, given: dict[str, Any]) -> SimulatorSettings:
    rates, shape = (
        {each.name: given.pop(each.name) for each in dataclasses.fields(kind) if each.name in given}
        for kind in (Rates, Shape)
    )
    given["fleet_secret"] = read_fleet_secret(None, os.environ)
    return SimulatorSettings(
        directory=directory, rates=Rates(**rates), shape=Shape(**shape), **given
    )


def _run(settings: SimulatorSettings, *, as_json: bool) -> None:
    # Slow to import, and --help does not need it.
    import uvloop  # noqa: PLC0415

    def ready(where: dict[str, Any]) -> None:
        click.echo(orjson.dumps(where).decode() if as_json else _as_yaml(where))
        sys.stdout.flush()
        count = len(where["replicas"])
        click.echo(
            f"{count} simulated replica{'s are' if count != 1 else ' is'} ready. Save the router's "
            "configuration above as FILE, and run in another terminal: warmroute serve --config "
            "FILE. Ctrl-C stops the replicas.",
            err=True,
        )

    uvloop.run(run(settings, ready))


def _as_yaml(where: dict[str, Any]) -> str:
    """Return a configuration of the router, with the rest as comments."""
    config = {
        "replicas": [
            {
                name: each[name]
                for name in ("url", "agent_url", "instance_id", "nixl_role")
                if each[name] is not None
            }
            for each in where["replicas"]
        ],
        "rates": where["router_rates"],
    }
    return (
        "# warmroute serve --config with this; POST /v1/completions and /v1/chat/completions.\n"
        f"# True state of the replicas: {where['control_url']}/truth, and /requests.\n"
        f"# The model's tokenizer: {where['tokenizer']}\n"
        f"{yaml.safe_dump(config, sort_keys=False)}"
    )
