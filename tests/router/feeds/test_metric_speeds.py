"""The speeds of stock vLLM, and of the LMCache inside it, from readings of its metrics."""

import pytest

from router.feeds.replica_answers import vllm_counters
from router.fleet.cost_model import CostPart
from router.fleet.counter_speeds import CounterSpeeds, Others, Speed

KV_BYTES_PER_TOKEN = 1000.0
COUNTERS = vllm_counters(KV_BYTES_PER_TOKEN)


def prefills(seconds: float, tokens: float) -> str:
    """As vLLM 0.32 writes it, for two engines behind one port."""
    return "".join(
        f'vllm:request_prefill_time_seconds_sum{{engine="{n}",model_name="m"}} {seconds / 2}\n'
        f'vllm:request_prefill_kv_computed_tokens_sum{{engine="{n}",model_name="m"}} {tokens / 2}\n'
        for n in (0, 1)
    )


def lmcache(
    *, tokens: float = 0.0, to_gpu_s: float = 0.0, remote_bytes: float = 0.0, remote_ms: float = 0.0
) -> str:
    """As the ``PrometheusLogger`` of LMCache 0.5.6 writes it, for two ranks that do the same.

    Each rank counts all tokens, and its own part of their bytes.
    """
    return "".join(
        f"{name}{{{labels}}} {value}\n"
        for rank in (0, 1)
        for labels in [f'model_name="a b",role="worker",served_model_name="m",worker_id="{rank}"']
        for name, value in (
            ("lmcache:retrieve_to_gpu_time_sum", to_gpu_s),
            ("lmcache:retrieve_to_gpu_time_count", 1.0),
            ("lmcache:remote_time_to_get_sync_sum", remote_ms),
            ("lmcache:remote_time_to_get_sync_count", 1.0),
            ("lmcache:num_hit_tokens_total", tokens),
            ("lmcache:num_remote_read_bytes_total", remote_bytes),
        )
    )


def speeds(*pages: str) -> list[Speed]:
    """Return what the last page gives after the ones before."""
    found = CounterSpeeds()
    return [found.read(page, COUNTERS) for page in pages][-1]


def test_a_first_reading_gives_no_speed() -> None:
    assert speeds(prefills(3.0, 24_000) + lmcache(tokens=4096, to_gpu_s=0.02)) == []


@pytest.mark.parametrize(
    ("seconds", "tokens", "expected"),
    [
        (5.0, 34_000, [Speed(CostPart.PREFILL, 5_000.0, 34_000)]),
        (3.0, 34_000, []),
        (5.0, 24_100, []),
        (1.0, 100, []),
    ],
)
def test_the_speed_is_that_of_what_came_between(
    seconds: float, tokens: float, expected: list[Speed]
) -> None:
    assert speeds(prefills(3.0, 24_000), prefills(seconds, tokens)) == expected


def test_what_is_too_little_counts_later_and_a_restart_starts_again() -> None:
    small = prefills(3.5, 25_000)
    assert speeds(prefills(3.0, 24_000), small, prefills(4.0, 26_100)) == [
        Speed(CostPart.PREFILL, 2_100.0, 26_100)
    ]
    assert speeds(prefills(3.0, 24_000), prefills(0.5, 1_000), prefills(1.5, 6_000)) == [
        Speed(CostPart.PREFILL, 5_000.0, 6_000)
    ]


@pytest.mark.parametrize(
    "page",
    ["<html>", "vllm:request_prefill_time_seconds_sum nonsense", prefills(5.0, float("nan"))],
)
def test_a_page_without_numbers_gives_no_speed_and_does_no_harm(page: str) -> None:
    assert speeds(page, prefills(3.0, 24_000), page) == []
    readings = (prefills(3.0, 24_000), prefills(5.0, 34_000))
    assert Speed(CostPart.PREFILL, 5_000.0, 34_000) in speeds(page, *readings)


def test_what_says_nothing_about_the_speed_is_left_out() -> None:
    """One of two prompts was pulled: vLLM counts its 8,000 tokens, and a step of 0.125 s."""
    found = CounterSpeeds()

    def read(seconds: float, tokens: float, others: Others) -> list[Speed]:
        return found.read(prefills(seconds, tokens), COUNTERS, {CostPart.PREFILL: others})

    assert read(3.0, 24_000, Others(0.0, 0.0)) == []
    assert read(4.125, 36_000, Others(8_000, 0.125)) == [Speed(CostPart.PREFILL, 4_000.0, 36_000)]
    assert read(4.25, 44_000, Others(16_000, 0.25)) == []
    # This time says nothing, and does not count later.
    assert read(5.25, 52_000, Others(16_000, 0.25, are_known=False)) == []
    assert read(6.25, 56_000, Others(16_000, 0.25)) == [Speed(CostPart.PREFILL, 4_000.0, 56_000)]
    # Most of the time was that of pulled prompts.
    assert read(8.25, 60_000, Others(16_000, 1.75)) == []


def between_tokens(seconds: float, tokens: int) -> str:
    return (
        f'vllm:inter_token_latency_seconds_sum{{engine="0"}} {seconds}\n'
        f'vllm:inter_token_latency_seconds_count{{engine="0"}} {tokens}.0\n'
    )


def test_the_time_between_output_tokens_is_read() -> None:
    before = between_tokens(1.0, 100)
    assert speeds(before, between_tokens(5.0, 300)) == [Speed(CostPart.OUTPUT_TOKEN, 50.0, 300)]
    assert speeds(before, between_tokens(2.0, 150)) == []


def test_lmcache_inside_vllm_times_its_loads_and_its_remote_reads() -> None:
    """The ranks load and read at the same time: two of 0.2 GB in 0.25 s are 1.6 GB/s."""
    before = lmcache(tokens=4096, to_gpu_s=0.25, remote_bytes=1e8, remote_ms=100.0)
    now = lmcache(tokens=8192, to_gpu_s=0.5, remote_bytes=3e8, remote_ms=350.0)
    assert speeds(before, now) == [
        Speed(CostPart.LOAD, 4096 / 0.25 * KV_BYTES_PER_TOKEN, 2 * 8192),
        Speed(CostPart.REMOTE, 1.6e9, 6e8),
    ]


def test_bytes_that_lmcache_has_not_timed_give_no_speed() -> None:
    """With ``enable_async_loading`` it counts remote reads and does not time them."""
    assert speeds(lmcache(remote_bytes=1e8), lmcache(remote_bytes=3e8)) == []
