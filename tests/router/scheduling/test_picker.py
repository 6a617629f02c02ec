"""Which candidate each policy picks, and the reason it gives."""

from dataclasses import replace

import pytest
import xxhash

from router.config.cost_weights import DEFAULT_WEIGHTS
from router.fleet.cost_model import Work
from router.fleet.decision import Reason
from router.scheduling.scorer import POLICIES, PickContext, pick
from tests.router.fleet.helpers import candidate

QUESTION = PickContext(affinity=1)


def hashed(number: int) -> int:
    return xxhash.xxh3_64_intdigest(b"%d" % number)


def test_the_soonest_first_token_wins() -> None:
    warm = candidate("warm", prefill_s=0.1, matched=900)
    cold = candidate("cold")
    assert pick("ttft", [cold, warm], QUESTION) == (warm, Reason.LONGEST_MATCH)


def test_a_long_queue_outweighs_a_match() -> None:
    warm = candidate("warm", prefill_s=0.1, queue_s=5.0, matched=900, in_flight=4)
    cold = candidate("cold")
    assert pick("ttft", [cold, warm], QUESTION) == (cold, Reason.LEAST_LOADED)


def test_equal_times_go_where_less_work_is_done() -> None:
    """Waiting for the replica that computes the prefix beats computing it twice."""
    waiting = candidate("waiting", prefill_s=0.001, queue_s=1.0, matched=1000, in_flight=1)
    cold = candidate("cold", prefill_s=1.0)
    picked, _ = pick("ttft", [cold, waiting], QUESTION)
    assert picked is waiting


@pytest.mark.parametrize("slower_s", [0.0, 0.015])
def test_a_session_stays_at_home_among_equals(slower_s: float) -> None:
    question = PickContext(affinity=0, home="home")
    home = candidate("home", prefill_s=1.0 + slower_s, in_flight=1)
    picked = pick("ttft", [candidate("other"), home], question)
    assert picked == (home, Reason.SESSION_HOME)


def test_a_session_spills_where_its_home_is_worse() -> None:
    question = PickContext(affinity=0, home="home")
    other = candidate("other")
    picked = pick("ttft", [other, candidate("home", queue_s=0.5)], question)
    assert picked == (other, Reason.SESSION_SPILL)


def test_a_home_that_cannot_be_picked_is_no_home() -> None:
    question = PickContext(affinity=0, home="gone")
    _, reason = pick("ttft", [candidate("a"), candidate("b")], question)
    assert reason is Reason.NO_INFORMATION


def test_equal_prompts_meet_and_different_ones_spread() -> None:
    candidates = [candidate(name) for name in "abcd"]
    picks = {
        number: pick("ttft", candidates, PickContext(affinity=hashed(number)))[0].replica_id
        for number in range(200)
    }
    again = pick("ttft", candidates[::-1], PickContext(affinity=hashed(7)))[0].replica_id
    assert again == picks[7]
    assert all(30 < list(picks.values()).count(name) < 70 for name in "abcd")


def test_a_replica_that_leaves_moves_only_its_own_prompts() -> None:
    four, three = ([candidate(name) for name in names] for names in ("abcd", "abc"))
    for number in range(100):
        question = PickContext(affinity=hashed(number))
        before = pick("ttft", four, question)[0].replica_id
        after = pick("ttft", three, question)[0].replica_id
        assert before in ("d", after)


def test_nearly_equal_costs_go_to_the_least_loaded() -> None:
    """Learned rates differ by noise, which must not send everything to one replica."""
    a, b = candidate("a", prefill_s=1.0, in_flight=2), candidate("b", prefill_s=1.015, in_flight=1)
    assert pick("ttft", [a, b], QUESTION) == (b, Reason.LEAST_LOADED)
    far = candidate("b", prefill_s=1.03, in_flight=1)
    assert pick("ttft", [a, far], QUESTION)[0] is a, "30 ms are no noise"
    soon, later = (candidate(n, prefill_s=s) for n, s in (("a", 0.010), ("b", 0.014)))
    assert {
        pick("ttft", [soon, later], PickContext(affinity=hashed(number)))[0].replica_id
        for number in range(20)
    } == {"a", "b"}, "a few milliseconds are"


