"""Placing, starting and ending requests: the fleet's state from outside."""

import pytest

from router.config.settings import (
    IndexConfig,
    PolicyName,
    ReplicaConfig,
    RouterConfig,
)
from router.fleet.cost_model import CostPart
from router.fleet.decision import Reason
from router.fleet.fleet import Fleet
from router.fleet.replica import ReplicaState
from router.index.kv_events import BlocksRemoved, BlocksStored, FirstBlocks, GpuCleared, KvBatch
from router.index.prompt_keys import KvTier, keys64
from tests.router.fleet.helpers import (
    BLOCK,
    CHUNK,
    blocks,
    chunks,
    info,
    make_fleet,
    place,
    snapshot,
    stored,
)
from tests.router.prompt.prompts_given import GivenPrompt, text, tokens
from warmroute_common.agent_protocol import (
    ComputeRates,
    EventBatch,
    KeyEvent,
    TierInfo,
    pack_keys,
)
from warmroute_common.api_errors import NoReplicaError, UnknownModelError
from warmroute_common.keys import HashScheme, chunk_keys, key64


def test_the_replica_that_holds_the_prefix_gets_the_request() -> None:
    fleet, prompt = make_fleet(3), tokens(640)
    stored(fleet, "r1", KvTier.GPU, blocks(prompt))
    decision = place(fleet, prompt)
    assert (decision.replica_id, decision.reason) == ("r1", Reason.LONGEST_MATCH)
    assert decision.url == "http://host:8001"
    assert decision.matched_tokens == {KvTier.GPU: 640}
    assert [each.replica_id for each in decision.candidates] == ["r0", "r1", "r2"]


def test_tiers_are_told_apart_and_slow_chunks_are_to_be_prefetched() -> None:
    """320 tokens: 2 chunks and 1 block on the GPU, then cpu, disk, disk."""
    fleet, prompt = make_fleet(), tokens(320)
    keys = chunks(prompt)
    stored(fleet, "r0", KvTier.GPU, blocks(prompt)[:9])
    snapshot(fleet, "r0", cpu=[keys[2]], disk=keys[2:])
    decision = place(fleet, prompt)
    assert decision.replica_id == "r0"
    assert decision.matched_tokens == {KvTier.GPU: 144, KvTier.CPU: 48, KvTier.DISK: 128}
    assert decision.prefetch_keys == tuple(keys[3:])
    assert decision.expected_gain_s == pytest.approx(0.112, rel=0.1), "the last block is computed"


def test_a_faster_tier_beats_a_slower_one() -> None:
    fleet, prompt = make_fleet(), tokens(6400)
    snapshot(fleet, "r0", disk=chunks(prompt))
    stored(fleet, "r1", KvTier.GPU, blocks(prompt))
    assert place(fleet, prompt).replica_id == "r1"


def test_replicas_of_different_kinds_are_compared() -> None:
    """Block sizes, schemes and chunk sizes may differ from replica to replica."""
    fleet, prompt = make_fleet(), tokens(640)
    other = HashScheme("sha256_cbor")
    fleet.apply_info(
        "r1",
        info(
            "r1",
            incarnation="two",
            hash_algorithm="sha256_cbor",
            block_tokens=128,
            chunk_tokens=256,
        ),
    )
    stored(fleet, "r0", KvTier.GPU, blocks(prompt)[:30])
    stored(fleet, "r1", KvTier.GPU, keys64(prompt.chain(other, 128))[:3])
    snapshot(fleet, "r1", cpu=chunk_keys(prompt.chain(other, 128), 2))
    matched = {each.replica_id: each.matched_tokens for each in place(fleet, prompt).candidates}
    assert matched == {"r0": {"gpu": 480}, "r1": {"gpu": 384, "cpu": 128}}


def test_agent_events_change_what_a_snapshot_told() -> None:
    fleet, prompt = make_fleet(), tokens(256)
    keys = chunks(prompt)
    snapshot(fleet, "r0", cpu=keys[:2])
    fleet.apply_events(
        "r0",
        EventBatch(
            incarnation="one",
            seq=2,
            events=[
                KeyEvent("cpu", True, pack_keys([key64(keys[2])])),
                KeyEvent("cpu", False, pack_keys([key64(keys[0])])),
                KeyEvent("disk", True, pack_keys([key64(keys[0])])),
            ],
        ),
    )
    assert place(fleet, prompt).matched_tokens == {KvTier.DISK: 64, KvTier.CPU: 128}
    snapshot(fleet, "r0", cpu=keys[:1])
    assert place(fleet, prompt).matched_tokens == {KvTier.CPU: 64}


