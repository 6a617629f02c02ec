"""Which replicas are scored in a large fleet, sources of copies, and homes of new sessions."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from router.config.cost_weights import DEFAULT_WEIGHTS
from router.config.settings import (
    PolicyName,
)
from router.fleet.cost_model import CostPart, Work
from router.fleet.decision import Candidate, Decision
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.index.prompt_keys import KvTier, PromptKeyCache
from router.scheduling.request_scheduler import (
    EligibleReplicas,
    PlacementRequest,
    RequestScheduler,
)
from tests.router.fleet.helpers import BLOCK, CHUNK, blocks, chunks, place, snapshot, stored
from tests.router.prompt.prompts_given import tokens
from tests.router.scheduling.helpers import make_copying_fleet, peer_info
from warmroute_common.api_errors import NoReplicaError


def make_busy(fleet: Fleet, name: str, seconds: float) -> None:
    fleet.replicas[name].queue.join(seconds, 0.0)


def copied_from(candidate: Candidate) -> str | None:
    """Return the replica that a candidate's KV is copied from."""
    return None if candidate.source is None else candidate.source.replica.id


def test_a_replica_that_waits_for_a_busy_holder_gets_its_kv_instead() -> None:
    fleet, prompt = make_copying_fleet(2), tokens(6400)
    snapshot(fleet, "r0", cpu=chunks(prompt)[:80], disk=chunks(prompt))
    make_busy(fleet, "r0", 10.0)
    decision = place(fleet, prompt)
    assert decision.replica_id == "r1"
    assert decision.copy is not None
    assert decision.copy.source_id == "r0"
    assert decision.copy.keys == tuple(chunks(prompt))
    assert decision.copy.nbytes == 6400 * 1000
    assert decision.copy.expected_gain_s == pytest.approx(6.4, rel=0.2)
    assert decision.matched_tokens == {}
    picked = next(each for each in decision.candidates if each.replica_id == "r1")
    assert picked.source is not None
    assert (picked.source.replica.id, picked.source.tokens) == ("r0", 6400)


