"""Why tokens were computed: with real chat templates, and caches whose contents are known."""

import tracemalloc
from array import array
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from router.index.prompt_keys import KvTier
from router.record.uncached import (
    Change,
    ChangeKind,
    Declined,
    Eviction,
    HeldElsewhere,
    Uncached,
    UncachedCause,
    WhyDeclined,
)
from router.waste.last_prompts import LastPrompt, LastPrompts
from router.waste.outline import Outline
from router.waste.uncached_causes import UncachedCauses
from tests.router.fleet.helpers import BLOCK, CHUNK, info, stored
from tests.router.waste.helpers import Talk, part, reader, words

NEW, SHORT, CHANGED = UncachedCause.NEW, UncachedCause.SHORT, UncachedCause.CHANGED
EVICTED, ELSEWHERE = UncachedCause.EVICTED, UncachedCause.ELSEWHERE
DECLINED = UncachedCause.DECLINED


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool(name: str, seed: int) -> dict[str, Any]:
    function = {
        "name": name,
        "description": words(40, seed=seed),
        "parameters": {"type": "object", "properties": {name: {"type": "string"}}},
    }
    return {"type": "function", "function": function}


TOOLS = [tool("one", 1), tool("two", 2), tool("three", 3)]
HISTORY = [
    system(words(150, seed=1)),
    user(words(120, seed=2)),
    said(words(110, seed=3)),
    user(words(130, seed=4)),
    said(words(100, seed=5)),
    user(words(90, seed=6)),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def talk(directory: Path) -> Talk:
    return Talk(reader(directory, "agent"))


def change(uncached: Uncached) -> tuple[Change, int]:
    found, tokens = part(uncached, CHANGED)
    assert isinstance(found.detail, Change)
    return found.detail, tokens


def test_a_first_prompt_is_new_and_a_longer_one_costs_its_new_text(talk: Talk) -> None:
    first = talk.ask(HISTORY[:4])
    assert set(first.tokens()) == {NEW, SHORT}
    later = talk.ask([*HISTORY, user("and now?")])
    assert set(later.tokens()) <= {NEW, SHORT}
    assert later.cached_tokens > 0.9 * first.prompt_tokens
    again = talk.ask([*HISTORY, user("and now?")])
    assert set(again.tokens()) == {SHORT} and again.computed_tokens <= BLOCK


def test_a_time_stamp_in_the_system_prompt_is_found_with_its_cost(talk: Talk) -> None:
    def turn(time: str, count: int) -> list[dict[str, Any]]:
        return [system(f"It is {time}. {words(150, seed=1)}"), *HISTORY[1:count]]

    before = talk.ask(turn("12:00:01", 4)).prompt_tokens
    found = talk.ask(turn("12:00:07", 6))
    detail, tokens = change(found)
    assert (detail.kind, detail.place) == (ChangeKind.BEGINNING, "messages[0].content")
    assert (detail.turn, detail.since_turn) == (2, 2)
    assert detail.at_token <= BLOCK
    assert tokens == before // BLOCK * BLOCK - found.cached_tokens
    detail, _ = change(talk.ask(turn("12:00:09", 6)))
    assert (detail.turn, detail.since_turn) == (3, 2)
    assert "in each turn since turn 2" in detail.words()


def test_a_time_stamp_is_found_where_each_question_is_another_one(talk: Talk) -> None:
    for time, seed in (("12:00:01", 1), ("12:00:07", 2)):
        prompt = [system(f"It is {time}. {words(300, seed=9)}"), user(words(60, seed=seed))]
        found = talk.ask(prompt)
    detail, tokens = change(found)
    assert (detail.kind, detail.place) == (ChangeKind.BEGINNING, "messages[0].content")
    # The question is new: only the system prompt would have been cached.
    assert part(found, NEW)[1] > 0.1 * found.prompt_tokens
    assert tokens > 0.7 * found.prompt_tokens


def test_other_conversations_of_one_user_are_new(talk: Talk) -> None:
    talk.ask([system("Be brief."), user(words(200, seed=1))])
    found = talk.ask([system("Be brief."), user(words(300, seed=2))])
    assert set(found.tokens()) == {NEW, SHORT}


def test_tools_in_another_order_are_found(talk: Talk) -> None:
    before = talk.ask(HISTORY[:4], tools=TOOLS).prompt_tokens
    found = talk.ask(HISTORY, tools=[TOOLS[1], TOOLS[0], TOOLS[2]])
    detail, tokens = change(found)
    assert (detail.kind, detail.place) == (ChangeKind.REORDERED, "tools")
    assert tokens == before // BLOCK * BLOCK - found.cached_tokens
    changed = replace_description(TOOLS[1])
    found = talk.ask(HISTORY, tools=[changed, TOOLS[0], TOOLS[2]])
    assert change(found)[0].place == "tools[0].description"


def replace_description(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "description": words(41, seed=8)}}