def test_lower_tiers_in_kv_events_count_only_without_an_agent() -> None:
    prompt = tokens(256)
    with_agent, stock = make_fleet(), make_fleet(agents=False)
    stock.following_kv("r0")
    first = FirstBlocks(blocks(prompt), list(prompt.token_ids or ()), BLOCK)
    for fleet in (with_agent, stock):
        fleet.apply_kv(
            "r0", KvBatch(0, 0.0, [first, BlocksStored(KvTier.CPU, blocks(prompt))]), 0.0
        )
    assert place(with_agent, prompt).matched_tokens == {}
    assert place(stock, prompt).matched_tokens == {KvTier.CPU: 256}


def test_a_burst_of_one_prompt_meets_at_the_replica_that_computes_it() -> None:
    """No stampede: the other replicas do not compute the same 16,000 tokens."""
    fleet, prompt = make_fleet(4), tokens(16_000)
    picked = []
    for _ in range(20):
        decision = place(fleet, prompt)
        fleet.start(decision, 0.0)
        picked.append(decision.replica_id)
    assert len(set(picked)) == 1


def test_a_burst_of_different_prompts_spreads() -> None:
    fleet = make_fleet(4)
    for number in range(16):
        fleet.start(place(fleet, tokens(4000, start=number * 10_000)), 0.0)
    assert [each.in_flight for each in fleet.replicas.values()] == [4, 4, 4, 4]


def test_a_crowded_replica_does_not_get_everything() -> None:
    """Requests that share a short prefix go elsewhere when its holder's queue is long."""
    fleet = make_fleet(2)
    shared = tokens(160)
    stored(fleet, "r0", KvTier.GPU, blocks(shared))
    picked = []
    for number in range(10):
        prompt = GivenPrompt([*range(160), *range(10_000 * number, 10_000 * number + 4000)])
        decision = place(fleet, prompt)
        fleet.start(decision, 0.0)
        picked.append(decision.replica_id)
    assert set(picked) == {"r0", "r1"}


def test_a_claim_is_confirmed_by_events_and_then_outlives_its_time() -> None:
    fleet, prompt = make_fleet(), tokens(640)
    ticket = fleet.start(place(fleet, prompt), 0.0)
    name = place(fleet, prompt).replica_id
    stored(fleet, name, KvTier.GPU, blocks(prompt)[:20])
    ticket.first_byte(1.0)
    ticket.finish(2.0, ok=True)
    fleet.tick(32.0)
    assert place(fleet, prompt, 32.0).matched_tokens == {KvTier.GPU: 320}


def test_a_request_that_failed_withdraws_its_claim() -> None:
    fleet, prompt = make_fleet(), tokens(640)
    ticket = fleet.start(place(fleet, prompt), 0.0)
    assert place(fleet, prompt).matched_tokens == {KvTier.GPU: 640}
    ticket.finish(1.0, ok=False)
    assert place(fleet, prompt).matched_tokens == {}
    fleet.index.check()


def test_a_request_that_failed_leaves_what_others_have_there() -> None:
    """The first turn was answered; the second one's client has gone before its first token."""
    fleet = make_fleet(agents=False)
    ticket = fleet.start(place(fleet, text(4096)), 0.0)
    ticket.first_byte(1.0)
    ticket.finish(2.0, ok=True)
    second = place(fleet, text(8192))
    fleet.start(second, 3.0).finish(4.0, ok=False)
    third = place(fleet, text(8192), 5.0)
    assert third.replica_id == second.replica_id
    assert third.matched_tokens == {"gpu": 1024}


def test_a_ticket_releases_once_on_every_path() -> None:
    fleet, prompt = make_fleet(1), tokens(64)
    replica = fleet.replicas["r0"]
    whole = fleet.start(place(fleet, prompt), 0.0)
    refused = fleet.start(place(fleet, prompt), 0.0)
    assert (replica.waiting, replica.decoding, replica.in_flight) == (2, 0, 2)
    whole.first_byte(1.0)
    whole.first_byte(1.5)
    assert (replica.waiting, replica.decoding) == (1, 1)
    for _ in range(2):
        whole.finish(2.0, ok=True, cached_tokens=0)
        refused.finish(2.0, ok=False)
        refused.first_byte(3.0)
    assert replica.in_flight == 0
    assert replica.queue.wait_s(2.0) == 0.0


