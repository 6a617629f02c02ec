"""What keys have used, with the time given."""

from typing import Any

import pytest

from router.record.records import Outcome, RequestRecord
from router.record.usage_totals import UsageTotals

MIDNIGHT_S = 1_800_000_000.0 - 28_800.0
"""Begin of 2027-01-15, UTC."""


def record(key: str | None = "team", model: str | None = "m", **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "first_byte_s": 100.5,
        "ended_s": 102.5,
        "status": 200,
        "streamed": True,
        "input_tokens": 100,
        "cached_tokens": 64,
        "output_tokens": 21,
        "answer_tokens": 21,
    }
    made = RequestRecord(
        request_id="x",
        endpoint="/v1/chat/completions",
        key=key,
        model=model,
        started_s=100.0,
        **(values | changes),
    )
    made.end(changes.get("outcome", Outcome.OK))
    return made


def test_tokens_and_times_are_counted_by_key_and_model() -> None:
    totals = UsageTotals(lambda: MIDNIGHT_S)
    for each in (record(), record(), record(model="n"), record(None)):
        totals.observe(each)
    shown = totals.shown()
    assert (shown["since"], shown["day"]) == ("2027-01-15T00:00:00Z", "2027-01-15")
    assert [(each["key"], each["model"]) for each in shown["usage"]] == [
        *((None, "m"), ("team", "m"), ("team", "n")),
    ]
    both = {
        "requests": 2,
        "failed_requests": 0,
        "input_tokens": 200,
        "output_tokens": 42,
        "cached_tokens": 128,
        "computed_tokens": 72,
        "mean_ttft_s": 0.5,
        "mean_tpot_s": 0.1,
    }
    assert shown["usage"][1] == {
        "key": "team",
        "model": "m",
        "today": both,
        "since_start": both,
    }
    assert totals.shown("nobody")["usage"] == []
    assert [each["model"] for each in totals.shown("team")["usage"]] == ["m", "n"]


def test_a_day_begins_at_midnight_also_if_nothing_comes() -> None:
    now = [MIDNIGHT_S - 1.0]
    totals = UsageTotals(lambda: now[0])
    totals.observe(record())
    now[0] = MIDNIGHT_S
    (shown,) = totals.shown()["usage"]
    assert (shown["today"]["requests"], shown["since_start"]["requests"]) == (0, 1)
    totals.observe(record())
    (shown,) = totals.shown()["usage"]
    assert (shown["today"]["input_tokens"], shown["since_start"]["input_tokens"]) == (100, 200)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"cached_tokens": None}, (100, 21, 0, 0, 0)),
        ({"cached_tokens": 0}, (100, 21, 0, 100, 0)),
        ({"input_tokens": None, "cached_tokens": None, "prompt_tokens": 90}, (90, 21, 0, 0, 0)),
        ({"outcome": Outcome.ENDED}, (100, 21, 64, 36, 0)),
        (
            {"outcome": Outcome.CLIENT_GONE, "input_tokens": None, "prompt_tokens": 90},
            (90, 21, 64, 26, 1),
        ),
        (
            {"status": 400, "input_tokens": None, "cached_tokens": None, "answer_tokens": None}
            | {"prompt_tokens": 90},
            (0, 0, 0, 0, 1),
        ),
        (
            {"status": 429, "first_byte_s": None, "input_tokens": None, "cached_tokens": None}
            | {"answer_tokens": None, "prompt_tokens": 90, "outcome": Outcome.REFUSED},
            (0, 0, 0, 0, 1),
        ),
    ],
)
def test_what_an_answer_does_not_say(changes: dict[str, Any], counts: tuple[int, ...]) -> None:
    """Cached tokens that are not told are in neither; what was not computed costs nothing."""
    totals = UsageTotals(lambda: MIDNIGHT_S)
    totals.observe(record(**changes))
    (shown,) = totals.shown()["usage"]
    names = ("input_tokens", "output_tokens", "cached_tokens", "computed_tokens")
    assert tuple(shown["today"][each] for each in (*names, "failed_requests")) == counts


def test_clients_cannot_make_it_grow() -> None:
    """A model has a name of its own once a replica has answered for it, and not without end."""
    totals = UsageTotals(lambda: MIDNIGHT_S)
    for number in range(500):
        totals.observe(record(model=f"made-up-{number}", status=404, outcome=Outcome.REFUSED))
    assert len(totals) == 1
    for number in range(500):
        totals.observe(record(model=f"adapter-{number}"))
    assert len(totals) == 65
    (other,) = [each for each in totals.shown()["usage"] if each["model"] == "other"]
    assert other["since_start"]["requests"] == 500 + 436


def test_the_metrics_are_the_same_numbers() -> None:
    totals = UsageTotals(lambda: MIDNIGHT_S)
    totals.observe(record())
    totals.observe(record(None, None))
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in totals.collect()
        for sample in metric.samples
    }
    assert samples["warmroute_usage_requests_total", "team", "m"] == 1
    assert samples["warmroute_usage_tokens_total", "team", "m", "computed"] == 36
    assert samples["warmroute_usage_ttft_seconds_sum", "none", "none"] == 0.5
    assert samples["warmroute_usage_tpot_seconds_count", "team", "m"] == 1
