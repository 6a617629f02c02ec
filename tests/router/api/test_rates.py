"""What a key may use a minute, with the time given."""

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from router.api.charge import Charge
from router.api.grant import Grant, duration
from router.config.settings import KeyConfig
from warmroute_common.api_errors import RateLimitedError, UnauthorizedError

Refused = Counter[tuple[str, str]]
MIDNIGHT_S = 1_800_000_000.0 - 28_800.0
"""Begin of 2027-01-15, UTC."""


def grant(refused: Refused | None = None, **limits: Any) -> Grant:
    key = KeyConfig(name="team", sha256="0" * 64, **limits)
    return Grant(key, Counter() if refused is None else refused)


def test_a_minutes_requests_may_come_at_once_and_then_come_back_evenly() -> None:
    refused: Refused = Counter()
    team = grant(refused, requests_per_minute=3)
    for _ in range(3):
        team.take_request(1000.0)
    with pytest.raises(RateLimitedError, match="requests per minute") as caught:
        team.take_request(1000.0)
    assert (caught.value.retry_after_s, caught.value.cause) == (20, "key-requests")
    with pytest.raises(RateLimitedError):
        team.take_request(1019.0)
    team.take_request(1020.0)
    with pytest.raises(RateLimitedError):
        team.take_request(1020.0)
    for _ in range(3):
        team.take_request(9000.0)
    with pytest.raises(RateLimitedError):
        team.take_request(9000.0)
    assert refused == {("team", "requests"): 4}


def test_a_refused_request_uses_up_nothing() -> None:
    team = grant(requests_per_minute=1, tokens_per_minute=60)
    team.take_request(0.0)
    team.take_prompt(100, 0.0)
    for now_s in range(60):
        with pytest.raises(RateLimitedError):
            team.take_request(float(now_s))
    team.take_request(60.0)


def test_a_prompt_larger_than_a_minutes_tokens_goes_and_is_paid_off() -> None:
    team = grant(tokens_per_minute=60)
    team.take_request(0.0)
    team.take_prompt(100, 0.0)
    team.take_answer(19, 10.0)
    with pytest.raises(RateLimitedError, match="tokens per minute") as caught:
        team.take_request(10.0)
    assert caught.value.retry_after_s == 50
    team.take_request(60.0)


def test_requests_that_came_together_do_not_all_pass() -> None:
    """All were let in before the first one's prompt was read."""
    team = grant(tokens_per_minute=100)
    for _ in range(3):
        team.take_request(0.0)
    team.take_prompt(99, 0.0)
    team.take_prompt(1000, 0.0)
    with pytest.raises(RateLimitedError):
        team.take_prompt(1, 0.0)


def test_a_stream_that_tells_no_usage_is_counted_by_its_size() -> None:
    team = grant(tokens_per_minute=60)
    Charge(team).settle(
        prompt_tokens=None, output_tokens=None, answer_bytes=256 * 60, is_json=False, now_s=0.0
    )
    with pytest.raises(RateLimitedError):
        team.take_request(0.0)
    team.take_request(1.0)


def test_the_budget_of_a_day_ends_at_midnight_and_begins_again() -> None:
    """As much as the day's last request took too much is not owed the next day."""
    refused: Refused = Counter()
    utc_s = [MIDNIGHT_S - 7200.0]
    key = KeyConfig(name="team", sha256="0" * 64, tokens_per_day=1000)
    team = Grant(key, refused, utc_clock=lambda: utc_s[0])
    team.take_prompt(999, 0.0)
    team.take_prompt(5000, 0.0)
    with pytest.raises(RateLimitedError, match="1000 tokens per day; the next day") as caught:
        team.take_request(0.0)
    assert (caught.value.retry_after_s, caught.value.code) == (7200, "insufficient_quota")
    assert refused == {("team", "budget"): 1}
    utc_s[0] = MIDNIGHT_S
    team.take_request(0.0)
    assert team.limit_headers(0.0)["x-ratelimit-remaining-tokens"] == "1000"


def test_a_budget_that_is_raised_keeps_what_was_used() -> None:
    key = KeyConfig(name="team", sha256="0" * 64, tokens_per_day=100)
    team = Grant(key, Counter(), utc_clock=lambda: MIDNIGHT_S)
    team.take_prompt(150, 0.0)
    team.change(replace(key, tokens_per_day=200))
    assert team.limit_headers(0.0)["x-ratelimit-remaining-tokens"] == "50"