def test_who_is_sent_later_stands_behind_those_sent_before() -> None:
    """One waits for its prefetch; another comes, overtakes it and is done."""
    fleet = make_fleet(1)
    queue = fleet.replicas["r0"].queue
    held = fleet.start(place(fleet, tokens(3000)), 0.0)
    other = fleet.start(place(fleet, tokens(1000, start=50_000)), 0.0)
    other.first_byte(1.0)
    assert queue.wait_s(1.0) == pytest.approx(3.0, rel=0.1)
    held.sent(1.0)
    assert queue.wait_s(1.0) == pytest.approx(3.0, rel=0.1)
    held.first_byte(4.0)
    assert queue.wait_s(4.0) == 0.0
    held.sent(5.0)
    assert queue.wait_s(5.0) == 0.0


def test_what_is_not_measured_is_taken_to_be_as_at_the_others() -> None:
    """The holder has turned out ten times slower than configured; so will the other."""
    fleet, prompt = make_fleet(), tokens(1100)
    holder = place(fleet, prompt).replica_id
    slow = ComputeRates(
        step_s=0.0,
        prefill_token_s=0.01,
        attended_token_s=0.0,
        decode_token_s=0.0,
        steps=9,
        tokens=9000,
    )
    fleet.apply_info(holder, info(holder, compute=slow))
    fleet.tick(1.0)
    stored(fleet, holder, KvTier.GPU, blocks(prompt))
    assert place(fleet, prompt, 2.0).replica_id == holder
    assert {each.rates.seconds(CostPart.PREFILL) for each in fleet.replicas.values()} == {0.01}


def test_only_streamed_answers_say_what_a_token_takes() -> None:
    fleet, prompt = make_fleet(1), tokens(6400)
    rates = fleet.replicas["r0"].rates
    plain = fleet.start(place(fleet, prompt), 0.0)
    plain.first_byte(60.0, streamed=False)
    plain.finish(60.0, ok=True)
    assert not rates.knows(CostPart.PREFILL)
    other = fleet.start(place(fleet, tokens(6400, start=99_999), 60.0), 60.0)
    other.first_byte(61.0)
    other.finish(63.0, ok=True)
    assert rates.knows(CostPart.PREFILL)


def test_cached_tokens_tell_what_a_ttft_was_for() -> None:
    """The router believed in 6,400 cached tokens; the replica had none of them."""
    fleet, prompt = make_fleet(1), tokens(6400)
    stored(fleet, "r0", KvTier.GPU, blocks(prompt))
    rates = fleet.replicas["r0"].rates
    decision = place(fleet, prompt)
    ticket = fleet.start(decision, 0.0)
    ticket.first_byte(7.2)
    ticket.finish(8.0, ok=True, cached_tokens=0)
    cold = place(fleet, tokens(6400, start=99_999), 8.0)
    assert cold.predicted_ttft_s == pytest.approx(7.2, rel=0.1)
    assert rates.cost(decision.picked.work).ttft_s < 0.1


def test_who_computed_what_it_was_to_wait_for_says_nothing() -> None:
    """The second of two equal prompts came first: it had no queue, and the other one had."""
    fleet, prompt = make_fleet(1), tokens(6400)
    rates = fleet.replicas["r0"].rates
    first = fleet.start(place(fleet, prompt), 0.0)
    second = fleet.start(place(fleet, prompt), 0.0)
    before = rates.seconds(CostPart.PREFILL)
    second.first_byte(7.2)
    second.finish(8.0, ok=True, cached_tokens=0)
    first.first_byte(7.3)
    first.finish(8.0, ok=True, cached_tokens=6399)
    assert rates.seconds(CostPart.PREFILL) == before


def test_what_the_router_took_is_not_the_replicas() -> None:
    slow, fast = make_fleet(1), make_fleet(1)
    for fleet, lag_s in ((slow, 0.5), (fast, 0.0)):
        ticket = fleet.start(place(fleet, tokens(640)), 0.0)
        ticket.first_byte(0.64 + lag_s, lag_s=lag_s)
        ticket.finish(2.0, ok=True)
    learned = [each.replicas["r0"].rates.seconds(CostPart.PREFILL) for each in (slow, fast)]
    assert learned[0] == pytest.approx(learned[1])


