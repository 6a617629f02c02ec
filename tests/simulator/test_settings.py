"""The command's options reach the replicas and the router's configuration."""

import dataclasses
from pathlib import Path

import pytest

from simulator.model.replica_machine import Rates, Shape
from simulator.simulate_command import _settings, simulate
from simulator.simulator_settings import SimulatorSettings


def told(*options: str) -> SimulatorSettings:
    """Return what the simulator makes of a command line."""
    given = simulate.make_context("simulate", list(options)).params
    for name in ("directory", "as_json"):
        del given[name]
    return _settings(Path("/nowhere"), given)


def test_without_options_a_fleet_is_the_default_one() -> None:
    assert told() == SimulatorSettings(directory=Path("/nowhere"))


@pytest.mark.parametrize("kind", [Rates, Shape])
def test_each_rate_and_size_has_an_option(kind: type[Rates] | type[Shape]) -> None:
    """But for writes to disk, which take a simulated replica no time."""
    options = {each.name for each in simulate.params}
    without = {each.name for each in dataclasses.fields(kind)} - options
    assert without <= {"disk_write_tokens_per_s"}


def test_rates_are_those_of_the_options() -> None:
    rates = told(
        "--decode-s-per-context-token=1e-7",
        "--store-tokens-per-s=50000",
        "--transfer-slowdown=0.1",
        "--receive-tokens-per-s=12000",
    ).rates
    assert rates == Rates(
        decode_s_per_context_token=1e-7,
        store_tokens_per_s=50_000.0,
        transfer_slowdown=0.1,
        receive_tokens_per_s=12_000.0,
    )


def test_the_router_expects_copies_as_fast_as_the_slower_of_their_ends() -> None:
    fleet = told("--receive-tokens-per-s=12000", "--chunk-bytes=512", "--speed=2")
    assert fleet.router_rates()["peer_bytes_per_s"] == 2 * 12_000 * 2
    assert told().router_rates()["peer_bytes_per_s"] == 24_000
