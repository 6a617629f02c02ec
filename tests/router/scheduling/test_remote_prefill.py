"""Prefill at one replica, decode at another: when that is the best candidate, and its bounds."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from router.config.cost_weights import DEFAULT_WEIGHTS
from router.config.settings import PolicyName, RatesConfig
from router.fleet.cost_model import CostPart
from router.fleet.decision import Candidate, Decision
from router.fleet.fleet import Fleet
from router.fleet.in_flight import Phase, Ticket
from router.fleet.replica import ReplicaState
from router.index.prompt_keys import KvTier, PromptKeyCache
from router.scheduling.admission import AdmissionQueue, Admitted
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler
from router.scheduling.waiting_queue import WaitingRequest
from tests.router.fleet.helpers import blocks, chunks, place, snapshot, stored
from tests.router.prompt.prompts_given import tokens
from tests.router.scheduling.helpers import make_copying_fleet
from warmroute_common.api_errors import RateLimitedError

LONG = tokens(6400)


def make_fleet(
    count: int = 2,
    roles: Mapping[str, Any] = MappingProxyType({}),
    policy: PolicyName = "ttft",
) -> Fleet:
    """Return a fleet whose r0 computes much, and whose r1 writes thirty answers."""
    fleet = make_copying_fleet(count, prefetch=False, policy=policy)
    for name, each in fleet.replicas.items():
        each.nixl_role = roles.get(name, "both")
        each.config = replace(each.config, nixl_role=each.nixl_role)
    fleet.replicas.changed()
    fleet.replicas["r0"].recent.note(0.9 * fleet.weights.recent_s, 0.0)
    fleet.replicas["r1"].decoding = 30
    return fleet


def split(fleet: Fleet, now_s: float = 0.0, **more: Any) -> Decision:
    return place(fleet, LONG, now_s, **({"may_split": True, "output_tokens": 500} | more))


def pair(decision: Decision) -> tuple[str, str]:
    """Return the replica that prefills, and the one that decodes."""
    return decision.picked.computes_at.id, decision.replica_id


def test_a_prompt_is_prefilled_where_no_answers_run_and_decoded_where_none_is_prefilled() -> None:
    decision = split(make_fleet())
    assert pair(decision) == ("r0", "r1")
    there = decision.picked.prefiller
    assert there is not None
    assert (there.work.new_tokens, there.pull_bytes) == (6400, 6400 * 1000)
    assert decision.predicted_ttft_s == pytest.approx(6.4, rel=0.2)
    slowed_s = decision.picked.slowed_s(DEFAULT_WEIGHTS)
    assert slowed_s < 6.0, "thirty answers would wait for 6.4 s each"
    (at_r0,) = (each for each in decision.candidates if each.replica_id == "r0")
    assert at_r0.prefiller is None, "r1 would do its prefill no better"


def test_a_prompt_stays_at_one_replica_where_that_is_cheaper() -> None:
    fleet = make_fleet()
    fleet.replicas["r1"].decoding = 0
    fleet.replicas["r0"].queue.join(1.0, 0.0)
    assert pair(split(fleet)) == ("r1", "r1")
    fleet = make_fleet()
    for each in fleet.replicas.values():
        each.rates.note_pull(10_000_000, 60.0)
    assert pair(split(fleet)) == ("r0", "r0"), "the network is too slow"


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ({"r0": "prefill", "r1": "decode"}, ("r0", "r1")),
        ({"r0": "decode"}, ("r0", "r0")),
        ({"r1": "prefill"}, ("r0", "r0")),
        ({"r0": None}, ("r0", "r0")),
        ({"r1": None}, ("r0", "r0")),
    ],
)
def test_roles_say_who_may_prefill_and_who_may_decode(
    roles: dict[str, str | None], expected: tuple[str, str]
) -> None:
    assert pair(split(make_fleet(roles=roles))) == expected


def test_a_replica_that_only_prefills_answers_nothing_while_another_one_can() -> None:
    fleet = make_fleet(roles={"r0": "prefill", "r1": "decode"})
    alone = place(fleet, LONG)
    assert pair(alone) == ("r1", "r1")
    assert [each.replica_id for each in alone.candidates] == ["r1"]
    assert [each.id for each in alone.away] == ["r0"], "where the picker's last try goes"
    assert pair(place(fleet, LONG, exclude=["r1"])) == ("r0", "r0")
    fleet.replicas["r1"].state = ReplicaState.DOWN
    fleet.replicas.changed()
    assert pair(split(fleet)) == ("r0", "r0")


@pytest.mark.parametrize("policy", ["longest-prefix", "session", "least-loaded", "round-robin"])
def test_no_policy_has_a_replica_answer_that_only_prefills(policy: PolicyName) -> None:
    fleet = make_fleet(roles={"r0": "prefill"}, policy=policy)
    stored(fleet, "r0", KvTier.GPU, blocks(LONG))
    assert [pair(place(fleet, LONG, session="a")) for _ in range(3)] == [("r1", "r1")] * 3


def test_of_many_that_only_prefill_the_one_with_the_prefix_does() -> None:
    """The shortlist of a large fleet has replicas that can answer."""
    count = 3 * DEFAULT_WEIGHTS.max_candidates
    fleet = make_fleet(count, roles={f"r{at}": "prefill" for at in range(count) if at != 1})
    holder = f"r{count - 1}"
    stored(fleet, holder, KvTier.GPU, blocks(LONG))
    assert pair(split(fleet)) == (holder, "r1")


def test_a_request_that_needs_one_server_gets_one() -> None:
    assert pair(split(make_fleet(), may_split=False)) == ("r0", "r0")


@pytest.mark.parametrize("policy", ["longest-prefix", "session", "least-loaded", "round-robin"])
def test_policies_that_predict_nothing_do_not_split(policy: PolicyName) -> None:
    decision = split(make_fleet(policy=policy))
    assert not any(each.prefiller for each in decision.candidates)


def test_replicas_with_other_keys_do_not_pair_up() -> None:
    fleet = make_fleet()
    shape = fleet.replicas["r0"].shape
    assert shape is not None
    fleet.replicas["r0"].shape = replace(shape, block_tokens=32)
    fleet.replicas.changed()
    assert pair(split(fleet)) == ("r0", "r0")


def test_a_session_that_spills_takes_its_kv_along() -> None:
    """The first leg runs where the prefix is, and costs almost nothing there."""
    fleet = make_fleet()
    fleet.replicas["r1"].decoding = 0
    stored(fleet, "r0", KvTier.GPU, blocks(LONG))
    stored(fleet, "r1", KvTier.GPU, blocks(LONG)[:100])
    decision = split(fleet)
    assert pair(decision) == ("r0", "r1")
    there = decision.picked.prefiller
    assert there is not None
    assert there.work.new_tokens == 16
    assert there.pull_bytes == (6400 - 100 * 16) * 1000, "r1 has the beginning"


def test_a_pair_begins_when_its_prefiller_does() -> None:
    """An idle replica that decodes does not help while the one that prefills has other work."""
    fleet = make_fleet()
    fleet.replicas["r0"].decoding, fleet.replicas["r1"].decoding = 60, 0
    fleet.replicas["r0"].context_tokens = 300_000
    fleet.replicas["r1"].queue.join(3.0, 0.0)
    assert pair(split(fleet)) == ("r1", "r1")
    assert pair(split(fleet, begin_by_s=2.5)) == ("r0", "r1"), "only r0 begins in time"
    queue = AdmissionQueue(RequestScheduler(fleet))
    fleet.replicas["r0"].queue.join(4.0, 0.0)
    request = PlacementRequest(keys=PromptKeyCache(LONG), may_split=True, output_tokens=500)
    with pytest.raises(RateLimitedError, match="begin with the request within"):
        queue.arrive(request, 0.0, max_wait_s=2.5)


def second_leg(fleet: Fleet, decision: Decision) -> tuple[Decision, Ticket, Ticket]:
    """Return where a pair's second leg goes when the first has ended, its ticket and the former."""
    request = PlacementRequest(keys=PromptKeyCache(LONG), may_split=True, output_tokens=500)
    former = fleet.start(decision, 0.0)
    assert former.first_leg is not None
    former.first_leg.first_byte(1.0)
    former.first_leg.finish(1.0, ok=True)
    decision, ticket = RequestScheduler(fleet).second_leg(request, decision, former, 1.0)
    return decision, ticket, former


