"""A fleet whose replicas come and go at any time, with requests under way and keys noted."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.config.settings import ReplicaConfig, RouterConfig
from router.fleet.decision import Decision
from router.fleet.fleet import Fleet
from router.fleet.in_flight import Ticket
from router.fleet.replica import Replica, ReplicaState
from router.index.kv_events import BlocksStored, KvBatch
from router.index.prompt_keys import KvTier, keys64
from tests.router.fleet.helpers import BLOCK, blocks, info, make_fleet, place
from tests.router.prompt.prompts_given import tokens
from warmroute_common.agent_protocol import Snapshot, pack_keys
from warmroute_common.api_errors import NoReplicaError
from warmroute_common.keys import HashScheme

LONG_S = 1000.0


def config(number: int, **more: Any) -> ReplicaConfig:
    return ReplicaConfig(url=f"http://new:{number}", **more)


def joined(fleet: Fleet, number: int, **more: Any) -> Replica:
    replica = fleet.add(config(number, **more))
    fleet.up(replica.id)
    return replica


def test_a_replica_that_joined_is_picked() -> None:
    fleet = make_fleet(1)
    fleet.down("r0")
    joined(fleet, 1)
    assert place(fleet, tokens(100)).replica_id == "new:1"


def test_a_removed_replica_is_not_picked_and_its_requests_end_properly() -> None:
    fleet = make_fleet(2)
    first = place(fleet, tokens(100))
    ticket = fleet.start(first, 0.0)
    replica = fleet.replicas[first.replica_id]
    fleet.remove(replica.id)
    assert place(fleet, tokens(100), 1.0).picked.replica is not replica
    ticket.first_byte(1.0)
    ticket.finish(2.0, ok=True)
    assert replica.in_flight == 0
    fleet.index.check()


def test_a_fleet_without_replicas_has_none_to_offer() -> None:
    fleet = make_fleet(1)
    fleet.remove("r0")
    with pytest.raises(NoReplicaError, match="no replicas are registered"):
        place(fleet, tokens(100))
    joined(fleet, 1)
    assert place(fleet, tokens(100)).replica_id == "new:1"


def test_what_is_told_of_a_removed_replica_is_not_noted() -> None:
    fleet = make_fleet(2)
    slot = fleet.replicas["r0"].slot
    fleet.remove("r0")
    keys = blocks(tokens(128))
    batch = KvBatch(seq=0, ts=0.0, events=[BlocksStored(KvTier.GPU, keys)])
    fleet.apply_kv("r0", batch, 0.0)
    fleet.change_lower("r0", KvTier.DISK, keys, stored=True)
    tiers = {"disk": pack_keys(keys)}
    fleet.apply_snapshot("r0", Snapshot(incarnation="one", seq=0, tiers=tiers))
    assert sum(fleet.index.held(slot).values()) == 0


def test_its_slot_is_another_s_only_when_its_last_request_has_ended() -> None:
    fleet = make_fleet(2)
    decision = place(fleet, tokens(100), bound_to="r1")
    ticket = fleet.start(decision, 0.0)
    slot = fleet.replicas["r1"].slot
    fleet.remove("r1")
    for now_s in (0.0, LONG_S):
        fleet.tick(now_s)
    assert joined(fleet, 1).slot != slot
    ticket.finish(LONG_S, ok=False)
    fleet.tick(2 * LONG_S)
    assert joined(fleet, 2).slot == slot


def test_its_slot_is_another_s_only_when_the_index_has_no_bits_of_it() -> None:
    fleet = make_fleet(2)
    slot = fleet.replicas["r1"].slot
    many = list(range(25_000))
    fleet.change_lower("r1", KvTier.DISK, many, stored=True)
    fleet.remove("r1")
    fleet.tick(0.0)
    fleet.tick(LONG_S)
    assert joined(fleet, 1).slot != slot, "10,000 keys' bits are cleared in a tick"
    fleet.tick(LONG_S)
    replica = joined(fleet, 2)
    assert replica.slot == slot
    assert fleet.index.match(slot, many[:16]).blocks(1) == 0


def test_one_that_comes_back_begins_anew() -> None:
    """Even in the slot that it had: no session's home, nothing held, nothing under way."""
    fleet = make_fleet(1)
    joined(fleet, 1)
    prompt = tokens(200)
    decision = place(fleet, prompt, session="s", bound_to="new:1")
    fleet.start(decision, 0.0)
    assert place(fleet, prompt, 1.0, session="s").home == "new:1"
    fleet.remove("new:1")
    again = joined(fleet, 1)
    decision = place(fleet, prompt, 2.0, session="s")
    assert decision.home is None
    assert again.in_flight == 0
    assert all(not each.matched for each in decision.candidates)


