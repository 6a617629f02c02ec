"""Where sessions begin: where their later turns will wait least, for them and for others."""

from collections import Counter
from dataclasses import replace

import pytest

from router.config.judgment import DEFAULT, Judgment
from router.fleet.fleet import Fleet
from router.latency.session_load import RecentWork, SessionLengths
from router.residency.tiers import Tier
from tests.router.prompts_given import GivenPrompt, tokens
from tests.router.test_explanation import sentence
from tests.router.test_fleet import blocks, stored
from tests.router.test_placement import make_fleet

TOOLS_TOKENS = 640
COUNTING = replace(DEFAULT, counts_growth=True)
"""Growth is off by default."""


def busy(share: float, now_s: float = 0.0) -> RecentWork:
    """Return a replica's work when half a second each made it busy for this share."""
    work = RecentWork()
    for _ in range(round(share * 30.0 / 0.5)):
        work.note(0.5, now_s)
    return work


def test_an_idle_replica_costs_nothing() -> None:
    assert RecentWork().growth_s(10, 0.0) == 0.0
    assert busy(0.5).growth_s(0, 0.0) == 0.0


def test_the_busier_the_more_without_bound_only_for_the_queue() -> None:
    low, high, full = (busy(share).growth_s(10, 0.0) for share in (0.1, 0.5, 5.0))
    assert low < high < full < 10 * high
    assert high == 2 * 10 * 0.5 * 0.5 / 0.5


def test_what_is_past_fades() -> None:
    work = busy(0.5)
    assert work.growth_s(10, 300.0) < 0.01 * work.growth_s(10, 0.0)


def test_sessions_that_begin_say_nothing_of_their_length_at_first() -> None:
    lengths = SessionLengths()
    supposed = lengths.turns_to_come
    for number in range(30):
        lengths.note(number / 30, idle_s=None)
    assert lengths.turns_to_come == pytest.approx(supposed, rel=0.2)
    lengths.note(600.0, idle_s=None)
    assert lengths.turns_to_come < 1


def test_sessions_that_go_on_are_known_to_be_long_before_they_end() -> None:
    lengths = SessionLengths()
    for turn in range(20):
        for session in range(5):
            lengths.note(3.0 * turn + session / 2, idle_s=3.0 if turn else None)
    assert lengths.turns_to_come >= 19


def test_who_comes_back_after_a_long_pause_has_not_ended_and_begun() -> None:
    lengths = SessionLengths()
    for turn in range(50):
        for session in range(20):
            lengths.note(600.0 * turn + session, idle_s=600.0 if turn else None)
    assert lengths.turns_to_come >= 40


def test_the_length_of_sessions_is_learned_and_follows_them() -> None:
    lengths = SessionLengths()
    for turns in (20, 3):
        for number in range(5000):
            for turn in range(turns):
                now_s = 10_000.0 * (20 - turns) + number
                lengths.note(now_s, idle_s=0.0 if turn else None)
        assert lengths.turns_to_come == pytest.approx(turns - 1, rel=0.1)


def test_agents_that_begin_one_soon_after_the_other_spread_while_replicas_are_idle() -> None:
    """Nobody has taken a later turn when the last of them begins, and all share the tools."""
    fleet = make_fleet(8, judgment=COUNTING)
    homes = []
    for agent in range(6):
        own = range(10_000 * (1 + agent), 10_000 * (1 + agent) + 2 * TOOLS_TOKENS)
        prompt = GivenPrompt([*range(TOOLS_TOKENS), *own])
        now_s = 2.0 * agent
        homes.append(answer(fleet, prompt, f"agent-{agent}", now_s))
    assert len(set(homes)) == len(homes)


def test_agents_with_one_prompt_of_tools_do_not_all_go_to_who_holds_it() -> None:
    fleet, now_s = make_fleet(8, judgment=COUNTING), 0.0
    homes: dict[int, str] = {}
    for newest in range(10):
        for agent in range(newest + 1):
            now_s += 0.5
            turn = newest - agent
            own = range(10_000 * (1 + agent), 10_000 * (1 + agent) + 320 * (1 + turn))
            prompt = GivenPrompt([*range(TOOLS_TOKENS), *own])
            replica = answer(fleet, prompt, f"agent-{agent}", now_s)
            homes.setdefault(agent, replica)
    counts = Counter(homes.values())
    assert max(counts.values()) <= 5
    assert len(counts) >= 3


def test_who_has_no_session_goes_to_the_holder() -> None:
    fleet, prompt = warm_and_busy()
    assert fleet.place(prompt, model=None, session=None, now_s=0.0).replica_id == "r0"
    assert fleet.place(prompt, model=None, session="new", now_s=0.0).replica_id == "r1"


def test_by_default_a_session_begins_where_its_first_token_comes_soonest() -> None:
    fleet, prompt = warm_and_busy(DEFAULT)
    assert fleet.place(prompt, model=None, session="new", now_s=0.0).replica_id == "r0"


def test_why_it_went_where_it_holds_nothing_is_told() -> None:
    fleet, prompt = warm_and_busy()
    said = sentence(fleet, prompt, session="new")
    assert said.startswith("r1 is the better place for a session that begins: it holds none of")
    assert "but there the session's later turns would wait longer, by" in said


def answer(fleet: Fleet, prompt: GivenPrompt, session: str, now_s: float) -> str:
    """Have a turn answered as predicted; return by whom."""
    decision = fleet.place(prompt, model=None, session=session, now_s=now_s)
    ticket = fleet.start(decision, now_s)
    stored(fleet, decision.replica_id, Tier.GPU, blocks(prompt))
    ticket.first_byte(now_s + decision.predicted_ttft_s)
    ticket.finish(now_s + decision.predicted_ttft_s, ok=True)
    return decision.replica_id


def warm_and_busy(judgment: Judgment = COUNTING) -> tuple[Fleet, GivenPrompt]:
    fleet, prompt = make_fleet(2, prefetch=False, judgment=judgment), tokens(TOOLS_TOKENS)
    stored(fleet, "r0", Tier.GPU, blocks(prompt))
    for _ in range(20):
        fleet.replicas["r0"].recent.note(0.5, 0.0)
    return fleet, prompt