def test_a_request_waits_for_no_replica_while_another_is_sooner_with_as_much_work() -> None:
    """However busy that replica was recently."""
    busy = candidate("busy", prefill_s=5.0, busy_share=0.63)
    queue = candidate("queue", prefill_s=5.0, queue_s=0.6, busy_share=0.54)
    holder = candidate("holder", prefill_s=1.0, queue_s=6.0, busy_share=0.54, matched=900)
    assert queue.score_s(DEFAULT_WEIGHTS) < busy.score_s(DEFAULT_WEIGHTS)
    assert pick("ttft", [queue, busy], QUESTION)[0] is busy
    assert pick("ttft", [queue, busy, holder], QUESTION)[0] is holder


def test_a_prefill_goes_where_it_slows_the_fewest_answers() -> None:
    """One second of prefill delays eight answers by eight seconds in total."""
    early = candidate("early", prefill_s=1.0, decoding=8)
    later = candidate("later", prefill_s=1.0, queue_s=1.0)
    assert pick("ttft", [early, later], QUESTION)[0] is later, "though its first token is later"
    first_tokens = PickContext(affinity=1, weights=replace(DEFAULT_WEIGHTS, first_token_weight=1e9))
    assert pick("ttft", [early, later], first_tokens)[0] is early
    early.work.decoding = 2
    assert pick("ttft", [early, later], QUESTION)[0] is early


def test_a_long_answer_goes_where_it_is_written_fast() -> None:
    early = candidate("early", output_tokens=800)
    fast = candidate("fast", queue_s=1.0, output_tokens=800)
    early.replica.rates.note_output_tokens(100, 2.0)
    assert pick("ttft", [early, fast], QUESTION)[0] is fast
    early.output_tokens = fast.output_tokens = 200
    assert pick("ttft", [early, fast], QUESTION)[0] is early


def test_a_long_context_goes_where_few_answers_read_their_own() -> None:
    """Each step reads the KV of all answers: a long context delays all of them."""
    crowded = candidate("crowded", output_tokens=800, prefill_s=0.1)
    free = candidate("free", queue_s=2.0, output_tokens=800, prefill_s=0.1)
    free.work = Work(new_tokens=1_000, matched_tokens=49_000)
    crowded.work = replace(free.work, decoding=8)
    assert crowded.slowed_s(DEFAULT_WEIGHTS) == pytest.approx(8 * (0.1 + 800 * 0.01 * 0.25))
    assert pick("ttft", [crowded, free], QUESTION)[0] is free
    crowded.work = replace(free.work, context_tokens=400_000)
    assert crowded.decode_s(DEFAULT_WEIGHTS) == pytest.approx(800 * 0.01 * 3.25, rel=0.01)
    assert pick("ttft", [crowded, free], QUESTION)[0] is free, "its own steps are long there"


def test_an_answer_is_slow_where_prefills_take_the_time() -> None:
    busy = candidate("busy", output_tokens=800)
    busy.own_share = 0.5
    idle = candidate("idle", queue_s=1.0, output_tokens=800)
    assert pick("ttft", [busy, idle], QUESTION)[0] is idle
    busy.own_share = 0.1
    assert pick("ttft", [busy, idle], QUESTION)[0] is busy
    busy.own_share = 0.5
    assert busy.decode_s(DEFAULT_WEIGHTS) == pytest.approx(8.0 / (0.5 - 1.0 / 30.0), rel=1e-4)
    busy.pairs_up = True
    assert busy.decode_s(DEFAULT_WEIGHTS) == pytest.approx(8.0 / 0.5, rel=1e-4)
    busy.own_share = 30.0
    assert busy.decode_s(DEFAULT_WEIGHTS) == pytest.approx(80.0, rel=1e-4), "a burst passes"


