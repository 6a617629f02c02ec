"""What is published."""

from dataclasses import replace

import pytest

from bench.discrete.contenders import NAMES as REAL_NAMES
from bench.discrete.contenders import PEERS
from bench.proof.case import ANSWERS, DISK_TOKENS_PER_S, is_peer, is_split, is_variant
from bench.proof.cases import (
    ABLATED,
    EVERYWHERE,
    FIRST_SEED,
    LEADING,
    SIZES,
    TRACED,
    WORKLOADS,
    all_cases,
    chosen,
)
from bench.ttft import BenchError
from tests.bench.proof.scripted import LEFT_OUT, NAMES

CASES = all_cases(NAMES)


def test_names_are_unique_and_every_set_has_cases() -> None:
    assert len({each.name for each in CASES}) == len(CASES)
    assert {each.set for each in CASES} == {*SIZES}


def test_nothing_is_compared_twice_and_every_regime_is() -> None:
    compared = [
        (each.regime, each.fault, each.all_streamed)
        for each in CASES
        if each.load is not None and each.set not in {"ablations", "peers", "answers"}
    ]
    assert len({*compared}) == len(compared)
    assert len(EVERYWHERE) == (4 * 3 + 2) * 3
    for each in EVERYWHERE:
        regime = (each.workload, each.ram, "fast", 1.0, each.load)
        assert (regime, None, False) in compared


def test_the_headline_has_bounds_and_more_than_the_traces() -> None:
    headline = chosen(CASES, ["headline"])
    assert {each.workload for each in headline} == {*TRACED, "rounds", "burst", "mixture"}
    assert [each.name for each in headline if each.pause_scale != 1] == [
        "headline-agents-ram1-pauses5-load0.8"
    ]
    for each in headline:
        assert each.contenders[-2:] == ("shared-infinite-cache", "no-queue")


def test_two_peers_that_the_driver_has_lead_each_workload_wherever_it_is_compared() -> None:
    assert {*LEADING} == {*WORKLOADS}
    for each in all_cases([*NAMES[:1], *PEERS]):
        peers = {name for name in each.contenders if is_peer(name)}
        if each.set in {"ablations", "answers"}:
            assert not peers
        elif each.set == "peers":
            assert peers == {*PEERS}
        else:
            assert peers == {*LEADING[each.workload]}
            assert len(peers) == 2


def test_ablations_have_ours_and_every_mechanism_and_nothing_else() -> None:
    ablated = [(each.workload, each.load, each.ram) for each in CASES if each.set == "ablations"]
    assert ablated == [*ABLATED]
    assert {*TRACED, "rounds", "mixture", "burst"} == {workload for workload, *_ in ablated}
    for each in CASES:
        if each.set == "ablations":
            assert each.contenders[0] == "ours"
            assert set(each.contenders[1:]) == {name for name in NAMES if is_variant(name)}
        else:
            assert not any(is_variant(name) for name in each.contenders)


def test_a_case_says_how_often_a_workload_is_played() -> None:
    (one,) = chosen(CASES, ["goodput-agents-ram1"])
    # Between 0.5 and 1.1 loads that are 0.08 apart are found by three halvings.
    assert one.plays == 3 * len(one.seeds) * len(one.contenders)
    (other,) = chosen(CASES, ["headline-agents-ram1-load0.8"])
    assert other.plays == len(other.seeds) * len(other.contenders)


def test_published_seeds_are_none_that_constants_are_tuned_on() -> None:
    assert all(min(each.seeds) >= FIRST_SEED > 200 for each in CASES)


def test_a_case_gives_its_machine_ram_and_disk() -> None:
    (case,) = chosen(CASES, ["regimes-agents-ram0.2-slow-load0.8"])
    assert case.machine.cpu_tokens == case.machine.shape.gpu_tokens * 0.2
    assert case.machine.rates.disk_tokens_per_s == DISK_TOKENS_PER_S["slow"]
    assert case.fleet_tokens_per_s == 8 * case.machine.rates.prefill_tokens_per_s
    assert case.bound_s in case.bounds_s


def test_a_decode_takes_the_longer_the_more_context_it_reads() -> None:
    (case,) = chosen(CASES, ["headline-agents-ram1-load0.8"])
    flat, by_context = case.machine.rates, replace(case, decode="by-context").machine.rates
    assert flat.decode_s(10, 500_000) == flat.decode_s(10) == pytest.approx(0.008)
    # 500,000 tokens of 128 KiB at 4.8 TB/s, after a step of 6 ms with 47 us for each sequence.
    assert by_context.decode_s(10, 500_000) == pytest.approx(0.006 + 0.00047 + 0.01365, rel=1e-3)


def test_whole_answers_are_compared_with_fixed_splits_on_three_networks() -> None:
    cases = chosen(all_cases(REAL_NAMES), ["answers"])
    assert len(cases) == 3 * 4 * 3
    for each in cases:
        assert {*ANSWERS, "ours"} < {*each.contenders}
        assert sum(map(is_split, each.contenders)) == 6
    (one,) = chosen(cases, ["answers-agents-ram1-load0.8-net25"])
    assert (one.decode, one.bound_s, one.tpot_bound_s) == ("by-context", 5.0, 0.03)
    # 25 Gbit/s are 3.125 GB/s: 23,842 tokens of 128 KiB.
    assert one.machine.rates.pull_tokens_per_s == pytest.approx(23_842, rel=1e-4)
    others = [each for each in all_cases(REAL_NAMES) if each.set != "answers"]
    assert not any(is_split(name) or name in ANSWERS for each in others for name in each.contenders)


def test_cases_are_chosen_by_set_name_and_pattern() -> None:
    assert {each.set for each in chosen(CASES, ["faults", "streaming"])} == {"faults", "streaming"}
    some = chosen(CASES, ["regimes-agents-*", "headline-agents-ram1-load0.8"])
    assert {each.workload for each in some} == {"agents"}
    assert chosen(CASES, []) == CASES
    with pytest.raises(BenchError, match="no set and no case is called 'nonsense'"):
        chosen(CASES, ["headline", "nonsense"])


def test_a_driver_without_ours_is_refused() -> None:
    with pytest.raises(BenchError, match="no contender 'ours', only: round-robin"):
        all_cases([LEFT_OUT])
