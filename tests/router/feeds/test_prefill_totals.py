"""The speed at which stock vLLM prefills, from two readings of its metrics."""

import pytest

from router.feeds.health_monitor import PrefillTotals


def metrics(seconds: float, tokens: float) -> str:
    """As vLLM 0.32 writes it, for two engines behind one port."""
    return "".join(
        f'vllm:request_prefill_time_seconds_sum{{engine="{n}",model_name="m"}} {seconds / 2}\n'
        f'vllm:request_prefill_kv_computed_tokens_sum{{engine="{n}",model_name="m"}} {tokens / 2}\n'
        for n in (0, 1)
    )


def test_sums_of_all_engines_are_read() -> None:
    found = PrefillTotals.read("# HELP vllm:x y\nother 3\n" + metrics(3.0, 24_000))
    assert (found.seconds, found.tokens) == (3.0, 24_000)
    assert PrefillTotals.read("<html>") == PrefillTotals(0.0, 0.0)
    assert PrefillTotals.read("vllm:request_prefill_time_seconds_sum nonsense") == PrefillTotals(
        0.0, 0.0
    )


@pytest.mark.parametrize(
    ("seconds", "tokens", "speed"),
    [(5.0, 34_000, 5_000.0), (3.0, 34_000, 0.0), (5.0, 24_100, 0.0), (1.0, 100, 0.0)],
)
def test_the_speed_is_that_of_what_came_between(
    seconds: float, tokens: float, speed: float
) -> None:
    before, now = PrefillTotals(3.0, 24_000), PrefillTotals(seconds, tokens)
    assert now.tokens_per_s_since(before) == speed
