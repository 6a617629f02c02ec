"""The explanation of a decision: the sentence, the figures, the table for a terminal."""

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import orjson
import pytest
from click.testing import CliRunner

from router.api.explanation import SHOWN, explanation, why
from router.cli.commands import main
from router.cli.explain import table
from router.config.settings import PolicyName
from router.fleet.cost_model import CostPart, Work
from router.fleet.decision import Reason
from router.fleet.fleet import Fleet
from router.index.prompt_keys import KvTier
from tests.router.conftest import Fleet as Running
from tests.router.fleet.helpers import blocks, chunks, make_fleet, place, snapshot, stored
from tests.router.prompt.prompts_given import GivenPrompt, tokens
from tests.router.scripted import chat_events, stream

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def told(fleet: Fleet, prompt: GivenPrompt, **more: Any) -> dict[str, Any]:
    """Return the answer of ``POST /explain``."""
    answer = explanation(None, place(fleet, prompt, **more), fleet, model=None)
    read: dict[str, Any] = orjson.loads(orjson.dumps(answer, default=str))
    return read


def sentence(fleet: Fleet, prompt: GivenPrompt, **more: Any) -> str:
    return why(place(fleet, prompt, **more), fleet.config.policy, fleet.weights)


def test_the_soonest_says_what_it_holds_and_who_is_next() -> None:
    fleet, prompt = make_fleet(), tokens(9600)
    stored(fleet, "r0", KvTier.GPU, blocks(prompt)[:200])
    snapshot(fleet, "r0", cpu=chunks(prompt)[:60], disk=chunks(prompt)[:70])
    assert sentence(fleet, prompt) == (
        "r0 answers first: 3,200 of 9,600 tokens are in its GPU, 640 in its CPU RAM, "
        "640 on its disk; r1, the next, would take 4.8 s longer."
    )


def test_a_session_at_home_is_told_what_that_costs() -> None:
    fleet, prompt = make_fleet(), tokens(640)
    fleet.start(place(fleet, tokens(64), session="s"), 0.0).finish(0.0, ok=True)
    decision = place(fleet, prompt, session="s")
    assert decision.home == decision.replica_id
    other = "r1" if decision.replica_id == "r0" else "r0"
    assert why(decision, "ttft", fleet.weights) == (
        f"{decision.replica_id} is the session's home: it holds none of the 640 tokens; "
        f"{other}, the next, would be as fast (a tie: the session's home wins, then a hash of "
        "the prompt decides)."
    )
    fleet.replicas[decision.replica_id].queue.join(0.015, 0.0)
    assert sentence(fleet, prompt, session="s") == (
        f"{decision.replica_id} is the session's home: it holds none of the 640 tokens; "
        f"{other}, the next, would be 15 ms faster (a tie: the session's home wins, then a hash "
        "of the prompt decides)."
    )
    fleet.replicas[decision.replica_id].queue.join(1.0, 0.0)
    assert sentence(fleet, prompt, session="s") == (
        f"{other} answers first: it holds none of the 640 tokens; the session's home "
        f"{decision.replica_id} would take 1.0 s longer."
    )


def test_equals_are_told_apart() -> None:
    fleet, prompt = make_fleet(), tokens(640)
    decision = place(fleet, prompt)
    other = "r1" if decision.replica_id == "r0" else "r0"
    assert decision.reason is Reason.NO_INFORMATION
    assert why(decision, "ttft", fleet.weights) == (
        f"{decision.replica_id} answers first: it holds none of the 640 tokens; {other}, the "
        "next, would be as fast (a tie: the session's home wins, then a hash of the prompt "
        "decides)."
    )


def test_who_spares_the_fleet_work_may_be_a_little_later() -> None:
    """r1 waits until r0 would have computed it all, less a bit, and then has nothing to do.

    In a fleet that was busy recently: there somebody else needs r0's time.
    """
    fleet, prompt = make_fleet(), tokens(6400)
    for number in range(10):
        past = place(fleet, tokens(6400, start=10_000 * (1 + number)))
        fleet.start(past, 0.0).finish(0.0, ok=False)
    stored(fleet, "r1", KvTier.GPU, blocks(prompt))
    alone_s = place(fleet, tokens(6400, start=99_999)).predicted_ttft_s
    fleet.replicas["r1"].queue.join(alone_s + 0.2, 0.0)
    decision = place(fleet, prompt)
    assert decision.replica_id == "r1"
    told = why(decision, "ttft", fleet.weights)
    assert "r1 is nearly as fast as the fastest" in told
    assert "r0, the next, would be 0.23 s faster, but delay other requests by 224.8 s" in told


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("longest-prefix", "holds the longest match"),
        ("session", "is chosen by a hash of the session's name or of the prompt's beginning"),
        ("least-loaded", "has the fewest requests in flight"),
    ],
)
def test_policies_that_ignore_times_say_so(policy: PolicyName, said: str) -> None:
    fleet, prompt = make_fleet(policy=policy), tokens(640)
    text = sentence(fleet, prompt)
    assert said in text
    assert f"(policy {policy}, which ignores times)" in text