def test_the_second_leg_goes_where_it_begins_first_when_the_prompt_has_been_computed() -> None:
    """Meanwhile r1, which was chosen to decode, got a long prompt of its own."""
    fleet = make_fleet(3, roles={"r2": "decode"})
    fleet.replicas["r2"].decoding = 40
    decision = split(fleet)
    assert pair(decision) == ("r0", "r1")
    fleet.replicas["r1"].queue.join(9.0, 0.5)
    moved, ticket, former = second_leg(fleet, decision)
    assert (pair(moved), ticket.replica.id) == (("r2", "r2"), "r2")
    assert moved.picked.prefiller is None and moved.picked.work.pull_bytes == 6400 * 1000
    assert former.phase is Phase.ENDED
    assert [each.waiting for each in fleet.replicas.values()] == [0, 0, 1]
    ticket.finish(2.0, ok=True)
    assert not any(each.waiting or each.second_legs for each in fleet.replicas.values())


@pytest.mark.parametrize("queue_s", [0.0, 0.5])
def test_a_second_leg_counts_neither_as_waiting_nor_as_stored(queue_s: float) -> None:
    """It is in flight where it was placed: that must neither keep it there nor drive it away."""
    fleet = make_fleet(3, roles={"r2": "decode"})
    fleet.replicas["r2"].decoding = 33
    for name in ("r1", "r2"):
        fleet.set_kv_capacity(name, 9600)
        fleet.replicas[name].rates.note_pull(6_400_000, 1.0)
    decision = split(fleet)
    assert pair(decision) == ("r0", "r1")
    fleet.replicas["r1"].queue.join(queue_s, 0.9)
    assert second_leg(fleet, decision)[0].replica_id == ("r2" if queue_s else "r1")