def test_a_session_has_its_next_replica_for_its_home_at_once() -> None:
    fleet = make_fleet(2)
    fleet.start(place(fleet, tokens(200), session="s", bound_to="r0"), 0.0)
    fleet.remove("r0")
    fleet.start(place(fleet, tokens(200), 1.0, session="s"), 1.0)
    assert place(fleet, tokens(200), 2.0, session="s").home == "r1"


def test_a_newcomer_uses_what_others_have_measured() -> None:
    fleet = make_fleet(1)
    for now_s in range(0, 90, 10):
        ticket = fleet.start(place(fleet, tokens(1000, start=now_s), now_s), now_s)
        ticket.first_byte(now_s + 0.5)
        ticket.finish(now_s + 0.6, ok=True)
    new = joined(fleet, 1)
    fleet.tick(100.0)
    known = fleet.replicas["r0"].rates.cost(place(fleet, tokens(1000), 100.0).picked.work)
    assert new.rates.cost(place(fleet, tokens(1000), 100.0).picked.work) == known


def test_a_configured_name_is_taken_back_from_one_that_an_agent_gave() -> None:
    fleet = make_fleet(1)
    old = joined(fleet, 1)
    fleet.apply_info(old.id, info("named"))
    assert old.id == "named"
    new = fleet.add(config(2, instance_id="named"))
    assert (old.id, fleet.replicas["new:1"]) == ("new:1", old)
    assert fleet.replicas["named"] is new
    with pytest.raises(ValueError, match="already"):
        fleet.add(config(3, instance_id="named"))
    fleet.replicas.check()


def test_names_from_agents_are_given_up_one_after_the_other() -> None:
    fleet = make_fleet(0)
    first, second = joined(fleet, 1), joined(fleet, 2)
    fleet.apply_info(first.id, info("named"))
    fleet.apply_info(second.id, info("new:1"))
    third = fleet.add(config(3, instance_id="named"))
    assert [each.id for each in (first, second, third)] == ["new:1", "new:2", "named"]
    fleet.replicas.check()


def test_a_request_bound_to_a_removed_replica_is_told_so() -> None:
    fleet = make_fleet(2)
    fleet.remove("r0")
    with pytest.raises(NoReplicaError, match="r0"):
        place(fleet, tokens(100), bound_to="r0")
    for now_s in (0.0, LONG_S):
        fleet.tick(now_s)
    with pytest.raises(NoReplicaError, match="r0"):
        place(fleet, tokens(100), bound_to="r0")
    assert place(fleet, tokens(100), exclude=("r0",)).replica_id == "r1"


@dataclass(eq=False)
class Open:
    """A request under way."""

    ticket: Ticket
    replica: Replica


