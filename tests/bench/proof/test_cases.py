"""What is published."""

import pytest

from bench.proof.case import DISK_TOKENS_PER_S, is_peer, is_variant
from bench.proof.cases import (
    FIRST_SEED,
    HEADLINE_LOADS,
    HEADLINE_RAM,
    LOADS,
    RAM,
    SIZES,
    TRACED,
    all_cases,
    chosen,
)
from bench.ttft import BenchError
from tests.bench.proof.scripted import NAMES

CASES = all_cases(NAMES)


def test_names_are_unique_and_every_set_has_cases() -> None:
    assert len({each.name for each in CASES}) == len(CASES)
    assert {each.set for each in CASES} == {*SIZES}


def test_a_headline_has_the_requests_seeds_and_contenders_that_it_needs() -> None:
    headline = [each for each in CASES if each.set == "headline"]
    assert {(each.workload, each.ram, each.load) for each in headline} == {
        (workload, ram, load)
        for workload in TRACED
        for ram in HEADLINE_RAM
        for load in HEADLINE_LOADS
    }
    for each in headline:
        assert each.contenders == (
            "ours", "sglang", "vllm", "oracle", "shared-infinite-cache", "no-queue",
        )  # fmt: skip


def test_the_traces_are_published_in_every_regime_once() -> None:
    found = [each.regime for each in CASES if each.set in ("headline", "regimes")]
    assert len(found) == len({*found})
    for workload in TRACED:
        for disk in DISK_TOKENS_PER_S:
            wanted = {(workload, ram, disk, 1.0, load) for ram in RAM for load in LOADS}
            assert wanted <= {*found}


def test_ablations_have_ours_and_every_mechanism_and_nothing_else() -> None:
    for each in CASES:
        if each.set == "ablations":
            assert each.contenders[0] == "ours"
            assert set(each.contenders[1:]) == {name for name in NAMES if is_variant(name)}
        else:
            assert not any(is_variant(name) for name in each.contenders)


def test_peers_that_are_never_the_best_are_compared_on_the_headline_alone() -> None:
    cases = all_cases([*NAMES, "round-robin"])
    with_it = {each.set for each in cases if "round-robin" in each.contenders}
    assert with_it == {"headline", "goodput"}


def test_a_case_says_how_often_a_workload_is_played() -> None:
    (one,) = chosen(CASES, ["goodput-agents-ram1"])
    assert one.plays == 5 * 5 * len(one.contenders)
    (other,) = chosen(CASES, ["headline-agents-ram1-load0.8"])
    assert other.plays == 5 * len(other.contenders)


def test_published_seeds_are_none_that_constants_are_tuned_on() -> None:
    assert all(min(each.seeds) >= FIRST_SEED > 100 for each in CASES)


def test_kinds_of_contenders() -> None:
    assert [each for each in NAMES if is_peer(each)] == ["sglang", "vllm"]
    assert not is_peer("ours-untold")


def test_a_case_gives_its_machine_ram_and_disk() -> None:
    (case,) = chosen(CASES, ["regimes-agents-ram0.2-slow-load0.8"])
    assert case.machine.cpu_tokens == case.machine.shape.gpu_tokens * 0.2
    assert case.machine.rates.disk_tokens_per_s == DISK_TOKENS_PER_S["slow"]
    assert case.fleet_tokens_per_s == 8 * case.machine.rates.prefill_tokens_per_s
    assert case.bound_s in case.bounds_s


def test_cases_are_chosen_by_set_name_and_pattern() -> None:
    assert {each.set for each in chosen(CASES, ["faults", "streaming"])} == {"faults", "streaming"}
    some = chosen(CASES, ["regimes-agents-*", "headline-agents-ram1-load0.8"])
    assert {each.workload for each in some} == {"agents"}
    assert chosen(CASES, []) == CASES
    with pytest.raises(BenchError, match="no set and no case is called 'nonsense'"):
        chosen(CASES, ["headline", "nonsense"])


def test_a_driver_without_ours_is_refused() -> None:
    with pytest.raises(BenchError, match="no contender 'ours', only: sglang"):
        all_cases(["sglang"])