def test_a_session_stays_home_and_spills_when_home_is_busy() -> None:
    fleet = make_fleet(2)
    first = place(fleet, tokens(640), session="s")
    fleet.start(first, 0.0).finish(0.0, ok=True)
    home = first.replica_id
    again = place(fleet, tokens(320, start=50_000), session="s")
    assert (again.replica_id, again.reason) == (home, Reason.SESSION_HOME)
    fleet.replicas[home].queue.join(5.0, 0.0)
    spilled = place(fleet, tokens(320, start=50_000), session="s")
    assert spilled.replica_id != home
    assert spilled.reason is Reason.SESSION_SPILL


def test_deciding_changes_nothing() -> None:
    fleet, prompt = make_fleet(2), tokens(640)
    for _ in range(3):
        place(fleet, prompt, session="s")
    assert len(fleet.index) == 0
    assert len(fleet.sessions) == 0
    assert all(each.in_flight == 0 for each in fleet.replicas.values())


def test_a_retry_leaves_out_what_was_tried() -> None:
    fleet, prompt = make_fleet(2), tokens(640)
    stored(fleet, "r0", KvTier.GPU, blocks(prompt))
    decision = place(fleet, prompt, exclude=("r0",))
    assert (decision.replica_id, decision.reason) == ("r1", Reason.RETRY)
    with pytest.raises(NoReplicaError, match=r"r0 was tried, r1 was tried"):
        place(fleet, prompt, exclude=("r0", "r1"))


def test_a_bound_request_goes_nowhere_else() -> None:
    fleet = make_fleet(2)
    decision = place(fleet, tokens(64), bound_to="r1")
    assert (decision.replica_id, decision.reason) == ("r1", Reason.BOUND)
    fleet.down("r1")
    with pytest.raises(NoReplicaError, match="the previous response is kept by 'r1'"):
        place(fleet, tokens(64), bound_to="r1")


def test_models_that_are_told_again_change_nothing() -> None:
    fleet = make_fleet(2)
    fleet.set_models("r0", {"small": None, "tuned": "/adapters/a"})
    before = fleet.replicas.version
    fleet.set_models("r0", {"small": None, "tuned": "/adapters/a"})
    assert fleet.replicas.version == before
    fleet.set_models("r0", {"small": None, "tuned": "/adapters/b"})
    assert fleet.replicas.version > before


def test_models_decide_who_may_answer() -> None:
    fleet = make_fleet(2)
    fleet.set_models("r0", {"small": None})
    fleet.set_models("r1", {"large": None})
    assert place(fleet, tokens(64), model="large").replica_id == "r1"
    with pytest.raises(UnknownModelError, match="'huge'"):
        place(fleet, tokens(64), model="huge")
    fleet.down("r1")
    with pytest.raises(NoReplicaError, match="r1 down"):
        place(fleet, tokens(64), model="large")


def test_replicas_not_asked_yet_are_used_only_when_none_is_up() -> None:
    fleet = make_fleet(2)
    fleet.replicas["r0"].state = ReplicaState.UNKNOWN
    stored(fleet, "r0", KvTier.GPU, blocks(tokens(640)))
    assert place(fleet, tokens(640)).replica_id == "r1"
    fleet.down("r1")
    assert place(fleet, tokens(640)).reason is Reason.ONLY_REPLICA


def test_a_draining_replica_gets_nothing_until_resumed() -> None:
    fleet = make_fleet(2)
    fleet.drain("r0")
    fleet.up("r0")
    assert place(fleet, tokens(64)).replica_id == "r1"
    fleet.resume("r0")
    fleet.up("r0")
    assert fleet.replicas["r0"].state is ReplicaState.UP


def test_a_new_incarnation_is_forgotten_at_once() -> None:
    fleet, prompt = make_fleet(), tokens(256)
    stored(fleet, "r0", KvTier.GPU, blocks(prompt))
    snapshot(fleet, "r0", cpu=chunks(prompt))
    assert not fleet.apply_info("r0", info("r0"))
    assert place(fleet, prompt).matched_tokens != {}
    assert fleet.apply_info("r0", info("r0", incarnation="two"))
    assert place(fleet, prompt).matched_tokens == {}