class ComingAndGoing(RuleBasedStateMachine):
    """The fleet against a model that knows what was done to each replica since it joined."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(RouterConfig(replicas=()))
        self.present: dict[int, Replica] = {}
        self.removed: list[Replica] = []
        self.open: list[Open] = []
        self.went: dict[str, set[Replica]] = {}
        self.held: dict[Replica, set[int]] = {}
        self.now_s = 0.0

    @rule(number=st.integers(0, 3), has_agent=st.booleans())
    def add(self, number: int, has_agent: bool) -> None:
        named = {"instance_id": "one"} if number == 3 else {}
        if number in self.present:
            with pytest.raises(ValueError, match="already"):
                self.fleet.add(config(number, **named))
            return
        agent_url = f"http://agent:{number}" if has_agent else None
        replica = self.present[number] = self.fleet.add(
            config(number, agent_url=agent_url, **named)
        )
        self.held[replica] = set()
        assert replica.state is ReplicaState.UNKNOWN
        assert replica.in_flight == 0

    @rule(number=st.integers(0, 3))
    def remove(self, number: int) -> None:
        if (replica := self.present.pop(number, None)) is not None:
            self.fleet.remove(replica.id)
            self.removed.append(replica)
            self.held[replica] = set()

    @rule(number=st.integers(0, 3), name=st.sampled_from(["one", "two", "new:0"]))
    def rename(self, number: int, name: str) -> None:
        """An agent tells its name."""
        replica = self.present.get(number)
        if replica is not None and self.fleet.apply_info(replica.id, info(name)):
            self.held[replica].clear()

    @rule(number=st.integers(0, 3), signal=st.sampled_from(["up", "down", "drain", "resume"]))
    def signal(self, number: int, signal: str) -> None:
        if (replica := self.present.get(number)) is not None:
            getattr(self.fleet, signal)(replica.id)
            if signal == "down" and not (replica.has_agent or replica.has_events):
                told = replica.event_tiers
                self.held[replica] = set() if len(told) > 1 else self.held[replica]

    @rule(number=st.integers(0, 3), start=st.integers(0, 3), stored=st.booleans())
    def lower_tier(self, number: int, start: int, stored: bool) -> None:
        """By the configured name of a replica that may have left, as LMCache does."""
        keys = keys64(tokens(64, start=start).chain(HashScheme(), BLOCK))
        name = f"new:{number}"
        if (replica := self.fleet.replicas.find(name)) is None:
            return
        self.fleet.change_lower(name, KvTier.DISK, keys, stored=stored)
        if not replica.is_removed:
            self.held[replica] |= set(keys) if stored else set()
            self.held[replica] -= set() if stored else set(keys)

    @rule(
        start=st.integers(0, 3),
        session=st.sampled_from([None, "a", "b"]),
        exclude=st.sets(st.integers(0, 3), max_size=1),
        streamed=st.booleans(),
    )
    def ask(self, start: int, session: str | None, exclude: set[int], streamed: bool) -> None:
        try:
            decision = self.place(start, session, exclude, streamed)
        except NoReplicaError:
            return
        replica = decision.picked.replica
        assert replica in self.present.values()
        assert {each.replica for each in decision.candidates} <= set(self.present.values())
        if decision.home is not None:
            assert session is not None
            assert self.fleet.replicas[decision.home] in self.went[session]
        if session is not None:
            self.went.setdefault(session, set()).add(replica)
        self.open.append(Open(self.fleet.start(decision, self.now_s), replica))

    def place(self, start: int, session: str | None, exclude: set[int], streamed: bool) -> Decision:
        return place(
            self.fleet,
            tokens(100, start=start),
            self.now_s,
            session=session,
            exclude=[f"new:{each}" for each in exclude],
            streamed=streamed,
        )

    @precondition(lambda self: self.open)
    @rule(data=st.data(), begins=st.booleans(), ok=st.booleans())
    def finish(self, data: st.DataObject, begins: bool, ok: bool) -> None:
        done = data.draw(st.sampled_from(self.open))
        if begins:
            done.ticket.first_byte(self.now_s)
        done.ticket.finish(self.now_s, ok=ok)
        self.open.remove(done)

    @rule(seconds=st.sampled_from([0.0, 0.5, 40.0, 700.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.fleet.tick(self.now_s)

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        self.fleet.replicas.check()
        self.fleet.index.check()
        self.fleet.sessions.check()
        assert set(self.fleet.replicas.values()) == set(self.present.values())

    @invariant()
    def requests_are_counted_where_they_are(self) -> None:
        for replica in (*self.present.values(), *self.removed):
            count = sum(each.replica is replica for each in self.open)
            assert replica.in_flight == count, replica

    @invariant()
    def each_holds_what_it_was_told_to_since_it_joined(self) -> None:
        for replica in self.present.values():
            held = self.fleet.index.held(replica.slot)
            assert held.get(KvTier.DISK, 0) == len(self.held[replica]), replica
            assert not held.get(KvTier.GPU)

    def teardown(self) -> None:
        for each in self.open:
            each.ticket.finish(self.now_s, ok=True)
        assert all(each.in_flight == 0 for each in (*self.present.values(), *self.removed))
        for replica in list(self.present.values()):
            self.fleet.remove(replica.id)
        for _ in range(3):
            self.now_s += LONG_S
            self.fleet.tick(self.now_s)
        self.fleet.index.expire(self.now_s)
        assert len(self.fleet.index) == 0
        assert self.fleet.add(config(9)).slot == 0
        assert self.fleet.replicas.find("new:0") is None


ComingAndGoing.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestComingAndGoing = ComingAndGoing.TestCase