def test_a_history_that_is_cut_costs_what_of_it_is_left(talk: Talk) -> None:
    talk.ask(HISTORY)
    cut = [HISTORY[0], *HISTORY[3:], said("yes"), user(words(80, seed=11))]
    found = talk.ask(cut)
    detail, tokens = change(found)
    assert (detail.kind, detail.place) == (ChangeKind.CUT, "messages[1]")
    new = found.tokens()[NEW]
    alone = Talk(talk.reader).ask([user(words(80, seed=11))]).prompt_tokens
    assert abs(new - alone) < 0.05 * found.prompt_tokens
    assert tokens > 0.5 * found.prompt_tokens


def test_reasoning_that_the_template_drops_is_found(talk: Talk) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "one", "arguments": "{}"}}
    loop = [
        HISTORY[0],
        user(words(60, seed=2)),
        said(words(20, seed=3), reasoning=words(200, seed=4), tool_calls=[call]),
        {"role": "tool", "tool_call_id": "c", "content": words(150, seed=5)},
    ]
    before = talk.ask(loop, tools=TOOLS)
    found = talk.ask([*loop, said("Done."), user("Thanks. And now?")], tools=TOOLS)
    detail, tokens = change(found)
    assert (detail.kind, detail.place) == (ChangeKind.RENDERED, "messages[2]")
    assert tokens > 100
    assert before.prompt_tokens > found.prompt_tokens


def test_a_field_that_changes_late_is_named(talk: Talk) -> None:
    talk.ask(HISTORY)
    edited = [*HISTORY[:3], user(words(131, seed=14)), *HISTORY[4:]]
    detail, _ = change(talk.ask(edited))
    assert (detail.kind, detail.place) == (ChangeKind.EDITED, "messages[3].content")


def test_turns_without_a_session_are_found_by_their_first_question(talk: Talk) -> None:
    talk.ask([system("It is 9."), *HISTORY[1:4]], user=None)
    found = talk.ask([system("It is 10."), *HISTORY[1:]], user=None)
    assert change(found)[0].place == "messages[0].content"


def test_salts_and_models_that_change_are_found(talk: Talk) -> None:
    before = talk.ask(HISTORY[:4], cache_salt="a")
    found = talk.ask(HISTORY, cache_salt="b")
    detail, tokens = part(found, DECLINED)
    assert detail.detail == Declined(why=WhyDeclined.SALT)
    assert tokens == before.prompt_tokens // BLOCK * BLOCK - found.cached_tokens
    talk.fleet.set_models("r0", {"m": None, "lora": "/adapters/lora"})
    detail, _ = part(talk.ask(HISTORY, cache_salt="b", model="lora"), DECLINED)
    assert detail.detail == Declined(why=WhyDeclined.MODEL)


