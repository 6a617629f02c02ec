"""The measurement of prefetch: sizes, what headers and samples say, the order of the routers."""

import argparse
import json
from collections import Counter
from pathlib import Path

import pytest

from bench.replica.intervals import interval
from bench.replica.model import LARGE_KV, SMALL
from bench.replica.prefetch import _in_turn, main
from bench.replica.prefetch_report import (
    Sample,
    figures,
    is_in_time,
    median_s,
    report,
    saved_s,
    table,
)
from bench.replica.prefetch_stage import CONTEXT_TOKENS, VARIANTS, Sizes

SIZES = Sizes(prefix_tokens=8_000, kv_bytes_per_token=LARGE_KV.kv_bytes_per_token)


def _sample(number: int, variant: str, ttft_s: float, state: str = "idle") -> Sample:
    return Sample(
        round=number,
        replica_is=state,
        prefetch=variant,
        ttft_s=ttft_s,
        held_s=0.0,
        read_bytes=2**20,
        looked_up_s=0.0,
        in_time=variant != "none",
        matched="disk 8000",
    )


def _rounds() -> list[Sample]:
    # The machine becomes slower from round to round; prefetch saves a second in each.
    return [
        _sample(number, variant, 2.0 + 3.0 * number - 1.0 * (variant == "before forward"))
        for number in range(5)
        for variant in ("before forward", "none")
    ]


def test_the_large_kv_is_a_real_models() -> None:
    assert LARGE_KV.kv_bytes_per_token == 128 * 1024
    assert SMALL.kv_bytes_per_token == 8 * 1024


def test_every_tier_has_room_for_the_prefix_and_all_stays_under_10_gb_of_disk() -> None:
    prefix_gb = SIZES.prefix_bytes / 2**30
    assert SIZES.gpu_gb * 2**30 > CONTEXT_TOKENS * SIZES.kv_bytes_per_token
    assert SIZES.cpu_gb / 2 > prefix_gb, "half of the pool may be pinned"
    assert prefix_gb < SIZES.disk_gb < 10


def test_each_router_comes_first_in_turn() -> None:
    turns = [_in_turn(number) for number in range(2 * len(VARIANTS))]
    assert Counter(turn[0] for turn in turns) == dict.fromkeys(VARIANTS, 2)
    assert all(sorted(turn) == sorted(VARIANTS) for turn in turns)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-warmroute-prefetch": "asked=2;promoted=2;pending=0;missing=0"}, True),
        ({"x-warmroute-prefetch": "asked=2;promoted=1;pending=1;missing=0"}, False),
        ({"x-warmroute-prefetch": "asked=2;promoted=1;pending=0;missing=1"}, False),
        ({"x-warmroute-matched-disk": "0", "x-warmroute-matched-cpu": "512"}, True),
        ({"x-warmroute-matched-disk": "256", "x-warmroute-matched-cpu": "256"}, False),
    ],
)
def test_in_time_is_what_was_all_in_ram_when_it_was_forwarded(
    headers: dict[str, str], expected: bool
) -> None:
    assert is_in_time(headers) == expected


def test_what_is_saved_is_compared_within_a_round() -> None:
    saved = saved_s(_rounds(), "idle", "before forward")
    assert (saved.value, saved.low, saved.high) == pytest.approx((1.0, 1.0, 1.0))
    alone = median_s(_rounds(), "idle", "before forward")
    assert alone.high - alone.low > 3.0


def test_a_round_that_lacks_one_of_the_two_is_left_out() -> None:
    samples = [*_rounds(), _sample(9, "before forward", 100.0)]
    assert saved_s(samples, "idle", "before forward").value == pytest.approx(1.0)


def test_the_table_and_the_report_have_every_condition_that_was_measured() -> None:
    samples = [*_rounds(), *(_sample(0, variant, 5.0, "queue") for variant in VARIANTS)]
    assert len(table(samples).splitlines()) == 2 + 2 + 2
    arguments = argparse.Namespace(tokens=8000, kv_bytes_per_token=131072, rounds=5, seed=1)
    told = json.loads(json.dumps(report(arguments, SIZES, samples)))
    assert [(each["replica_is"], each["prefetch"]) for each in told["figures"]] == [
        ("idle", "before forward"),
        ("idle", "none"),
        *(("queue", variant) for variant in VARIANTS),
    ]
    assert figures(samples, "idle", "before forward")["in_time_share"] == 1.0
    assert len(told["samples"]) == len(samples)


def test_intervals_hold_the_value_and_narrow_with_more_samples() -> None:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    few = interval(mean, [float(each % 7) for each in range(14)])
    many = interval(mean, [float(each % 7) for each in range(700)])
    assert few.low < few.value < few.high
    assert many.high - many.low < (few.high - few.low) / 3
    assert interval(mean, [1.0, 2.0, 5.0]) == interval(mean, [1.0, 2.0, 5.0])
    with pytest.raises(ValueError, match="no samples"):
        interval(mean, [])


@pytest.mark.parametrize("tokens", ["500", "16000"])
def test_prefixes_that_no_tier_could_show_are_refused(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["--tokens", tokens])
    assert "--tokens: from 1024 to" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