@pytest.mark.parametrize("change", ["nothing", "prefills only", "other keys", "down", "all down"])
def test_a_second_leg_stays_where_no_other_replica_can_pull(change: str) -> None:
    fleet = make_fleet(3, roles={"r2": "prefill" if change == "prefills only" else "decode"})
    other = fleet.replicas["r2"]
    other.decoding = 40
    decision = split(fleet)
    if change != "nothing":
        fleet.replicas["r1"].queue.join(9.0, 0.5)
    if change == "other keys":
        assert other.shape is not None
        other.shape = replace(other.shape, block_tokens=32)
        fleet.replicas.changed()
    if change in ("down", "all down"):
        fleet.down("r2")
    if change == "all down":
        fleet.down("r1")
    stayed, ticket, former = second_leg(fleet, decision)
    assert stayed is decision and ticket is former and ticket.phase is not Phase.ENDED


def test_nothing_is_staged_for_a_first_leg() -> None:
    """KV on disk counts as not there: its replica would begin before it is read."""
    fleet = make_fleet()
    snapshot(fleet, "r0", cpu=chunks(LONG)[:50], disk=chunks(LONG))
    decision = split(fleet)
    assert decision.prefetch_keys == ()
    there = decision.picked.prefiller
    assert there is not None
    assert (there.work.new_tokens, there.work.disk_bytes) == (6400 - 50 * 64, 0.0)


def test_one_function_scores_both_and_the_harm_is_where_it_is_done() -> None:
    def score_s(candidate: Candidate) -> float:
        return candidate.score_s(DEFAULT_WEIGHTS)

    picked = split(make_fleet()).picked
    there = picked.prefiller
    assert there is not None
    base_s = score_s(picked)
    behind = 9 - DEFAULT_WEIGHTS.least_behind  # those before it and the usual ones are added
    busier = replace(picked, prefiller=replace(there, waiting=9))
    assert score_s(busier) - base_s == pytest.approx(behind * there.cost.busy_s)
    writing = replace(picked, prefiller=replace(there, work=replace(there.work, decoding=3)))
    slowed_s = 3 * there.cost.prefill_s / DEFAULT_WEIGHTS.first_token_weight
    assert score_s(writing) - base_s == pytest.approx(slowed_s)


def test_a_prefill_counts_the_second_legs_that_it_delays() -> None:
    """A second leg that comes before its end waits until then; one that comes later does not."""
    fleet = make_fleet()
    ticket = fleet.start(split(fleet), 0.0)  # r1 gets its KV after about 6.4 s
    second = fleet.replicas["r1"]

    def delayed_s(prompt_tokens: int) -> float:
        (at_r1,) = place(fleet, tokens(prompt_tokens, start=10**6), among=("r1",)).candidates
        with_none = replace(at_r1, second_legs_s=(), waiting=at_r1.waiting - 1)
        return at_r1.score_s(DEFAULT_WEIGHTS) - with_none.score_s(DEFAULT_WEIGHTS)

    (leg,) = second.second_legs.values()
    due_s = leg.due_s
    assert due_s == pytest.approx(6.4, rel=0.2)
    assert delayed_s(1600) == 0.0, "it ends before"
    longer = place(fleet, tokens(9600, start=10**6), among=("r1",)).picked
    assert longer.cost.busy_s > due_s + 1.0
    assert delayed_s(9600) == pytest.approx(longer.cost.busy_s - due_s)
    ticket.pulls(5.0)
    assert not second.second_legs
    ticket.finish(8.0, ok=False)
    fleet.start(split(fleet), 0.0).finish(1.0, ok=False)
    assert not second.second_legs, "also if it is given up"