@pytest.mark.parametrize("tier", [KvTier.CPU, KvTier.DISK, KvTier.REMOTE])
def test_what_has_left_a_lower_tier_is_evicted_from_there(talk: Talk, tier: KvTier) -> None:
    talk.ask(HISTORY)
    talk.fleet.change_lower("r0", tier, talk.chunks(), stored=True)
    talk.evict("r0", KvTier.GPU, talk.keys)
    held = talk.ask(HISTORY, cached_tokens=len(talk.chunks()) * CHUNK)
    # Lower tiers have whole chunks.
    assert set(held.tokens()) == {SHORT} and held.computed_tokens < CHUNK + BLOCK
    talk.evict("r0", KvTier.GPU, talk.keys)
    talk.now_s += 30.0
    talk.fleet.tick(talk.now_s)
    talk.evict("r0", tier, talk.chunks())
    found, tokens = part(talk.ask(HISTORY), EVICTED)
    assert tokens == len(talk.keys) * BLOCK
    assert isinstance(found.detail, Eviction)
    assert (found.detail.replica, found.detail.tier) == ("r0", tier)
    assert found.detail.ago_s == pytest.approx(10.0)


def test_what_has_left_the_gpu_is_evicted_from_there(talk: Talk) -> None:
    talk.ask(HISTORY)
    half = len(talk.keys) // 2
    talk.evict("r0", KvTier.GPU, talk.keys[half:])
    found, tokens = part(talk.ask(HISTORY), EVICTED)
    assert isinstance(found.detail, Eviction) and found.detail.tier is KvTier.GPU
    assert tokens == (len(talk.keys) - half) * BLOCK


def test_what_a_restart_has_lost_is_evicted(talk: Talk) -> None:
    talk.ask(HISTORY)
    talk.fleet.lost_kv("r0")
    talk.held.clear()
    talk.fleet.following_kv("r0")
    found, _ = part(talk.ask(HISTORY), EVICTED)
    assert isinstance(found.detail, Eviction) and found.detail.is_whole


def test_what_left_while_the_request_waited_is_evicted(talk: Talk) -> None:
    talk.ask(HISTORY)
    decided = talk.ask(HISTORY)
    assert set(decided.tokens()) == {SHORT}
    departed = talk.fleet.index.departed
    assert departed is not None
    departed.pass_time(talk.now_s + 10.0)
    departed.left(0, KvTier.GPU, talk.keys)  # and the replica computes them again
    found = talk.ask(HISTORY, cached_tokens=0)
    assert set(found.tokens()) == {EVICTED, SHORT}


def test_what_the_replica_held_and_computed_was_declined(talk: Talk) -> None:
    talk.ask(HISTORY)
    talk.fleet.change_lower("r0", KvTier.DISK, talk.chunks(), stored=True)
    talk.evict("r0", KvTier.GPU, talk.keys)
    departed = talk.fleet.index.departed
    assert departed is not None
    talk.now_s += 60.0  # what was evicted a minute before is not the reason
    found = talk.ask(HISTORY, cached_tokens=0)
    detail, tokens = part(found, DECLINED)
    assert detail.detail == Declined(why=WhyDeclined.NOT_LOADED, tier=KvTier.DISK)
    assert tokens == len(talk.chunks()) * CHUNK


def test_what_is_held_behind_a_gap_is_evicted_at_the_gap(talk: Talk) -> None:
    talk.ask(HISTORY)
    talk.evict("r0", KvTier.GPU, talk.keys[4:6])
    found, tokens = part(talk.ask(HISTORY), EVICTED)
    assert tokens == (len(talk.keys) - 4) * BLOCK
    assert isinstance(found.detail, Eviction) and found.detail.replica == "r0"


def test_a_spill_leaves_what_another_replica_holds(directory: Path) -> None:
    talk = Talk(reader(directory, "chatml"), replicas=2)
    before = talk.ask(HISTORY, among=("r0",))
    fleet = talk.fleet
    fleet.replicas["r0"].queue.join(1000.0, talk.now_s)  # far too busy
    found = talk.ask([*HISTORY, user("and?")])
    assert talk.replica == "r1"
    detail, tokens = part(found, ELSEWHERE)
    assert isinstance(detail.detail, HeldElsewhere)
    assert detail.detail.replica == "r0" and detail.detail.other_ttft_s is not None
    assert detail.detail.other_ttft_s > detail.detail.ttft_s
    assert tokens >= before.prompt_tokens - 2 * BLOCK