def test_lost_events_take_only_the_gpu_with_them_where_an_agent_tells() -> None:
    fleet, prompt = make_fleet(), tokens(256)
    stored(fleet, "r0", KvTier.GPU, blocks(prompt))
    snapshot(fleet, "r0", cpu=chunks(prompt))
    fleet.lost_kv("r0")
    assert place(fleet, prompt).matched_tokens == {KvTier.CPU: 256}


def test_removed_and_cleared_blocks_are_gone() -> None:
    fleet, prompt = make_fleet(), tokens(256)
    stored(fleet, "r0", KvTier.GPU, blocks(prompt))
    fleet.apply_kv("r0", KvBatch(1, 0.0, [BlocksRemoved(KvTier.GPU, blocks(prompt)[8:])]), 0.0)
    assert place(fleet, prompt).matched_tokens == {KvTier.GPU: 128}
    fleet.apply_kv("r0", KvBatch(2, 0.0, [GpuCleared()]), 0.0)
    assert place(fleet, prompt).matched_tokens == {}


@pytest.mark.parametrize(
    ("usage", "is_corrected"),
    [
        ({"cached_tokens": 0, "prompt_tokens": 2000}, True),
        ({"cached_tokens": 1600, "prompt_tokens": 2000}, True),
        ({"cached_tokens": 1984, "prompt_tokens": 2000}, False),
        ({"cached_tokens": 0, "prompt_tokens": 2048}, False),  # those of other prompts, too
        ({"cached_tokens": 0}, False),
        ({"prompt_tokens": 2000}, False),
    ],
)
def test_what_an_answer_contradicts_is_corrected(usage: dict[str, int], is_corrected: bool) -> None:
    """Events report blocks that are reused like new ones if a request wants it
    (`kv_cache_report_mode`): the one removal that follows does not end them."""
    fleet, prompt = make_fleet(1), tokens(2000)
    keys = blocks(prompt)
    for event in (BlocksStored, BlocksStored, BlocksStored, BlocksRemoved):
        fleet.apply_kv("r0", KvBatch(0, 0.0, [event(KvTier.GPU, keys)]), 0.0)
    ticket = fleet.start(place(fleet, prompt), 0.0)
    ticket.first_byte(1.0)
    ticket.finish(2.0, ok=True, **usage)
    fleet.tick(2.0)
    stored(fleet, "r0", KvTier.GPU, keys)  # it arrives after the answer
    fleet.tick(3.0)
    fleet.tick(4.0)
    fleet.index.check()
    assert place(fleet, prompt, 4.0).matched_tokens == {KvTier.GPU: 2000}
    fleet.apply_kv("r0", KvBatch(0, 0.0, [BlocksRemoved(KvTier.GPU, keys)]), 4.0)
    lost = usage.get("cached_tokens", 2000) if is_corrected else 2000
    assert place(fleet, prompt, 4.0).matched_tokens == ({KvTier.GPU: lost} if lost else {})


def test_equal_prompts_that_are_computed_at_once_contradict_nothing() -> None:
    """Each of their copies is there until it is removed."""
    fleet, prompt = make_fleet(1), tokens(2000)
    tickets = [fleet.start(place(fleet, prompt), 0.0) for _ in range(2)]
    for ticket in tickets:
        stored(fleet, "r0", KvTier.GPU, blocks(prompt))
        ticket.first_byte(1.0)
        ticket.finish(2.0, ok=True, cached_tokens=0, prompt_tokens=2000)
    fleet.tick(3.0)
    fleet.tick(4.0)
    fleet.apply_kv("r0", KvBatch(0, 0.0, [BlocksRemoved(KvTier.GPU, blocks(prompt))]), 4.0)
    assert place(fleet, prompt, 4.0).matched_tokens == {KvTier.GPU: 2000}


def test_without_kv_events_cached_tokens_may_mean_anything() -> None:
    fleet, prompt = make_fleet(1), tokens(2000)
    for _ in range(3):
        stored(fleet, "r0", KvTier.GPU, blocks(prompt))
    fleet.replicas["r0"].has_events = False
    ticket = fleet.start(place(fleet, prompt), 0.0)
    ticket.first_byte(1.0)
    ticket.finish(2.0, ok=True, cached_tokens=0, prompt_tokens=2000)
    fleet.tick(3.0)
    fleet.tick(4.0)
    fleet.apply_kv("r0", KvBatch(0, 0.0, [BlocksRemoved(KvTier.GPU, blocks(prompt))]), 4.0)
    assert place(fleet, prompt, 4.0).matched_tokens == {KvTier.GPU: 2000}