def test_only_the_best_few_prefillers_are_paired() -> None:
    fleet = make_fleet(12)
    for number, each in enumerate(fleet.replicas.values()):
        each.decoding = 40
        each.queue.join(0.3 * number, 0.0)
    candidates = split(fleet).candidates
    assert len(candidates) == 12
    prefillers = {each.computes_at.id for each in candidates if each.prefiller is not None}
    assert prefillers and prefillers <= {"r0", "r1", "r2", "r3"}


def test_both_replicas_count_the_request_and_kv_that_will_come_takes_memory() -> None:
    fleet = make_fleet()
    fleet.set_kv_capacity("r1", 10_000)
    ticket = fleet.start(split(fleet), 0.0)
    first, second = fleet.replicas["r0"], fleet.replicas["r1"]
    assert (first.waiting, second.waiting, second.incoming_tokens) == (1, 1, 6400)
    assert first.queue.wait_s(0.0) == pytest.approx(6.4, rel=0.2)
    assert second.queue.wait_s(0.0) == 0.0, "it can compute meanwhile"
    other = PlacementRequest(keys=PromptKeyCache(tokens(6400, start=10**6)), may_split=True)
    for each in RequestScheduler(fleet).place(other, 0.0).candidates:
        if each.prefiller is not None and each.replica is second:
            assert each.cost.queue_s == 0.0, "no answer is known to end"
    assert ticket.first_leg is not None
    ticket.first_leg.finish(7.0, ok=True, output_tokens=1)
    ticket.pulls(7.0)
    assert (first.waiting, second.waiting, second.incoming_tokens) == (0, 1, 0)
    ticket.finish(8.0, ok=False)
    assert (first.in_flight, second.waiting, second.incoming_tokens) == (0, 0, 0)


def test_a_first_leg_takes_its_replicas_time_until_it_is_seen_to_end() -> None:
    """However much later than predicted: the next prompt would wait there meanwhile."""
    fleet = make_fleet()
    leg = fleet.start(split(fleet), 0.0).first_leg
    assert leg is not None
    fleet.tick(9.0)
    queue = fleet.replicas["r0"].queue
    assert leg.phase is Phase.PREFILLING
    fleet.replicas["r0"].note_answer(30.0)
    leg.first_byte(12.0)
    leg.finish(12.0, ok=True, output_tokens=1)
    assert queue.wait_s(12.0) == 0.0
    assert fleet.replicas["r0"].answers == 1, "one token says nothing of how long answers take"


def test_a_request_given_up_during_its_first_leg_is_released_at_both_replicas() -> None:
    fleet = make_fleet()
    fleet.start(split(fleet), 0.0).finish(1.0, ok=False)
    first, second = fleet.replicas["r0"], fleet.replicas["r1"]
    assert (first.in_flight, second.waiting, second.incoming_tokens) == (0, 0, 0)


@pytest.mark.parametrize("others_wait", [False, True])
def test_the_rate_of_pulls_is_learned_where_nobody_else_waits(others_wait: bool) -> None:
    fleet = make_fleet()
    ticket = fleet.start(split(fleet), 0.0)
    if others_wait:
        fleet.start(place(fleet, tokens(64, start=10**6), among=("r1",)), 6.9)
    ticket.pulls(7.0)
    ticket.first_byte(7.0 + DEFAULT_WEIGHTS.base_s + 0.64)
    rates = fleet.replicas["r1"].rates
    assert rates.knows(CostPart.PULL) is not others_wait
    if not others_wait:
        assert rates.per_second(CostPart.PULL) == pytest.approx(1e7, rel=0.05)
        for second in range(62):
            fleet.tick(float(second))
        start = RatesConfig().pull_bytes_per_s
        assert rates.per_second(CostPart.PULL) == pytest.approx(start), "it is forgotten"


def test_a_request_waits_for_the_replica_that_will_compute_it() -> None:
    fleet = make_fleet()
    fleet.replicas["r0"].queue.join(20.0, 0.0)
    fleet.replicas["r1"].decoding = 40
    queue = AdmissionQueue(RequestScheduler(fleet))
    asked = PlacementRequest(keys=PromptKeyCache(LONG), may_split=True, output_tokens=500)
    waiting = queue.arrive(asked, 0.0)
    assert isinstance(waiting, WaitingRequest)
    assert waiting.replica is fleet.replicas["r0"]
    assert waiting.service_s == pytest.approx(6.4, rel=0.2)
    fleet.replicas["r0"].recent.note(0.5 * fleet.weights.recent_s, 17.0)
    ((_, end),) = queue.dispatch(17.0)
    assert isinstance(end, Admitted)
    assert pair(end.decision) == ("r0", "r1")
