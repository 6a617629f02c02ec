"""``warmroute replay``: plays a request log before fleets of other sizes."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from replay.player import Figures, Player, recorded_figures
from replay.recorded import LogError, RecordedLog, read_log, told
from router.cli.router_client import RouterClient, asks_router
from router.fleet.cost_model import Quantiles
from simulator.model.replica_machine import Machine
from warmroute_common.config_reader import ConfigError, ConfigLocation, build, read_yaml

_EXIT_CANNOT = 2
_MOST_REPLICAS = 1_000


class _Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers above 0, separated by commas."""

    name = "numbers"

    def __init__(self, kind: type[int] | type[float], most: float) -> None:
        self._kind = kind
        self._most = most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Return the numbers; fail with what is wrong."""
        if not isinstance(value, str):
            return tuple(value)
        try:
            numbers = tuple(self._kind(each.removesuffix("x")) for each in value.split(","))
        except ValueError:
            self.fail(f"'{value}' is not a list such as 4,6,8", param, ctx)
        if not all(0 < each <= self._most for each in numbers):
            self.fail(f"each must be above 0, and {self._most:,g} at most", param, ctx)
        return numbers


@click.command(
    short_help="Play a request log before other fleets.",
    epilog="Example: warmroute replay requests.jsonl --replicas 4,6,8 --ram 1,2",
)
@click.argument("log", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--replicas",
    type=_Numbers(int, _MOST_REPLICAS),
    metavar="N,N",
    required=True,
    help="Sizes of the fleets to play.",
)
@click.option(
    "--ram",
    type=_Numbers(float, 1_000),
    metavar="X,X",
    default="1",
    show_default=True,
    help="How many times as much KV the CPU RAM of each replica holds.",
)
@click.option("--model", help="Play only the requests for this model.")
@click.option(
    "--machine",
    "machine_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="YAML or JSON with sizes and speeds of a replica, as 'machine' in the answer of GET "
    "/scaling, or that whole answer.  [default: ask the running router]",
)
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON instead.")
@asks_router
def replay(
    *,
    router: RouterClient,
    log: Path,
    replicas: Sequence[int],
    ram: Sequence[float],
    model: str | None,
    machine_path: Path | None,
    as_json: bool,
) -> None:
    """Play LOG, a router's request log, before fleets of other sizes.

    Prints TTFT, time per output token (TPOT) and the share of prompt tokens
    that were found in caches: as recorded, and for each fleet. The fleet is
    simulated: this router's own scheduling, the cache engine's decisions, and
    a model of vLLM's scheduler, in simulated time. The log needs
    prompt_hashes: true in the section request_log of router.yaml.
    """
    try:
        with log.open("rb") as lines:
            recorded = read_log(lines, model)
        machine = _machine(router, machine_path, recorded)
        rows = [("recorded", recorded_figures(recorded.requests))]
        for size in replicas:
            for times in ram:
                resized = replace(machine, cpu_tokens=round(machine.cpu_tokens * times))
                name = f"{size} replicas" + (f", {times:g}x RAM" if len(ram) > 1 else "")
                player = Player(machine=resized, replicas=size)
                rows.append((name, player.play(recorded.requests)))
    except (LogError, ConfigError, ValueError) as error:
        click.echo(f"warmroute replay: {error}", err=True)
        sys.exit(_EXIT_CANNOT)
    if as_json:
        click.echo(json.dumps({name: asdict(figures) for name, figures in rows}, indent=2))
        return
    click.echo(_table(rows))
    if recorded.left_out:
        click.echo(f"Left out: {told(recorded.left_out)}.", err=True)


def _machine(router: RouterClient, path: Path | None, recorded: RecordedLog) -> Machine:
    """Return the machine in a file, or that of a running router's replicas."""
    where = "GET /scaling" if path is None else str(path)
    value = router.ask("/scaling") if path is None else read_yaml(path)
    if "models" in value:
        name = recorded.requests[0].model
        pools: Sequence[Mapping[str, Any]] = value["models"]
        found = [each for each in pools if each["model"] == name] or pools[:1]
        value = dict(found[0].get("machine") or {}) if found else {}
        if not value:
            raise LogError(f"{where} knows no machine of the model '{name}'; give --machine FILE")
    return build(Machine, value, ConfigLocation(where))


def _table(rows: Sequence[tuple[str, Figures]]) -> str:
    lines = [
        ("", "answered", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "found in caches"),
        *((name, *_cells(figures)) for name, figures in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(figures: Figures) -> tuple[str, ...]:
    ttft, tpot = figures.ttft, figures.tpot
    return (
        f"{figures.answered:,} of {figures.requests:,}",
        *(_seconds(ttft, each) for each in ("p50", "p90", "p99")),
        *(_milliseconds(tpot, each) for each in ("p50", "p90")),
        "-" if figures.hit_share is None else f"{figures.hit_share:.1%}",
    )


def _seconds(values: Quantiles | None, name: str) -> str:
    return "-" if values is None else f"{getattr(values, name):.2f} s"


def _milliseconds(values: Quantiles | None, name: str) -> str:
    return "-" if values is None else f"{1000 * getattr(values, name):.1f} ms"
