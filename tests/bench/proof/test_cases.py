"""What is published."""

import pytest

from bench.discrete.contenders import PEERS
from bench.proof.case import BOUNDS, DISK_TOKENS_PER_S, is_peer, is_variant
from bench.proof.cases import (
    FIRST_SEED,
    HEADLINE_LOADS,
    HEADLINE_RAM,
    LEADING,
    LOADS,
    LONG_PAUSES,
    RAM,
    SIZES,
    TRACED,
    WORKLOADS,
    all_cases,
    chosen,
)
from bench.ttft import BenchError
from tests.bench.proof.scripted import BEST, LEFT_OUT, NAMES, NEXT

CASES = all_cases(NAMES)
PEER_NAMES = (NEXT, BEST, "llm-d-affinity", "vllm-kv-aware", LEFT_OUT)


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
        assert each.requests >= 5_000
        assert len(each.seeds) >= 5
        two = {"agents": (NEXT, BEST), "conversation": ("llm-d-affinity", "vllm-kv-aware")}
        cheap = ("shared-infinite-cache", "no-queue")
        assert each.contenders == ("ours", *two[each.workload], *cheap)


def test_two_peers_that_the_driver_has_lead_each_workload_wherever_it_is_compared() -> None:
    assert {*LEADING} == {*WORKLOADS}
    for each in all_cases([*NAMES[:1], *PEERS]):
        peers = {name for name in each.contenders if is_peer(name)}
        if each.set == "ablations":
            assert not peers
        elif each.set == "peers":
            assert peers == {*PEERS}
        else:
            assert peers == {*LEADING[each.workload]}
            assert len(peers) == 2


def test_the_traces_are_published_in_each_of_these_regimes_once() -> None:
    found = [each.regime for each in CASES if each.set in ("headline", "regimes")]
    assert len(found) == len({*found})
    least, *more = RAM
    wanted = {("agents", 1.0, "fast", LONG_PAUSES, 0.8)}
    for workload in TRACED:
        wanted |= {(workload, ram, "fast", 1.0, load) for ram in (least, 1.0) for load in LOADS}
        wanted |= {(workload, ram, "fast", 1.0, load) for ram in more for load in HEADLINE_LOADS}
        wanted |= {(workload, least, "slow", 1.0, 0.8)}
    assert {*found} == wanted


def test_ablations_have_ours_and_every_mechanism_and_nothing_else() -> None:
    ablated = [(each.workload, each.load) for each in CASES if each.set == "ablations"]
    traced = [(workload, load) for workload in TRACED for load in (0.8, 0.95)]
    assert ablated == [*traced, ("mixture", 0.8)]
    for each in CASES:
        if each.set == "ablations":
            assert each.contenders[0] == "ours"
            assert set(each.contenders[1:]) == {name for name in NAMES if is_variant(name)}
        else:
            assert not any(is_variant(name) for name in each.contenders)


def test_one_set_has_all_peers_and_bounds_on_the_headlines_workloads() -> None:
    assert {each.set for each in CASES if LEFT_OUT in each.contenders} == {"peers"}
    some = chosen(CASES, ["peers"])
    assert [(each.workload, each.load) for each in some] == [(name, 0.8) for name in TRACED]
    for each in some:
        assert each.contenders == ("ours", *PEER_NAMES, *BOUNDS)


def test_a_case_says_how_often_a_workload_is_played() -> None:
    (one,) = chosen(CASES, ["goodput-agents-ram1"])
    # Between 0.4 and 1.1 loads that are 0.06 apart are found by four halvings.
    assert one.plays == 4 * len(one.seeds) * len(one.contenders)
    (other,) = chosen(CASES, ["headline-agents-ram1-load0.8"])
    assert other.plays == 5 * len(other.contenders)


def test_published_seeds_are_none_that_constants_are_tuned_on() -> None:
    assert all(min(each.seeds) >= FIRST_SEED > 200 for each in CASES)


def test_kinds_of_contenders() -> None:
    assert [each for each in NAMES if is_peer(each)] == [*PEER_NAMES]
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
    with pytest.raises(BenchError, match="no contender 'ours', only: round-robin"):
        all_cases([LEFT_OUT])
