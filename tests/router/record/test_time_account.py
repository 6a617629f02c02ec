"""Where a request's time went: parts that add up, and the one that was not expected."""

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner

from router.cli.commands import main
from router.fleet.cost_model import Cost
from router.record.records import (
    Cause,
    FailedTry,
    FirstLeg,
    Outcome,
    RequestRecord,
    RequestStep,
    Try,
)
from router.record.time_account import TimeAccount, told_of
from router.staging.stager import CopyOutcome, PrefetchOutcome, StagingResult
from tests.router.conftest import ADMIN_TOKEN, Fleet
from tests.router.scripted import Act, chat_events, cut_before_headers, stream
from warmroute_common.admin_token import HEADER as ADMIN_HEADER

COST = Cost(base_s=0.01, queue_s=0.3, backlog_s=0.0, fetch_s=0.0, load_s=0.04, prefill_s=0.15)
ASK: dict[str, Any] = {
    "model": "short",
    "stream": True,
    "user": "ann",
    "messages": [{"role": "user", "content": "hello"}],
}


def ended(**known: Any) -> RequestRecord:
    """Return the record of a request from second 100 to second 103.

    It is read for 0.1 s, held for 0.4 s, sent at 100.5 s, and answered from 101 s on.
    """
    said: dict[str, Any] = {
        "request_id": "r",
        "endpoint": "/v1/completions",
        "started_s": 100.0,
        "ended_s": 103.0,
        "steps": [
            RequestStep("read", 100.0, 100.1),
            RequestStep("wait", 100.1, 100.5),
            RequestStep("stage", 100.5, 100.5),
        ],
        "held_s": 0.4,
        "replica_id": "one",
        "prompt_tokens": 100,
        "tries": [Try("one", "http://one", 100.5, None)],
        "first_byte_s": 101.0,
        "streamed": True,
        "answer_tokens": 101,
        "cost": COST,
        "expected_tpot_s": 0.02,
        "outcome": Outcome.OK,
        "status": 200,
    }
    return RequestRecord(**{**said, **known})


def seconds(account: TimeAccount) -> dict[str, float]:
    return {each.name: round(each.seconds, 6) for each in account.parts}


def test_the_parts_are_the_whole_time() -> None:
    account = TimeAccount(ended())
    assert seconds(account) == {"read": 0.1, "held": 0.4, "first token": 0.5, "answer": 2.0}
    first, answer = account.parts[2:]
    assert first.expected_s == pytest.approx(0.5) and "queue 0.30 s" in first.text
    assert answer.expected_s == pytest.approx(2.0) and "20.0 ms each" in answer.text


@pytest.mark.parametrize(
    ("known", "name"),
    [
        ({}, "held"),
        ({"held_s": 0.0}, "wait"),
        ({"first_byte_s": 102.0}, "first token"),
        ({"expected_tpot_s": 0.001}, "answer"),
        ({"cost": None, "expected_tpot_s": None}, "held"),
    ],
)
def test_the_most_unexpected_part_is_named(known: dict[str, Any], name: str) -> None:
    record = ended(**known)
    found = TimeAccount(record).most_unexpected
    assert found is not None and found.name == ("place" if name == "wait" else name)
    [line] = [each for lines in told_of(record).values() for each in lines if "unexpected" in each]
    assert found.name in line


def test_nothing_was_unexpected() -> None:
    steps = [RequestStep("read", 100.0, 100.001), RequestStep("wait", 100.001, 100.002)]
    tries = [Try("one", "http://one", 100.5, None)]
    account = TimeAccount(ended(steps=steps, held_s=0.0, tries=tries))
    assert account.most_unexpected is None
    assert account.lines()[-1] == "No part took much longer than expected."


