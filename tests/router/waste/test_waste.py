"""Sums of wasted tokens by key and cause, and their bounds."""

import re
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.cli.waste import table
from router.index.prompt_keys import KvTier
from router.record.records import RequestRecord
from router.record.uncached import (
    Change,
    ChangeKind,
    Declined,
    Detail,
    Eviction,
    HeldElsewhere,
    PromptPart,
    Uncached,
    UncachedCause,
    WhyDeclined,
)
from router.waste.waste import PERIOD_S, Waste
from tests.router.conftest import Fleet


def changed(place: str = "messages[0].content") -> Change:
    return Change(kind=ChangeKind.BEGINNING, place=place, at_token=9, turn=2, since_turn=2)


def record(
    key: str | None,
    tokens: int,
    cause: UncachedCause = UncachedCause.CHANGED,
    detail: Detail | None = None,
    *,
    at_s: float = 10.0,
) -> RequestRecord:
    """Return the record of a prompt of 1000 tokens: some have a cause, the others are new."""
    return RequestRecord(
        request_id="r",
        endpoint="/v1/chat/completions",
        started_s=at_s,
        ended_s=at_s,
        key=key,
        uncached=Uncached(
            parts=(PromptPart(tokens, cause, detail), PromptPart(1000, UncachedCause.NEW)),
            prompt_tokens=1000,
            cached_tokens=0,
            is_reported=True,
            s_per_token=0.001,
        ),
    )


def test_equal_causes_of_several_keys_are_one_line() -> None:
    waste = Waste(0.0)
    for key in ("a", "b", "c"):
        waste.observe(record(key, 500, detail=changed()))
    gone = Eviction(replica="r1", tier=KvTier.CPU, ago_s=3.0)
    waste.observe(record("c", 100, UncachedCause.EVICTED, gone))
    report = waste.report(100.0)
    assert [each["words"] for each in report["worst"]] == [
        "3 keys send something that changes near the beginning of messages[0].content",
        "the key 'c' sends prompts whose KV had left the CPU RAM of r1, which is too small for "
        "them",
    ]
    first = report["worst"][0]
    assert (first["tokens"], first["requests"], first["keys"]) == (1500, 3, ["a", "b", "c"])
    assert first["seconds"] == pytest.approx(1.5)
    assert first["replicas"] == pytest.approx(0.015)
    assert report["avoidable"]["tokens"] == 1600
    assert report["avoidable"]["share"] == 0.4
    assert [each["key"] for each in report["keys"]] == ["c", "a", "b"]
    text = table(report)
    assert "40% of the prefill" in text and "1,600 of 4,000 computed tokens" in text


def test_only_the_last_two_periods_count() -> None:
    waste = Waste(0.0)
    waste.observe(record("a", 500, detail=changed()))
    waste.observe(record("a", 300, detail=changed(), at_s=PERIOD_S + 1))
    assert waste.report(PERIOD_S + 2)["avoidable"]["tokens"] == 800
    assert waste.report(2 * PERIOD_S + 2)["avoidable"]["tokens"] == 300
    assert waste.report(9 * PERIOD_S)["requests"] == 0
    assert "no prompts" in table(waste.report(9 * PERIOD_S))


def test_it_is_bounded_and_the_sums_stay_right() -> None:
    waste = Waste(0.0)
    for number in range(2000):
        waste.observe(record(f"k{number}", 500, detail=changed(f"messages[{number}].content")))
        waste.check()
    report = waste.report(20.0)
    assert report["requests"] == 2000
    assert report["avoidable"]["tokens"] == 2000 * 500
    assert len(report["keys"]) == len(report["worst"]) == 20
    assert report["left_out"]["keys"] > 0
    assert len(waste) < 2000
    assert "more, not shown" in table(report)


@pytest.mark.parametrize(
    ("cause", "detail"),
    [
        (UncachedCause.CHANGED, changed()),
        (UncachedCause.EVICTED, Eviction(replica=None, tier=None)),
        (UncachedCause.EVICTED, Eviction(replica="a", tier=KvTier.GPU, is_whole=True)),
        *(
            (
                UncachedCause.CHANGED,
                Change(kind=kind, place="tools", at_token=5, turn=4, since_turn=2),
            )
            for kind in ChangeKind
        ),
        *((UncachedCause.DECLINED, Declined(why=why, tier=KvTier.DISK)) for why in WhyDeclined),
        *(
            (
                UncachedCause.ELSEWHERE,
                HeldElsewhere(
                    replica="r1", reason="session-spill", ttft_s=1.0, other_ttft_s=other_s
                ),
            )
            for other_s in (2.0, None)
        ),
    ],
)
def test_each_detail_has_words(cause: UncachedCause, detail: Detail) -> None:
    waste = Waste(0.0)
    shown = record("a", 500, cause, detail)
    waste.observe(shown)
    (worst,) = waste.report(1.0)["worst"]
    assert worst["words"].startswith("the key 'a' sends ")
    assert shown.uncached is not None
    lines = shown.uncached.lines()
    assert lines[1].startswith(f"500 tokens, {cause}: ")
    assert not re.search(r"[{}]", "".join([worst["words"], *lines]))


async def test_the_report_is_the_administrations(
    fleet: Fleet, client: aiohttp.ClientSession, stranger: aiohttp.ClientSession
) -> None:
    router = await fleet.router()
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x" * 5000}]}
    async with client.post(f"{router.url}/v1/chat/completions", json=body) as response:
        assert "x-warmroute-uncached" in response.headers
        await response.read()
    assert (await router.record()).uncached is not None
    async with client.get(f"{router.url}/waste") as response:
        assert (await response.json())["requests"] == 1
    async with stranger.get(f"{router.url}/waste") as response:
        assert response.status == 401


async def test_it_can_be_turned_off(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    router = await fleet.router(uncached_causes=False)
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x" * 5000}]}
    async with client.post(f"{router.url}/v1/chat/completions", json=body) as response:
        assert "x-warmroute-uncached" not in response.headers
        await response.read()
    assert (await router.record()).uncached is None
    assert router.parts.fleet.index.departed is None
    async with client.get(f"{router.url}/waste") as response:
        assert response.status == 404
        assert "uncached_causes: false" in (await response.json())["error"]["message"]


async def test_what_was_not_answered_has_no_causes(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    router = await fleet.router(retries=0)

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=400)

    fleet.one.will(refuse)
    fleet.two.will(refuse)
    async with client.post(f"{router.url}/v1/completions", json={"prompt": "x" * 999}) as response:
        assert response.status == 400
    assert (await router.record()).uncached is None
