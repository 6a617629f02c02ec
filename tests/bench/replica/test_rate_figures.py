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


def sample(at_s: float, rates: Rates = RATES, replica: str = "a") -> Sample:
    return Sample(at_s=at_s, replica=replica, rates=rates, router={"disk": 0.9 * GB})


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
    base_s, tiny_s = 0.3, RATES.prefill_s(20)
    cold = {
        tokens: [base_s + slower * (RATES.prefill_s(tokens) - tiny_s), 1e9, 0.0]
        for tokens in (500, 1500)
    }
    found = compare_prefill("before", "a", RATES, cold, tiny=(20, [base_s] * 3))
    assert [each.ratio for each in found] == pytest.approx([slower, slower])
    assert [each.is_close for each in found] == [slower == 1.0] * 2
    assert found[0].measured == pytest.approx(480 / (RATES.prefill_s(500) - tiny_s))


def test_a_tiers_speed_is_that_of_the_further_bytes() -> None:
    def times(kv_bytes: int) -> TierTimes:
        load_s, read_s = kv_bytes / (5 * GB), kv_bytes / (0.5 * GB)
        gpu_s = [0.1, 0.2, 9.0]
        cpu_s = [each + 0.05 + load_s for each in gpu_s]
        disk_s = [each + 0.02 + read_s for each in cpu_s]
        return TierTimes(kv_bytes=kv_bytes, gpu_s=gpu_s, cpu_s=cpu_s, disk_s=disk_s)

    cpu, disk = compare_tiers("before", "a", RATES, times(10**8), times(4 * 10**8))
    assert cpu.ratio == pytest.approx(1.0)
    assert disk.ratio == pytest.approx(2.0)
    assert disk.outside == pytest.approx(0.5 * GB)


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
    turns = [
        turn(50.0, 0.2 + predicted_s),
        turn(150.0, 0.2 + 10 * predicted_s),
        turn(160.0, 5.0, is_staged=True),
        turn(170.0, 5.0, matched={"cpu": 128}),
    ]
    (found,) = compare_turns("during", turns, samples, base_s=0.2)
    assert found.observations == 2
    assert found.ratio == pytest.approx(1.0)
    assert compare_turns("during", [turn(-1.0)], samples, base_s=0.2) == []


def test_drift_is_the_last_quarter_over_the_first() -> None:
    slow = replace(RATES, disk_bytes_per_s=0.5 * GB)
    samples = [sample(10.0 * i, slow if i >= 30 else RATES) for i in range(40)]
    samples[0] = sample(0.0, replace(RATES, disk_bytes_per_s=1000.0 * GB))
    found = {each.what: each.ratio for each in drift(samples, RUN_S, tokens=100, context=0)}
    assert found == pytest.approx(
        {"a: prefill tokens/s": 1.0, "a: CPU RAM bytes/s": 1.0, "a: disk bytes/s": 0.5}
    )
    assert drift(samples[:10], RUN_S, tokens=100, context=0) == []


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
    steady, grown = (
        Change(what="all turns", first=100, last=105),
        [Change(what="all turns", first=100, last=120)],
    )
    assert faults([comparison(119.0), comparison(84.0)], {}, [steady], [steady], 0) == []
    (off,) = faults([comparison(121.0)], {}, [], [steady], 0)
    assert "read from disk, after, a" in off
    (off,) = faults([comparison(83.0)], {}, [], [steady], 0)
    assert "0.83" in off
    assert len(faults([], {}, [], grown, 0)) == 1
    assert len(faults([], {}, [], [], 0)) == 1
    assert faults([], {}, [], [steady], 2) == ["2 requests failed"]


def test_a_prefill_may_drift_as_the_outside_clock_does() -> None:
    steady = [Change(what="all turns", first=100, last=100)]
    slower = Change(what="a: prefill tokens/s", first=100, last=50)
    disk = Change(what="a: disk bytes/s", first=100, last=50)
    honest = {"first": [comparison(100.0)], "last": [comparison(100.0)]}
    wrong = {"first": [comparison(100.0)], "last": [comparison(200.0)]}
    assert faults([], honest, [slower], steady, 0) == []
    assert len(faults([], wrong, [slower], steady, 0)) == 1
    assert len(faults([], {}, [slower], steady, 0)) == 1
    assert len(faults([], honest, [disk], steady, 0)) == 1