def test_a_key_is_valid_until_the_end_of_its_last_day() -> None:
    refused: Refused = Counter()
    utc_s = [MIDNIGHT_S + 86_399.0]
    key = KeyConfig(name="team", sha256="0" * 64, valid_until="2027-01-15")
    team = Grant(key, refused, utc_clock=lambda: utc_s[0])
    team.take_request(0.0)
    utc_s[0] = MIDNIGHT_S + 86_400.0
    with pytest.raises(UnauthorizedError, match="last day was 2027-01-15") as caught:
        team.take_request(0.0)
    assert caught.value.code == "expired_api_key"
    assert refused == {("team", "expired"): 1}


def test_a_limit_of_requests_under_way_at_once() -> None:
    refused: Refused = Counter()
    team = grant(refused, max_parallel_requests=2)
    team.take_request(0.0)
    team.take_request(0.0)
    with pytest.raises(RateLimitedError, match="2 requests under way, and may have 2") as caught:
        team.take_request(0.0)
    assert (caught.value.cause, caught.value.retry_after_s) == ("key-parallel", 1)
    team.end_request()
    team.take_request(0.0)
    assert refused == {("team", "parallel"): 1}


def test_each_of_several_routers_enforces_its_part() -> None:
    limits: Any = {"tokens_per_minute": 3000, "tokens_per_day": 9000, "max_parallel_requests": 2}
    key = KeyConfig(name="team", sha256="0" * 64, requests_per_minute=30, **limits)
    team = Grant(key, Counter(), routers=3, utc_clock=lambda: MIDNIGHT_S)
    headers = team.limit_headers(0.0)
    assert headers["x-ratelimit-limit-requests"] == "10"
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    shown = team.shown(0.0)
    assert shown["tokens_per_day"]["limit"] == 3000
    assert shown["max_parallel_requests"] == 1
    few = grant(requests_per_minute=1)
    few.change(KeyConfig(name="team", sha256="0" * 64, requests_per_minute=1), routers=3)
    few.take_request(0.0)
    with pytest.raises(RateLimitedError) as caught:
        few.take_request(0.0)
    assert caught.value.retry_after_s == 180


def test_anthropics_headers_tell_when_a_limit_is_reset() -> None:
    key = KeyConfig(name="team", sha256="0" * 64, requests_per_minute=60, tokens_per_day=1000)
    team = Grant(key, Counter(), utc_clock=lambda: MIDNIGHT_S + 3595.5)
    team.take_request(0.0)
    team.take_prompt(300, 0.0)
    midnight = datetime.fromtimestamp(MIDNIGHT_S, UTC)
    assert team.limit_headers(0.0, anthropic=True) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
        "anthropic-ratelimit-requests-reset": f"{midnight:%Y-%m-%d}T00:59:57Z",
        "anthropic-ratelimit-tokens-limit": "1000",
        "anthropic-ratelimit-tokens-remaining": "700",
        "anthropic-ratelimit-tokens-reset": f"{midnight + timedelta(days=1):%Y-%m-%d}T00:00:00Z",
    }


def test_the_headers_tell_the_limit_of_tokens_with_less_left() -> None:
    limits: Any = {"tokens_per_minute": 600, "tokens_per_day": 1000}
    key = KeyConfig(name="team", sha256="0" * 64, requests_per_minute=60, **limits)
    team = Grant(key, Counter(), utc_clock=lambda: MIDNIGHT_S + 3595.0)
    team.take_request(0.0)
    team.take_prompt(300, 0.0)
    assert team.limit_headers(0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "300",
        "x-ratelimit-reset-tokens": "30s",
    }
    team.take_prompt(500, 30.0)
    headers = team.limit_headers(90.0)
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert headers["x-ratelimit-remaining-tokens"] == "200"
    assert headers["x-ratelimit-reset-tokens"] == "23h0m5s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.0, "0ms"), (0.0204, "21ms"), (1.0, "1s"), (1.5, "1.5s"), (59.9, "59.9s")),
        *((60.0, "1m0s"), (359.2, "6m0s"), (3600.0, "1h0m0s"), (46_805.0, "13h0m5s")),
    ],
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