def test_a_replica_that_tells_nothing_is_remembered_by_text() -> None:
    fleet, prompt = make_fleet(agents=False), text(8192)
    first = place(fleet, prompt)
    assert first.reason is Reason.NO_INFORMATION
    fleet.start(first, 0.0).finish(1.0, ok=False)
    second = place(fleet, prompt, 1.0)
    ticket = fleet.start(second, 1.0)
    ticket.first_byte(1.5)
    ticket.finish(2.0, ok=True)
    again = place(fleet, prompt, 600.0)
    assert again.replica_id == second.replica_id
    assert again.matched_tokens == {KvTier.GPU: 2048}
    longer = GivenPrompt(None, "a" * 8192 + "b" * 5000)
    assert place(fleet, longer, 600.0).matched_tokens == {KvTier.GPU: 2048}
    fleet.tick(602.0)
    assert place(fleet, prompt, 602.0).matched_tokens == {}


@pytest.mark.parametrize("has_events", [False, True])
def test_a_belief_and_a_home_last_from_the_answers_end(has_events: bool) -> None:
    fleet, prompt = make_fleet(agents=has_events), tokens(640) if has_events else text(8192)
    replica = fleet.replicas["r1"]
    index, sessions = fleet.config.index, fleet.config.sessions
    ttl_s = index.speculative_ttl_s if has_events else index.history_ttl_s
    ticket = fleet.start(place(fleet, prompt, session="s", among=("r1",)), 0.0)
    if has_events:  # of another prompt: the events of this one are late
        fleet.apply_kv("r1", KvBatch(0, 0.0, [BlocksStored(KvTier.GPU, [1, 2])]), 0.5)
    ticket.first_byte(1.0)
    ended_s = 2 * sessions.ttl_s
    fleet.start(place(fleet, None, session="other", among=("r0",)), ended_s - 1.0)
    fleet.tick(ended_s - 1.0)
    assert place(fleet, prompt, ended_s - 1.0).replica_id == "r1"
    ticket.finish(ended_s, ok=True)
    for now_s, believed in ((ended_s + ttl_s - 1.0, True), (ended_s + ttl_s, False)):
        fleet.tick(now_s)
        assert bool(fleet.index.believed(replica.slot)) is believed
    fleet.index.check()
    fleet.sessions.check()
    assert fleet.home("s", ended_s + sessions.ttl_s - 1.0) is replica
    assert fleet.home("s", ended_s + sessions.ttl_s) is None


def test_a_silent_replica_that_was_down_may_come_back_empty() -> None:
    fleet, prompt = make_fleet(1, agents=False), text(8192)
    fleet.start(place(fleet, prompt), 0.0).first_byte(0.1)
    fleet.down("r0")
    fleet.up("r0")
    assert place(fleet, prompt).matched_tokens == {}


def test_a_stock_vllms_scheme_is_found_out() -> None:
    fleet, prompt = make_fleet(1, agents=False), tokens(256)
    scheme = HashScheme("xxhash", "0")
    keys = keys64(prompt.chain(scheme, BLOCK))
    first = FirstBlocks(keys, list(prompt.token_ids or ()), BLOCK)
    fleet.apply_kv("r0", KvBatch(0, 0.0, [first, BlocksStored(KvTier.GPU, keys)]), 0.0)
    shape = fleet.replicas["r0"].shape
    assert shape is not None
    assert (shape.scheme, shape.block_tokens) == (scheme, BLOCK)
    assert place(fleet, prompt).matched_tokens == {KvTier.GPU: 256}


def test_a_random_seed_is_named_as_the_problem() -> None:
    fleet, prompt = make_fleet(1, agents=False), tokens(256)
    keys = keys64(prompt.chain(HashScheme("xxhash", "random"), BLOCK))
    first = FirstBlocks(keys, list(prompt.token_ids or ()), BLOCK)
    fleet.apply_kv("r0", KvBatch(0, 0.0, [first]), 0.0)
    replica = fleet.replicas["r0"]
    assert replica.shape is None
    assert "PYTHONHASHSEED" in (replica.shape_problem or "")