def test_only_what_is_lacking_is_copied() -> None:
    """On the GPU are 9 blocks: the copy begins with the chunk that holds their end."""
    fleet, prompt = make_copying_fleet(2), tokens(6400)
    snapshot(fleet, "r0", cpu=chunks(prompt))
    stored(fleet, "r1", KvTier.GPU, blocks(prompt)[:9])
    make_busy(fleet, "r0", 10.0)
    copy = place(fleet, prompt).copy
    assert copy is not None
    assert copy.keys == tuple(chunks(prompt)[9 * BLOCK // CHUNK :])


def test_nothing_is_copied_where_waiting_or_computing_is_sooner() -> None:
    fleet, prompt = make_copying_fleet(2), tokens(6400)
    snapshot(fleet, "r0", cpu=chunks(prompt))
    assert place(fleet, prompt).copy is None
    for each in fleet.replicas.values():
        each.rates.report(CostPart.PEER, 1e5, 1e9)
    make_busy(fleet, "r0", 20.0)
    decision = place(fleet, prompt)
    assert (decision.replica_id, decision.copy) == ("r1", None)


@pytest.mark.parametrize("changes", [{"layout": "other"}, {"transfer_port": None}])
def test_only_replicas_that_can_exchange_chunks_do(changes: dict[str, Any]) -> None:
    fleet, prompt = make_copying_fleet(2), tokens(6400)
    fleet.apply_info("r0", peer_info("r0", incarnation="two", **changes))
    snapshot(fleet, "r0", cpu=chunks(prompt))
    make_busy(fleet, "r0", 10.0)
    assert place(fleet, prompt).copy is None


def test_a_source_that_failed_is_left_alone_for_a_while() -> None:
    fleet, prompt = make_copying_fleet(2), tokens(6400)
    snapshot(fleet, "r0", cpu=chunks(prompt))
    make_busy(fleet, "r0", 10.0)
    fleet.copy_failed("r0", 0.0)
    assert place(fleet, prompt).copy is None


def test_a_destination_that_failed_is_left_alone_for_a_while() -> None:
    fleet, prompt = make_copying_fleet(2), tokens(6400)
    snapshot(fleet, "r0", cpu=chunks(prompt))
    make_busy(fleet, "r0", 10.0)
    fleet.copy_failed("r1", 0.0)
    assert place(fleet, prompt).copy is None


def test_nothing_is_copied_where_that_is_switched_off() -> None:
    fleet, prompt = make_copying_fleet(2, prefetch=False), tokens(6400)
    snapshot(fleet, "r0", cpu=chunks(prompt))
    make_busy(fleet, "r0", 20.0)
    decision = place(fleet, prompt)
    assert (decision.replica_id, decision.copy) == ("r1", None)
    assert decision.predicted_ttft_s > 6.4, "it is computed again, and that is predicted"


def test_what_is_still_being_computed_is_not_copied_in_part() -> None:
    """Requests that wait where it is computed have all of it when a copy of half of it arrives."""
    fleet, prompt = make_copying_fleet(2), tokens(6400)
    fleet.start(place(fleet, prompt), 0.0)
    (busy,) = (each for each in fleet.replicas.values() if each.in_flight)
    make_busy(fleet, busy.id, 2.0)
    snapshot(fleet, busy.id, cpu=chunks(prompt)[:50])
    assert {copied_from(each) for each in place(fleet, prompt).candidates} == {None}

    # Loaded from CPU RAM, it can be given meanwhile.
    snapshot(fleet, busy.id, cpu=chunks(prompt))
    assert {copied_from(each) for each in place(fleet, prompt).candidates} == {None, busy.id}


def test_an_answers_decoding_is_predicted_by_its_length_and_the_replicas_speed() -> None:
    fleet, prompt = make_copying_fleet(2), tokens(64)
    weights = fleet.weights
    # Half of the time went into prefills meanwhile.
    fleet.replicas["r0"].recent.note(0.5 * weights.recent_s, 0.0)
    fleet.replicas["r0"].note_output_tokens(100, 4.0, 0.0)

    def decode_s(now_s: float, output_tokens: float | None = None) -> Sequence[float]:
        made = place(fleet, prompt, now_s, output_tokens=output_tokens).candidates
        return [each.decode_s(weights) for each in made]

    about = pytest.approx
    assert decode_s(0.0, 500) == about([500 * 0.04, 500 * weights.output_token_s], rel=0.01)
    assert decode_s(0.0)[0] == about(weights.output_tokens * 0.04, rel=0.01)
    assert decode_s(1e6, 500)[0] == about(500 * 0.02, rel=0.01), "it is idle again"


def test_how_fast_a_replica_writes_is_forgotten_and_known_of_new_replicas() -> None:
    """A replica that was slow once, and gets no answers for that, could never show otherwise."""
    fleet = make_copying_fleet(2)
    slow, other = fleet.replicas.values()
    slow.note_output_tokens(100, 50.0, 0.0)
    fleet.tick(0.0)
    assert other.rates.per_second(CostPart.OUTPUT_TOKEN) == pytest.approx(2), "all that is known"
    other.note_output_tokens(100, 1.0, 0.0)
    assert slow.rates.per_second(CostPart.OUTPUT_TOKEN) == pytest.approx(2)
    assert other.rates.per_second(CostPart.OUTPUT_TOKEN) == pytest.approx(100)
    for second in range(62):
        other.note_output_tokens(100, 1.0, 0.0)
        fleet.tick(float(second))
    assert slow.rates.per_second(CostPart.OUTPUT_TOKEN) == pytest.approx(100)


def test_a_draining_replica_gives_its_kv_to_others() -> None:
    fleet, prompt = make_copying_fleet(3), tokens(6400)
    snapshot(fleet, "r0", cpu=chunks(prompt))
    fleet.drain("r0")
    decision = place(fleet, prompt)
    assert decision.replica_id != "r0"
    assert decision.copy is not None and decision.copy.source_id == "r0"
    assert "r0" not in {each.replica_id for each in decision.candidates}


def test_reading_goes_before_computing_that_is_a_little_sooner_but_takes_more_from_others() -> None:
    """Computing would give its first token 0.13 s earlier, and let four requests wait for 7 s."""
    fleet, prompt = make_copying_fleet(1), tokens(6400)
    snapshot(fleet, "r0", disk=chunks(prompt))
    replica = fleet.replicas["r0"]
    replica.rates.report(CostPart.DISK, 3e6, 1e9)
    replica.fetch(5.0, 0.0)
    replica.waiting = 4
    decision = place(fleet, prompt)
    computing = replica.rates.cost(Work(new_tokens=6400))
    assert decision.predicted_ttft_s == pytest.approx(7.163, abs=0.001)
    assert computing.ttft_s == pytest.approx(7.035, abs=0.001)
    assert computing.busy_s == pytest.approx(7.025, abs=0.001)
    assert decision.picked.cost.busy_s == pytest.approx(0.020, abs=0.001)
    assert decision.prefetch_keys == tuple(chunks(prompt))


def test_computing_goes_before_reading_for_long_though_the_queue_would_hide_that() -> None:
    """Ten seconds of queue hide eight of reading from this request, not from the four behind."""
    fleet, prompt = make_copying_fleet(1), tokens(640)
    snapshot(fleet, "r0", disk=chunks(prompt))
    replica = fleet.replicas["r0"]
    replica.rates.report(CostPart.DISK, 8e4, 1e9)
    make_busy(fleet, "r0", 10.0)
    replica.waiting = 4
    decision = place(fleet, prompt)
    assert decision.predicted_ttft_s == pytest.approx(10.66, abs=0.05)
    assert decision.picked.cost.fetch_s == 0.0
    assert decision.prefetch_keys == ()


def test_what_lies_on_disk_before_a_copy_is_prefetched_though_computing_it_alone_is_sooner() -> (
    None
):
    """Without the copy its 640 tokens would be computed; the copy is of use only behind them."""
    fleet, prompt = make_copying_fleet(2), tokens(6400)
    snapshot(fleet, "r0", cpu=chunks(prompt))
    on_disk = chunks(prompt)[: 640 // CHUNK]
    snapshot(fleet, "r1", disk=on_disk)
    fleet.replicas["r1"].rates.report(CostPart.DISK, 2e5, 1e9)
    make_busy(fleet, "r0", 20.0)
    decision = place(fleet, prompt)
    assert decision.replica_id == "r1"
    assert decision.copy is not None
    assert decision.predicted_ttft_s == pytest.approx(3.3, abs=0.1)
    assert decision.prefetch_keys == tuple(on_disk)


def test_what_is_on_its_way_delays_the_next_fetch() -> None:
    fleet, prompt = make_copying_fleet(1), tokens(6400)
    snapshot(fleet, "r0", disk=chunks(prompt))
    before = place(fleet, prompt)
    fleet.start(before, 0.0)
    other = tokens(6400, start=10**6)
    snapshot(fleet, "r0", disk=[*chunks(prompt), *chunks(other)])
    after = place(fleet, other)
    fetch_s = {each.candidates[0].cost.fetched_s for each in (before, after)}
    assert max(fetch_s) == pytest.approx(2 * min(fetch_s))


def test_a_replica_that_started_anew_fetches_nothing() -> None:
    fleet, prompt = make_copying_fleet(1), tokens(6400)
    snapshot(fleet, "r0", disk=chunks(prompt))
    for _ in range(10):
        fleet.replicas["r0"].fetch(60.0, 0.0)
    fleet.copy_failed("r0", 0.0)
    fleet.apply_info("r0", peer_info("r0", incarnation="two"))
    snapshot(fleet, "r0", disk=chunks(prompt))
    assert place(fleet, prompt).candidates[0].cost.fetched_s < 1.0
    assert fleet.replicas["r0"].can_give(0.0)


def test_two_routers_agree_on_a_new_sessions_home() -> None:
    one, other = make_copying_fleet(40), make_copying_fleet(40)
    homes = {
        name: place(one, tokens(640), session=name).replica_id
        for name in (f"session-{number}" for number in range(40))
    }
    assert homes == {name: place(other, tokens(640), session=name).replica_id for name in homes}
    assert len(set(homes.values())) > 20


def test_a_large_fleet_picks_as_well_as_if_all_were_weighed() -> None:
    chooser = random.Random(7)
    fleet = make_copying_fleet(60)
    prompts = [tokens(3200, start=at * 10**6) for at in range(20)]
    for name in fleet.replicas:
        known = [prompt for prompt in prompts if chooser.random() < 0.2]
        snapshot(fleet, name, disk=[key for prompt in known for key in chunks(prompt)])
        make_busy(fleet, name, chooser.choice([0.0, 0.5, 2.0]) * chooser.random())

    def best_s(decision: Decision) -> float:
        return decision.picked.score_s(DEFAULT_WEIGHTS)

    few = [place(fleet, prompt) for prompt in prompts]
    assert all(len(each.candidates) <= DEFAULT_WEIGHTS.max_candidates for each in few)
    fleet.weights = replace(fleet.weights, max_candidates=1000)
    for prompt, decision in zip(prompts, few, strict=True):
        assert best_s(decision) <= best_s(place(fleet, prompt)) * 1.1 + 0.01


def test_the_home_is_weighed_in_a_large_fleet_whatever_it_costs() -> None:
    fleet = make_copying_fleet(60)
    fleet.sessions.note("s", 7, 0.0)
    make_busy(fleet, "r7", 50.0)
    decision = place(fleet, tokens(640), session="s")
    assert "r7" in {each.replica_id for each in decision.candidates}
    assert decision.reason == "session-spill"


def test_what_many_hold_is_found_in_a_large_fleet() -> None:
    """The 20 holders of the prompt have a little to do; all others are idle and hold nothing."""
    fleet, prompt = make_copying_fleet(60, transfer_port=None), tokens(6400)
    holders = {f"r{at}" for at in range(20)}
    for name in sorted(holders):
        stored(fleet, name, KvTier.GPU, blocks(prompt))
        make_busy(fleet, name, 0.2 if name == "r13" else 0.5)
    decision = place(fleet, prompt)
    assert decision.replica_id == "r13"
    assert len(decision.candidates) <= DEFAULT_WEIGHTS.max_candidates


@pytest.mark.parametrize("policy", ["longest-prefix", "session", "least-loaded", "round-robin"])
def test_other_policies_weigh_few_and_pick_the_same(policy: PolicyName) -> None:
    fleet, prompt = make_copying_fleet(60, policy=policy), tokens(6400)
    for at in range(60):
        snapshot(fleet, f"r{at}", disk=chunks(prompt)[: at * 3 % 50])
    fleet.sessions.note("s", 31, 0.0)
    few = [place(fleet, prompt, session=session) for session in (None, "s", "t")]
    assert all(len(each.candidates) <= DEFAULT_WEIGHTS.max_candidates + 1 for each in few)
    fleet.weights = replace(fleet.weights, max_candidates=1000)
    every = [place(fleet, prompt, session=session) for session in (None, "s", "t")]
    assert [(each.replica_id, each.reason, each.home) for each in few] == [
        (each.replica_id, each.reason, each.home) for each in every
    ]
    assert [each.picked for each in few] == [each.picked for each in every]


def test_retries_and_subsets_use_a_kept_view_until_the_fleet_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    of = EligibleReplicas.of

    def noted(replicas: Sequence[Replica], draining: Sequence[Replica]) -> EligibleReplicas:
        made.append(len(replicas))
        return of(replicas, draining)

    monkeypatch.setattr(EligibleReplicas, "of", noted)
    fleet = make_copying_fleet(5)
    scheduler = RequestScheduler(fleet)
    keys = PromptKeyCache(tokens(640))
    asks = [
        PlacementRequest(keys=keys),
        PlacementRequest(keys=keys, exclude=("r0", "r1")),
        PlacementRequest(keys=keys, among=("r3", "r4")),
        PlacementRequest(keys=keys, exclude=("r1", "r0")),
        PlacementRequest(keys=keys, among=["r4", "r3"], exclude=("r3",)),
    ]
    for _ in range(3):
        for ask in asks:
            scheduler.place(ask, 0.0)
    assert made == [5, 3, 2, 1]
    fleet.down("r4")
    assert scheduler.place(asks[2], 0.0).replica_id == "r3"
    with pytest.raises(NoReplicaError):
        scheduler.place(asks[4], 0.0)
    assert made == [5, 3, 2, 1, 1]


@pytest.mark.parametrize(("wait_s", "goes"), [(10.0, "r0"), (20.0, "r1")])
def test_a_session_leaves_only_for_more_than_it_costs_the_caches(wait_s: float, goes: str) -> None:
    """6.4 s of work elsewhere, which evict as much of others' KV as its home needs no more."""
    fleet, prompt = make_copying_fleet(2, prefetch=False), tokens(6400)
    stored(fleet, "r0", KvTier.GPU, blocks(prompt))
    fleet.sessions.note("s", fleet.replicas["r0"].serial, 0.0)
    make_busy(fleet, "r0", wait_s)
    decision = place(fleet, prompt, session="s")
    assert (decision.home, decision.replica_id) == ("r0", goes)
    beyond_s = {each.replica_id: each.beyond_home_s for each in decision.candidates}
    assert beyond_s == {"r0": 0.0, "r1": pytest.approx(6.4, rel=0.2)}
    assert place(fleet, prompt).replica_id == "r1", "without a session nothing is left behind"