def test_failed_tries_and_staged_kv_are_told() -> None:
    failed = FailedTry(replica_id="two", cause=Cause.ERROR, detail="answered 500", ended_s=100.9)
    record = ended(
        steps=[RequestStep("retry", 100.9, 101.0), RequestStep("stage", 101.0, 101.2)],
        tries=[Try("two", "http://two", 100.5, None), Try("one", "http://one", 101.2, None)],
        failed_tries=[failed],
        first_byte_s=101.3,
        prepared=StagingResult(
            prefetch=PrefetchOutcome(asked=5, promoted=4, pending=1),
            copy=CopyOutcome(asked=2, source_id="three", arrived=2),
            waited_s=0.2,
        ),
    )
    account = TimeAccount(record)
    told = {each.name: each for each in account.parts}
    assert told["failed try"].seconds == pytest.approx(0.4)
    assert told["failed try"].text == "at two: error (answered 500)"
    assert told["retry wait"].seconds == pytest.approx(0.1)
    assert "late (4 of 5 chunks)" in told["staged"].text and "from three" in told["staged"].text
    # What was staged has passed of the queue.
    assert told["first token"].expected_s == pytest.approx(COST.ttft_s - 0.2)


def test_a_prefill_at_another_replica() -> None:
    cost = Cost(
        base_s=0.01,
        queue_s=0.0,
        backlog_s=0.0,
        fetch_s=0.0,
        load_s=0.0,
        prefill_s=0.0,
        prefilled_s=0.2,
        pull_s=0.05,
    )
    record = ended(
        steps=[RequestStep("prefill", 100.5, 100.7)],
        tries=[
            Try("two", "http://two", 100.5, None, prefilled_s=100.7),
            Try("one", "http://one", 100.7, None),
        ],
        first_leg=FirstLeg(replica_id="two", seconds=0.2, cached_tokens=0),
        cost=cost,
    )
    told = {each.name: each for each in TimeAccount(record).parts}
    assert told["prefill at"].text == "two computed the prompt; predicted 0.20 s"
    assert "pull 50 ms" in told["first token"].text


def test_answers_that_are_not_streamed_or_never_came() -> None:
    whole = TimeAccount(ended(streamed=False, first_byte_s=102.9, output_tokens=101))
    assert seconds(whole)["whole answer"] == 2.4
    assert whole.parts[2].expected_s == pytest.approx(2.5)
    never = TimeAccount(ended(first_byte_s=None, outcome=Outcome.CLIENT_GONE, status=None))
    assert seconds(never)["no answer"] == 2.5
    unread = ended(steps=[], tries=[], replica_id=None, held_s=None, first_byte_s=None)
    assert seconds(TimeAccount(unread)) == {"receive": 3.0}


async def test_a_running_router_says_why(fleet: Fleet, stranger: aiohttp.ClientSession) -> None:
    """By its endpoint, to administrators only."""

    def later(act: Act) -> Act:
        async def acts(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(0.01)  # parts of less than 0.5 ms are not told
            return await act(request)

        return acts

    fleet.one.will(later(cut_before_headers))
    fleet.two.will(later(stream(*chat_events("a", "b", "c"))))
    router = await fleet.router(model_aliases={"short": "m"})
    url, headers = f"{router.url}/requests/mine%2F1", {ADMIN_HEADER: ADMIN_TOKEN}
    async with stranger.post(
        f"{router.url}/v1/chat/completions", json=ASK, headers={"X-Request-Id": "mine/1"}
    ) as response:
        await response.read()
    await router.record()
    async with stranger.get(url) as response:
        assert response.status == 401
    async with stranger.get(url, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200
    assert answer["record"]["request_id"] == "mine/1"
    assert {"failed try", "first token"} <= {each["name"] for each in answer["parts"]}
    text = "\n".join(line for lines in answer["why"].values() for line in lines)
    assert "model m (asked for as short)" in text and "at one: cut" in text
    assert "ann" not in text
    [count, *causes] = answer["why"]["why tokens were computed"]
    assert count.endswith("were computed (by what the router knew; the replica did not report)")
    assert causes and all("tokens, " in each for each in causes)
    async with stranger.get(f"{router.url}/requests/other", headers=headers) as response:
        assert response.status == 404
        assert "the request log" in (await response.json())["error"]["message"]


def test_the_command_prints_sections_and_no_terminal_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def answer(_: object, path: str) -> dict[str, Any]:
        asked.append(path)
        return {"why": {"request": ["one\x1b[2J"], "where 3 s went": ["read"]}}

    monkeypatch.setattr("router.cli.router_client.RouterClient.ask", answer)
    result = CliRunner().invoke(main, ["why", "a/b"])
    assert asked == ["/requests/a%2Fb"]
    assert result.output == "Request\n  one\ufffd[2J\n\nWhere 3 s went\n  read\n"
