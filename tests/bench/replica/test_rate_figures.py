"""Measured rates against an outside clock: which are off, what drifts, and what grows."""

from dataclasses import replace
from typing import Any

import pytest

from bench.replica.rate_figures import (
    Change,
    Comparison,
    Rates,
    Sample,
    TierTimes,
    Turn,
    alone,
    by_minute,
    compare_prefill,
    compare_tiers,
    compare_turns,
    drift,
    faults,
    growth,
    router_ratios,
)

RUN_S = 400.0
GB = 10**9
RATES = Rates(
    prefill_token_s=0.001, attended_token_s=1e-6, cpu_bytes_per_s=5.0 * GB, disk_bytes_per_s=GB
)


def turn(sent_s: float, ttft_s: float = 1.0, **changes: object) -> Turn:
    made = Turn(
        kind=1,
        sent_s=sent_s,
        first_s=sent_s + ttft_s,
        ended_s=sent_s + ttft_s + 0.5,
        prompt_tokens=1000,
        cached_tokens=768,
        reusable_tokens=768,
        replica="a",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def sample(
    at_s: float, rates: Rates = RATES, replica: str = "a", disk: float | None = 2.0 * GB
) -> Sample:
    return Sample(
        at_s=at_s,
        replica=replica,
        rates=rates,
        router={"disk": 0.9 * GB},
        memory_bytes_per_s=8.0 * GB,
        disk_bytes_per_s=disk,
    )


def comparison(measured: float, outside: float = 100.0) -> Comparison:
    return Comparison(
        what="read from disk",
        when="after",
        replica="a",
        unit="bytes/s",
        measured=measured,
        outside=outside,
        observations=3,
    )


def test_rates_are_read_from_an_agents_report_when_all_were_measured() -> None:
    info: dict[str, Any] = {
        "compute": {"prefill_token_s": 0.001, "attended_token_s": 1e-6},
        "tiers": {"cpu": {"read_bytes_per_s": 5.0 * GB}, "disk": {"read_bytes_per_s": GB}},
    }
    assert Rates.of(info) == RATES
    assert Rates.of({**info, "compute": None}) is None
    unread = {**info["tiers"], "disk": {"read_bytes_per_s": 0.0}}
    assert Rates.of({**info, "tiers": unread}) is None


def test_a_prefill_attends_to_its_context_and_to_half_of_itself() -> None:
    assert RATES.prefill_s(100) == pytest.approx(0.1 + 100 * 50 * 1e-6)
    assert RATES.prefill_s(100, 1000) == pytest.approx(0.1 + 100 * 1050 * 1e-6)


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_a_prefill_speed_is_compared_without_the_base_of_every_request(slower: float) -> None:
    tiny_s = RATES.prefill_s(20)
    cold = [
        (tokens, 0.3 + slower * (RATES.prefill_s(tokens) - tiny_s) + noise_s)
        for tokens, noise_s in ((500, -0.1), (1500, 0.1))
    ]
    found = compare_prefill("before", "a", RATES, cold, tiny=(20, [0.2, 0.4]))
    assert found.ratio == pytest.approx(slower)
    assert found.is_close == (slower == 1.0)
    predicted_s = RATES.prefill_s(500) + RATES.prefill_s(1500) - 2 * tiny_s
    assert found.measured == pytest.approx(1960 / predicted_s)


def test_a_tiers_speed_is_that_of_the_further_bytes() -> None:
    short = TierTimes(kv_bytes=10**8, cpu_s=[0.02, 0.12], disk_s=[9.0, 9.0])
    long = TierTimes(kv_bytes=10**9, cpu_s=[0.15, 0.35], disk_s=[2.15, 2.35])
    cpu, disk = compare_tiers("before", "a", RATES, short, long)
    assert cpu.outside == pytest.approx(5 * GB)
    assert cpu.ratio == pytest.approx(1.0)
    assert disk.outside == pytest.approx(0.5 * GB)
    assert disk.ratio == pytest.approx(2.0)


def test_turns_are_alone_that_overlap_no_other_at_their_replica() -> None:
    turns = [
        turn(0.0),
        turn(0.5, replica="b"),
        turn(2.0),
        turn(2.9),  # while the one before computes
        turn(4.2),  # while the one before decodes
        turn(10.0, held_s=0.2),
        turn(20.0, failure="refused", replica=""),
        turn(20.5),
        turn(21.6),  # the one before has its first token, but decodes
    ]
    assert [each.sent_s for each in alone(turns)] == [0.0, 0.5, 20.5]


def test_turns_are_compared_with_the_rates_of_their_time() -> None:
    slow = replace(RATES, prefill_token_s=0.01, attended_token_s=1e-5)
    samples = [sample(0.0), sample(100.0, slow), sample(0.0, slow, replica="b")]
    predicted_s = RATES.prefill_s(232, 768)
    matched = {"gpu": 256, "cpu": 256, "disk": 256}
    fetched_s = 256_000_000 / GB + 512_000_000 / (5 * GB)
    turns = [
        turn(50.0, 0.2 + predicted_s),
        turn(60.0, 0.2 + predicted_s + fetched_s, matched=matched),
        turn(150.0, 0.2 + 10 * predicted_s),
        turn(160.0, 50.0, is_copied=True),
    ]
    known = {"base_s": 0.2, "kv_bytes_per_token": 1_000_000}
    (found,) = compare_turns("during", turns, samples, **known)  # type: ignore[arg-type]
    assert found.observations == 3
    assert found.ratio == pytest.approx(1.0)
    assert compare_turns("during", [turn(-1.0)], samples, base_s=0.2, kv_bytes_per_token=1) == []


def test_drift_is_the_last_quarter_over_the_first() -> None:
    slow = replace(RATES, disk_bytes_per_s=0.5 * GB)
    samples = [sample(10.0 * i, slow if i >= 30 else RATES) for i in range(40)]
    samples[0] = sample(0.0, replace(RATES, disk_bytes_per_s=1000.0 * GB))
    usual = {"tokens": 100, "context": 0}
    found = {each.what: each for each in drift(samples, RUN_S, [], **usual)}
    assert {what: each.ratio for what, each in found.items()} == pytest.approx(
        {"a: prefill tokens/s": 1.0, "a: CPU RAM bytes/s": 1.0, "a: disk bytes/s": 0.5}
    )
    assert [each.outside for each in found.values()] == [None, 1.0, 1.0]
    assert [each.is_drift for each in found.values()] == [False, False, True]
    assert drift(samples[:10], RUN_S, [], **usual) == []


def test_a_rate_that_changes_as_the_machine_does_is_no_drift() -> None:
    slow = Rates(
        prefill_token_s=0.002, attended_token_s=2e-6, cpu_bytes_per_s=5.0 * GB, disk_bytes_per_s=GB
    )
    samples = [sample(10.0), sample(390.0, replace(slow, disk_bytes_per_s=0.5 * GB), disk=GB)]
    usual = {"tokens": 100, "context": 0}
    prefill, _, disk = drift(samples, RUN_S, [[comparison(100.0)], [comparison(105.0)]], **usual)
    assert prefill.ratio == pytest.approx(0.5)
    assert prefill.outside == pytest.approx(0.5 / 1.05)
    assert (prefill.is_drift, disk.is_drift) == (False, False)
    wrong, *_ = drift(samples, RUN_S, [[comparison(100.0)], [comparison(60.0)]], **usual)
    assert wrong.is_drift


def test_growth_does_not_depend_on_the_mix_of_turns() -> None:
    def turns(at_s: float, kind: int, count: int, computed: int) -> list[Turn]:
        return [turn(at_s, kind=kind, cached_tokens=1000 - computed)] * count

    same = [*turns(0, 0, 1, 600), *turns(0, 1, 3, 200), *turns(399, 0, 3, 600)]
    same += turns(399, 1, 1, 200)
    assert [each.ratio for each in growth(same, RUN_S)] == [1.0, 1.0, 1.0]
    grown = [*same, *turns(399, 1, 1, 400), *turns(399, 5, 9, 900)]
    *kinds, overall = growth(grown, RUN_S)
    assert [each.what for each in kinds] == ["turn 0", "turn 1"]
    assert kinds[1].ratio == pytest.approx(1.5)
    assert 1.0 < overall.ratio < 1.5
    assert growth(turns(0, 0, 5, 100), RUN_S) == []


def test_lost_tokens_are_those_that_were_computed_before() -> None:
    assert turn(0.0).lost_tokens == 0
    assert turn(0.0, cached_tokens=512).lost_tokens == 256
    assert turn(0.0, cached_tokens=896).lost_tokens == 0


def test_the_run_is_told_minute_by_minute() -> None:
    turns = [turn(10.0), turn(20.0, cached_tokens=512), turn(30.0, kind=0, cached_tokens=0)]
    turns += [turn(70.0, failure="refused")]
    first, second = by_minute(turns, [sample(30.0)], 120.0, tokens=100, context=0)
    assert first["requests"] == 3
    assert first["computed_tokens_of_first_turns"] == 1000
    assert first["computed_tokens_of_later_turns"] == (232 + 488) / 2
    assert first["lost_tokens_of_later_turns"] == 128
    assert first["rates"]["a"]["disk_bytes_per_s"] == GB
    assert (second["requests"], second["ttft_p50_s"], second["rates"]) == (0, None, {})


def test_the_routers_rates_are_told_as_ratios_to_the_agents() -> None:
    assert router_ratios([sample(0.0), sample(1.0)]) == {"disk": pytest.approx(0.9)}


def test_faults_name_what_does_not_hold() -> None:
    steady = Change(what="all turns", first=100, last=105)
    grown = Change(what="all turns", first=100, last=120)
    drifted = Change(what="a: disk bytes/s", first=100, last=50)
    assert faults([comparison(119.0), comparison(84.0)], [steady], [steady], 0) == []
    (off,) = faults([comparison(121.0)], [], [steady], 0)
    assert "read from disk, after, a" in off
    (off,) = faults([comparison(83.0)], [], [steady], 0)
    assert "0.83" in off
    (off,) = faults([], [drifted], [steady], 0)
    assert "disk" in off
    assert len(faults([], [], [steady, grown], 0)) == 1
    assert len(faults([], [], [], 0)) == 1
    assert faults([], [], [steady], 2) == ["2 requests failed"]