def test_what_a_replica_holds_that_may_not_answer_is_elsewhere(directory: Path) -> None:
    talk = Talk(reader(directory, "chatml"), replicas=2)
    talk.ask(HISTORY, among=("r0",))
    detail, _ = part(talk.ask(HISTORY, among=("r1",)), ELSEWHERE)
    assert isinstance(detail.detail, HeldElsewhere)
    assert (detail.detail.replica, detail.detail.other_ttft_s) == ("r0", None)


def test_replicas_that_make_other_keys_are_not_compared(directory: Path) -> None:
    talk = Talk(reader(directory, "chatml"), replicas=2)
    talk.fleet.apply_info("r1", info("r1", hash_seed="another", incarnation="two"))
    talk.ask(HISTORY, among=("r0",))
    found = talk.ask([*HISTORY, user("and?")], among=("r1",))
    assert set(found.tokens()) == {NEW, SHORT}
    assert set(talk.ask([*HISTORY, user("and?")], among=("r1",)).tokens()) == {SHORT}


def test_without_events_what_was_sent_before_is_only_guessed(directory: Path) -> None:
    talk = Talk(reader(directory, "chatml"))
    talk.ask(HISTORY)
    talk.fleet.replicas["r0"].has_events = False
    detail, _ = part(talk.ask(HISTORY, cached_tokens=0), DECLINED)
    assert detail.detail == Declined(why=WhyDeclined.NO_EVENTS)


def test_text_without_tokens_is_declined(directory: Path) -> None:
    talk = Talk(reader(directory, "chatml"))
    replica = talk.fleet.replicas["r0"]
    replica.tokens_differ = True
    talk.fleet.replicas.changed()
    history = [*HISTORY, *HISTORY, *HISTORY]
    talk.ask(history)
    detail, _ = part(talk.ask(history, cached_tokens=0), DECLINED)
    assert detail.detail == Declined(why=WhyDeclined.NO_TOKENS)


def test_counts_of_the_replica_count_even_where_the_router_was_wrong(talk: Talk) -> None:
    uncached = talk.ask(HISTORY)
    more = uncached.reported(uncached.prompt_tokens * 2, 100)
    assert sum(more.tokens().values()) == uncached.prompt_tokens * 2 - 100
    unknown = uncached.reported(None, None)
    assert not unknown.is_reported
    assert "did not report" in unknown.lines()[0]
    assert replace(more, cached_tokens=more.prompt_tokens).header() == "none"


def test_last_prompts_are_bounded(talk: Talk) -> None:
    talk.causes = UncachedCauses(talk.fleet, max_bytes=20_000)
    for number in range(40):
        talk.ask(HISTORY, user=f"u{number}")
        talk.causes.last_prompts.check()
    assert 1 <= len(talk.causes.last_prompts) < 40


def test_last_prompts_take_no_more_memory_than_they_count() -> None:
    generator = Random(1)

    def marks(count: int) -> "array[int]":
        return array("Q", [generator.getrandbits(64) for _ in range(count)])

    prompts = LastPrompts(4 << 20)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1500):
            keys = marks(generator.randrange(1, 600))
            outline = Outline(tools=marks(30), messages=marks(generator.randrange(2, 200)))
            prompts.note(
                f"session{number}",
                LastPrompt.of(
                    *(keys, None, 16 * len(keys)), model="m", outline=outline, turn=1, change=None
                ),
            )
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    prompts.check()
    assert used < 1.1 * prompts.used_bytes


def test_stored_again_is_held_again(talk: Talk) -> None:
    talk.ask(HISTORY)
    keys = talk.keys
    talk.evict("r0", KvTier.GPU, keys)
    stored(talk.fleet, "r0", KvTier.GPU, keys)
    talk.held["r0"] = set(keys)
    assert set(talk.ask(HISTORY).tokens()) == {SHORT}
