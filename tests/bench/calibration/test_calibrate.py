"""Calibration of the simulated replica: rates from times, and what the table says of answers."""

import math
import statistics
from pathlib import Path

import pytest

from bench.calibration.__main__ import Measured, ask_all
from bench.calibration.kinds import CPU, DISK, GPU, PREFIX_TOKENS, Prompts
from bench.calibration.rates import FittedRates, Times, fit
from bench.calibration.replica import SHAPE, start_simulated
from bench.calibration.report import Row, as_json, rows, table
from bench.calibration.target import Asked, Target
from router.launch.processes import ProcessGroup

BATCHED_TOKENS = 2048
RATES = FittedRates(
    request_s=0.02,
    step_s=0.01,
    decode_s_per_sequence=0.002,
    prefill_tokens_per_s=5_000.0,
    attention_tokens=1_500.0,
    load_tokens_per_s=400_000.0,
    disk_tokens_per_s=50_000.0,
)


def _times(rates: FittedRates, prefix_tokens: int = 8192) -> Times:
    """What a replica with these rates takes."""

    def cold_s(tokens: int) -> float:
        steps = math.ceil(tokens / BATCHED_TOKENS)
        attention = tokens / 2 / rates.attention_tokens if rates.attention_tokens else 0
        prefill_s = tokens / rates.prefill_tokens_per_s * (1 + attention)
        return rates.request_s + steps * rates.step_s + prefill_s

    load_s = prefix_tokens / rates.load_tokens_per_s
    return Times(
        cold_s={tokens: cold_s(tokens) for tokens in (64, 1024, 4096, 8192)},
        token_s={n: rates.step_s + n * rates.decode_s_per_sequence for n in (1, 4)},
        gpu_s=0.1,
        cpu_s=0.1 + load_s,
        disk_s=0.1 + load_s + prefix_tokens / rates.disk_tokens_per_s,
        prefix_tokens=prefix_tokens,
    )


def _same(found: FittedRates, wanted: FittedRates) -> bool:
    names = FittedRates.__dataclass_fields__
    return all(
        getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-6, abs=1e-9)
        for name in names
    )


def test_the_rates_that_give_the_times_are_found() -> None:
    assert _same(fit(_times(RATES), batched_tokens=BATCHED_TOKENS), RATES)


@pytest.mark.parametrize("absent", ["request_s", "decode_s_per_sequence", "attention_tokens"])
def test_what_takes_no_time_is_found_to_take_none(absent: str) -> None:
    rates = FittedRates(**(vars(RATES) | {absent: 0.0}))
    assert _same(fit(_times(rates), batched_tokens=BATCHED_TOKENS), rates)


def test_no_rate_is_negative_or_without_bound_when_times_are_noise() -> None:
    times = Times(
        cold_s={64: 0.9, 1024: 0.5, 4096: 2.0, 8192: 1.5},
        token_s={1: 0.05, 4: 0.02},
        gpu_s=0.2,
        cpu_s=0.1,
        disk_s=0.1,
        prefix_tokens=8192,
    )
    rates = vars(fit(times, batched_tokens=BATCHED_TOKENS))
    assert all(0 <= rate < 1e8 for rate in rates.values()), rates


def test_times_that_do_not_grow_with_the_prompt_are_refused() -> None:
    times = _times(RATES)
    flat = Times(**(vars(times) | {"cold_s": {64: 1.0, 1024: 0.9, 4096: 0.8}}))
    with pytest.raises(ValueError, match="does not grow with the prompt"):
        fit(flat, batched_tokens=BATCHED_TOKENS)


def _asked(*ttfts_s: float, cached_tokens: int = 0) -> list[Asked]:
    return [Asked(ttft_s=each, cached_tokens=cached_tokens) for each in ttfts_s]


def test_medians_are_compared() -> None:
    row = Row(name="r", real=_asked(1.0, 1.1, 9.0), simulated=_asked(1.2, 0.1, 1.3))
    assert row.ratio == pytest.approx(1.2 / 1.1)
    assert row.is_close


@pytest.mark.parametrize(("simulated_s", "is_close"), [(0.79, False), (0.81, True), (1.21, False)])
def test_close_is_within_a_fifth_of_the_real_time(simulated_s: float, is_close: bool) -> None:
    row = Row(name="r", real=_asked(1.0), simulated=_asked(simulated_s))
    assert row.is_close == is_close
    assert ("not within 20%" in table([row])) == (not is_close)


def test_other_hits_are_told_whatever_the_times() -> None:
    one, other = _asked(1.0, 1.0, cached_tokens=512), _asked(1.0, cached_tokens=512)
    other += _asked(1.0, cached_tokens=256)
    row = Row(name="r", real=one, simulated=other)
    assert not row.has_same_hits
    shown = table([row]).splitlines()[-1]
    assert "512/256" in shown
    assert shown.endswith("other hits")
    assert as_json(row)["same_hits"] is False


def test_rows_collect_the_rounds_by_name() -> None:
    (first, second) = rows(
        [{"a": _asked(1.0)[0], "b": _asked(2.0)[0]}, {"a": _asked(3.0)[0], "b": _asked(4.0)[0]}],
        [{"b": _asked(6.0)[0], "a": _asked(5.0)[0]}, {"b": _asked(8.0)[0], "a": _asked(7.0)[0]}],
    )
    assert (first.name, first.real_s, first.simulated_s) == ("a", 2.0, 6.0)
    assert (second.name, second.real_s, second.simulated_s) == ("b", 3.0, 7.0)


def test_the_same_seed_is_the_same_prompts() -> None:
    one, same, other = Prompts(1), Prompts(1), Prompts(2)
    assert [one.next(50), one.next(9)] == [same.next(50), same.next(9)]
    assert one.next(50) != same.next(40)[:50]
    assert Prompts(1).next(50) != other.next(50)


def test_the_kinds_hit_what_they_are_named_after(tmp_path: Path) -> None:
    """Of the simulated replica here; the real one's hits must be the same."""
    rates = FittedRates(
        request_s=0.001,
        step_s=0.01,
        decode_s_per_sequence=0.0,
        prefill_tokens_per_s=1e6,
        attention_tokens=0.0,
        load_tokens_per_s=1e6,
        disk_tokens_per_s=1e6,
    )
    measured = Measured()
    with ProcessGroup() as group:
        target = Target(start_simulated(group, tmp_path, rates))
        found = {
            name: each.cached_tokens for name, each in ask_all(target, number=0, seed=1).items()
        }
        for seed in (1, 2):
            measured.take(target, Prompts(seed))
    blocks, chunks = PREFIX_TOKENS // SHAPE.block_tokens, PREFIX_TOKENS // SHAPE.chunk_tokens
    warm = {
        GPU: blocks * SHAPE.block_tokens,
        CPU: chunks * SHAPE.chunk_tokens,
        DISK: chunks * SHAPE.chunk_tokens,
    }
    assert {name: tokens for name, tokens in found.items() if tokens} == warm
    assert len(found) == len(warm) + 5
    assert [each[CPU].cached_tokens for each in measured.hits] == [8192, 8192]
    assert all(len(each) == 2 for each in measured.cold_s.values())
    assert measured.times().cpu_s == statistics.median(each[CPU].ttft_s for each in measured.hits)