def test_an_agents_scheme_that_its_events_contradict_is_put_right() -> None:
    fleet, prompt = make_fleet(1), tokens(256)
    scheme = HashScheme("sha256", "0")
    first = FirstBlocks(keys64(prompt.chain(scheme, BLOCK)), list(prompt.token_ids or ()), BLOCK)
    fleet.apply_kv("r0", KvBatch(0, 0.0, [first]), 0.0)
    shape = fleet.replicas["r0"].shape
    assert shape is not None
    assert (shape.scheme, shape.chunk_tokens) == (scheme, CHUNK)


def test_a_replica_takes_its_agents_name_and_keeps_its_old_one() -> None:
    fleet = Fleet(
        RouterConfig(
            replicas=tuple(
                ReplicaConfig(url=f"http://h:{port}", agent_url="http://h:1") for port in (1, 2)
            )
        )
    )
    fleet.apply_info("h:1", info("instance1"))
    fleet.apply_info("h:2", info("instance1"))
    assert list(fleet.replicas) == ["instance1", "h:2"]
    assert fleet.replicas["h:1"] is fleet.replicas["instance1"]
    fleet.up("h:1")
    assert place(fleet, tokens(64)).replica_id == "instance1"
    with pytest.raises(NoReplicaError):
        place(fleet, tokens(64), exclude=("h:1", "h:2"))
    with pytest.raises(KeyError):
        fleet.replicas["nobody"]


def test_measured_bandwidth_and_chunk_size_come_from_the_agent() -> None:
    fleet, prompt = make_fleet(1), tokens(640)
    snapshot(fleet, "r0", disk=chunks(prompt))
    tier = TierInfo(capacity_bytes=1, used_bytes=0, read_bytes_per_s=640e3)
    fleet.apply_info("r0", info("r0", tiers={"disk": tier}))
    assert place(fleet, prompt).candidates[0].cost.fetched_s in (0.0, pytest.approx(1.0))


def test_a_disk_known_to_be_slower_than_computing_is_left_alone() -> None:
    fleet, prompt = make_fleet(1), tokens(640)
    snapshot(fleet, "r0", disk=chunks(prompt))
    assert place(fleet, prompt).prefetch_keys == tuple(chunks(prompt))
    tier = TierInfo(capacity_bytes=1, used_bytes=0, read_bytes_per_s=1e4)
    fleet.apply_info("r0", info("r0", tiers={"disk": tier}))
    decision = place(fleet, prompt)
    assert decision.prefetch_keys == ()
    assert decision.predicted_ttft_s == pytest.approx(0.65, rel=0.05)


def test_requests_without_a_prompt_go_to_the_least_loaded() -> None:
    fleet = make_fleet(2)
    fleet.start(place(fleet, tokens(640)), 0.0)
    busy = next(each.id for each in fleet.replicas.values() if each.in_flight)
    assert place(fleet, None).replica_id != busy


@pytest.mark.parametrize("policy", ["longest-prefix", "session", "least-loaded", "round-robin"])
def test_every_policy_places(policy: PolicyName) -> None:
    fleet = make_fleet(3, policy=policy)
    for number in range(6):
        ticket = fleet.start(place(fleet, tokens(64, start=number * 100), session="s"), 0.0)
        ticket.finish(0.0, ok=True)
    assert sum(each.in_flight for each in fleet.replicas.values()) == 0


def test_replicas_that_swap_names_are_still_told_apart() -> None:
    """The health checks know a replica by its configured name, whatever agents call it."""
    configured = tuple(
        ReplicaConfig(url=f"http://host:{port}", agent_url=f"http://host:{port + 1000}")
        for port in (8000, 8001)
    )
    fleet = Fleet(RouterConfig(replicas=configured))
    first, second = fleet.replicas.values()
    fleet.apply_info(first.id, info("a"))
    fleet.apply_info(second.id, info("b"))
    fleet.apply_info("a", info("c", incarnation="two"))
    fleet.apply_info("b", info("a", incarnation="two"))
    assert (first.id, second.id) == ("c", "a")
    assert fleet.replicas[configured[0].name] is first
    assert fleet.replicas[configured[1].name] is second


def test_the_index_grows_with_the_fleet_unless_its_size_is_given() -> None:
    def fleet(count: int, **index: int) -> Fleet:
        replicas = tuple(ReplicaConfig(url=f"http://{each}") for each in range(count))
        return Fleet(RouterConfig(replicas=replicas, index=IndexConfig(**index)))

    assert fleet(2).index.max_keys == 4_000_000
    large = fleet(200)
    assert large.index.max_keys == 10_000_000
    large.add(ReplicaConfig(url="http://new"))
    assert large.index.max_keys == 10_050_000
    assert fleet(200, max_keys=5).index.max_keys == 5


