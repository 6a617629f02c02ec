"""What a key may use a minute, with the time given."""

from collections import Counter

import pytest

from router.api.access import Grant
from router.api.charge import Charge
from router.config.settings import KeyConfig
from warmroute_common.api_errors import RateLimitedError

Refused = Counter[tuple[str, str]]


def grant(refused: Refused | None = None, **rates: int) -> Grant:
    key = KeyConfig(name="team", sha256="0" * 64, **rates)  # type: ignore[arg-type]
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