def test_an_idle_replica_gets_kv_from_a_busy_fleet() -> None:
    """Its transfers delay nobody. A replica that joined a busy fleet got no request for minutes."""
    warm = candidate("warm", prefill_s=0.5, queue_s=5.0, busy_share=0.75, waiting=5, matched=900)
    cold = candidate("cold", prefill_s=0.6, fetch_s=4.5, busy_share=0.75)
    assert pick("ttft", [warm, cold], QUESTION)[0] is cold
    cold.own_share = 0.75
    assert pick("ttft", [warm, cold], QUESTION)[0] is warm, "others wait for its transfers"
    cold.own_share, cold.waiting = 0.0, 3
    assert pick("ttft", [warm, cold], QUESTION)[0] is warm


def test_a_burst_is_taken_to_go_on() -> None:
    """Ten wait where the prefix will be there in 0.9 s: soon forty will, unless others open."""
    few = candidate("busy", prefill_s=0.02, queue_s=0.9, matched=900, waiting=2)
    many = candidate("busy", prefill_s=0.02, queue_s=0.9, matched=900, waiting=10)
    idle = candidate("idle", prefill_s=1.0)
    assert pick("ttft", [few, idle], QUESTION)[0] is few
    assert pick("ttft", [many, idle], QUESTION)[0] is idle


def test_as_many_are_behind_as_wait_or_as_are_usual_within_bounds() -> None:
    def behind(busy_share: float, waiting: int = 0) -> float:
        return candidate("a", waiting=waiting, busy_share=busy_share).behind(DEFAULT_WEIGHTS)

    assert behind(0.0) == DEFAULT_WEIGHTS.least_behind
    assert behind(0.75) == pytest.approx(3.0)
    assert behind(0.75, waiting=5) == 5
    assert behind(1.5) == behind(0.0, waiting=99) == DEFAULT_WEIGHTS.most_behind


def test_the_busier_the_fleet_the_more_wait_behind() -> None:
    def behind(busy: float) -> float:
        return candidate("busy", busy_share=busy).behind(DEFAULT_WEIGHTS)

    assert behind(0.0) == DEFAULT_WEIGHTS.least_behind
    assert behind(0.5) == pytest.approx(1)
    assert behind(0.8) == pytest.approx(4)
    assert behind(0.99) == behind(3.0) == pytest.approx(DEFAULT_WEIGHTS.most_behind)


def test_the_only_replica_is_picked_whatever_the_policy() -> None:
    only = candidate("only")
    for policy in POLICIES:
        assert pick(policy, [only], QUESTION) == (only, Reason.ONLY_REPLICA)


def test_longest_prefix_ignores_load() -> None:
    warm = candidate("warm", queue_s=50.0, matched=10, in_flight=9)
    picked = pick("longest-prefix", [candidate("cold"), warm], QUESTION)
    assert picked == (warm, Reason.LONGEST_MATCH)


def test_session_policy_never_spills() -> None:
    question = PickContext(affinity=3, home="home")
    home = candidate("home", queue_s=99.0)
    assert pick("session", [candidate("a"), home], question) == (home, Reason.SESSION_HOME)
    fresh = [pick("session", [candidate("a"), candidate("b")], QUESTION)[0] for _ in range(3)]
    assert len({each.replica_id for each in fresh}) == 1


def test_least_loaded_takes_turns_among_equals() -> None:
    candidates = [candidate("a"), candidate("busy", in_flight=3), candidate("b")]
    picked = [
        pick("least-loaded", candidates, PickContext(affinity=0, turn=turn))[0].replica_id
        for turn in range(4)
    ]
    assert picked == ["a", "b", "a", "b"]


def test_round_robin_goes_round() -> None:
    candidates = [candidate(name) for name in "abc"]
    picked = [
        pick("round-robin", candidates, PickContext(affinity=0, turn=turn))[0].replica_id
        for turn in range(4)
    ]
    assert picked == ["a", "b", "c", "a"]