def test_what_a_request_uses_is_evicted_last() -> None:
    fleet, first, second = make_fleet(1), tokens(320), tokens(640, start=10_000)
    for prompt in (first, second):
        stored(fleet, "r0", KvTier.GPU, blocks(prompt))
    held = sum(fleet.index.held(fleet.replicas["r0"].slot).values())
    fleet.start(place(fleet, first), 0.0)
    fleet.index.max_keys = held
    stored(fleet, "r0", KvTier.GPU, blocks(tokens(BLOCK, start=50_000)))
    slot = fleet.replicas["r0"].slot
    found = [fleet.index.match(slot, blocks(each)).gpu_blocks for each in (first, second)]
    assert found == [320 // BLOCK, 640 // BLOCK - 1]


def answered(fleet: Fleet, prompt: GivenPrompt, now_s: float, cached: int | None = None) -> str:
    """Send a prompt, have it answered a second later; return where it went."""
    decision = place(fleet, prompt, now_s)
    ticket = fleet.start(decision, now_s)
    ticket.first_byte(now_s + 0.5)
    ticket.finish(now_s + 1, ok=True, cached_tokens=cached)
    return decision.replica_id


def test_history_stands_in_for_events_that_do_not_come() -> None:
    """Followed, and mute: what was sent is known for the history's time, and it is a fault."""
    fleet, prompts = make_fleet(), [tokens(640, start=1000 * at) for at in range(20)]
    for name in fleet.replicas:
        fleet.following_kv(name)
    homes = [answered(fleet, each, 0.0) for each in prompts]
    fleet.tick(300.0)
    for prompt, home in zip(prompts, homes, strict=True):
        decision = place(fleet, prompt, 300.0)
        assert (decision.replica_id, decision.matched_tokens) == (home, {KvTier.GPU: 640})
    for name in homes:
        assert "no KV event came" in (fleet.replicas[name].events_fault() or "")
    fleet.tick(700.0)
    assert place(fleet, prompts[0], 700.0).matched_tokens == {}
    (event,) = [BlocksStored(KvTier.GPU, blocks(prompts[0]))]
    fleet.apply_kv(homes[0], KvBatch(0, 0.0, [event]), 700.0)
    assert fleet.replicas[homes[0]].events_fault() is None
    fleet.index.check()


def test_what_is_answered_after_the_events_were_lost_is_known() -> None:
    fleet, prompt = make_fleet(1), tokens(640)
    fleet.following_kv("r0")
    ticket = fleet.start(place(fleet, prompt), 0.0)
    ticket.first_byte(0.5)
    fleet.lost_kv("r0")
    assert place(fleet, prompt, 1.0).matched_tokens == {}
    ticket.finish(2.0, ok=True)
    assert place(fleet, prompt, 300.0).matched_tokens == {KvTier.GPU: 640}
    assert fleet.replicas["r0"].untold == 0
    fleet.index.check()


def test_events_that_come_or_need_not_come_are_no_fault() -> None:
    fleet, prompts = make_fleet(1), [tokens(640, start=1000 * at) for at in range(20)]
    fleet.following_kv("r0")
    for at, prompt in enumerate(prompts):
        decision = place(fleet, prompt, float(at))
        ticket = fleet.start(decision, float(at))
        event = BlocksStored(KvTier.GPU, blocks(prompt))
        fleet.apply_kv("r0", KvBatch(at, 0.0, [event]), at + 0.5)
        ticket.first_byte(at + 0.5)
        ticket.finish(at + 0.6, ok=True)
        answered(fleet, prompt, at + 0.7)  # it is known to be there
    for at in range(20):  # it was there, though not known
        answered(fleet, tokens(640, start=100_000 + 1000 * at), 30.0, cached=624)
    assert fleet.replicas["r0"].events_fault() is None


def test_data_parallel_ranks_behind_one_url_are_a_fault() -> None:
    fleet = make_fleet(1)
    fleet.following_kv("r0")
    fleet.set_ranks("r0", 1)
    assert fleet.replicas["r0"].events_fault() is None
    fleet.set_ranks("r0", 2)
    assert "2 data-parallel ranks" in (fleet.replicas["r0"].events_fault() or "")