def test_every_reason_has_a_sentence() -> None:
    fleet, prompt = make_fleet(), tokens(640)
    decision = place(fleet, prompt)
    for reason in Reason:
        text = why(replace(decision, reason=reason), "ttft", fleet.weights)
        assert text.startswith(f"{decision.replica_id} "), reason
        assert text.endswith(".")


def test_the_only_one_needs_no_contrast() -> None:
    assert sentence(make_fleet(1), tokens(640)) == (
        "r0 is the only replica that can take it: it holds none of the 640 tokens."
    )


def test_rates_are_written_with_the_unit_that_they_reach() -> None:
    """A rate is kept as a logarithm, so that 1e9 comes back a little less."""
    lines = table(told(make_fleet(), tokens(640))).splitlines()
    assert "(1.0 G)" in lines[-1]
    assert "1000.0 M" not in lines[-1]


def test_rates_and_errors_of_each_are_told() -> None:
    fleet, prompt = make_fleet(), tokens(640)
    known = fleet.replicas["r1"]
    for _ in range(20):
        known.rates.note_alone(Work(new_tokens=1000), 0.5)
        known.errors.note(1.0, 1.1)
    new, old = sorted(told(fleet, prompt)["candidates"], key=lambda each: str(each["replica_id"]))
    assert old["rates"]["prefill_tokens_per_s"] == pytest.approx(
        known.rates.per_second(CostPart.PREFILL)
    )
    assert old["rates"]["measured"]["prefill"] == 20
    assert old["predictions"]["answers"] == 20
    assert old["predictions"]["ratio"]["p90"] == pytest.approx(0.1)
    assert (new["rates"]["measured"], new["predictions"]) == ({}, None)
    assert new["rates"]["decode_slowdown"] == pytest.approx(fleet.config.rates.decode_slowdown)
    assert new["rates"]["peer_bytes_per_s"] == pytest.approx(fleet.config.rates.peer_bytes_per_s)


@pytest.mark.parametrize("policy", ["ttft", "round-robin"])
def test_of_many_replicas_the_soonest_are_shown_and_the_pick(policy: PolicyName) -> None:
    fleet, prompt = make_fleet(100, policy=policy), tokens(640)
    for number, each in enumerate(fleet.replicas.values()):
        each.queue.join(100.0 - number, 0.0)
    answer = told(fleet, prompt)
    shown = [each["replica_id"] for each in answer["candidates"]]
    weighed = len(place(fleet, prompt).candidates)
    assert min(SHOWN, weighed) <= len(shown) <= SHOWN + 1
    assert shown[:2] == ["r99", "r98"]
    assert answer["replica"] in shown
    assert answer["left_out"] == 100 - len(shown)
    assert f"and {100 - len(shown)} more, not shown" in table(answer)


def test_the_table_fits_a_terminal() -> None:
    """Of 8 replicas with every tier in use, large figures and names of some length."""
    fleet, prompt = make_fleet(8), tokens(128_000)
    ids, keys = blocks(prompt), chunks(prompt)
    for number, each in enumerate(list(fleet.replicas.values())):
        stored(fleet, each.id, KvTier.GPU, ids[: 64 * number])
        snapshot(fleet, each.id, cpu=keys[:300], disk=keys[:800], remote=keys[:1200])
        each.queue.join(100.0 * number, 0.0)
        each.errors.note(1.0, 1.5)
        fleet.replicas.rename(each.id, f"replica{number}")
    answer = told(fleet, prompt)
    lines = table(answer).splitlines()
    assert max(map(len, lines)) <= 100
    row = next(line for line in lines if line.startswith("*")).split()
    assert row[1] == answer["replica"]
    heads = next(line for line in lines if "ttft" in line and "replica" in line).split()
    assert heads == ["replica", "ttft", "base", "queue", "fetch", "load", "prefill", "gpu", "cpu",
                     "disk", "remote"]  # fmt: skip


async def test_a_running_router_tells_how_good_its_predictions_were(
    fleet: Running, client: aiohttp.ClientSession
) -> None:
    """Only streamed answers count: their first byte is the first token."""
    for upstream in (fleet.one, fleet.two):
        upstream.will(stream(*chat_events("a", "b")))
    router = await fleet.router(policy="ttft")
    for count in range(1, 4):
        body = {**ASK, "stream": True, "user": "someone"}
        async with client.post(f"{router.url}/v1/chat/completions", json=body) as response:
            name = response.headers["x-warmroute-replica"]
            await response.read()
        await router.record(count)
    run = CliRunner().invoke
    args = ["explain", "--router", router.url, "--session", "someone", "hello"]
    result = await asyncio.to_thread(run, main, args)
    assert result.exit_code == 0, result.output
    assert f"replica    {name}  (" in result.output
    assert f"error of the predictions for {name}: median" in result.output
    assert "(3 answers)" in result.output
    args[-1] = orjson.dumps({**ASK, "session_id": "another"}).decode()
    result = await asyncio.to_thread(run, main, args)
    assert f"replica    {name}  (session-home)" in result.output
    async with client.get(f"{router.url}/metrics") as response:
        text = await response.text()
    assert f'warmroute_ttft_prediction_error_ratio{{quantile="0.9",replica="{name}"}}' in text
