"""The state that the page shows, of fleets put together here."""

from typing import Any

import orjson
import pytest

from router.fleet.decision import Reason
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.index.prompt_keys import KvTier
from router.ui.page import state
from router.ui.recent import SLICE_S, Recent
from tests.router.fleet.helpers import (
    blocks,
    chunks,
    fail_at,
    in_cpu_ram,
    info,
    make_fleet,
    place,
    snapshot,
    stored,
)
from tests.router.prompt.prompts_given import text, tokens
from tests.router.ui.recording import ended, matched
from warmroute_common.agent_protocol import TierInfo


def shown(fleet: Fleet, recent: Recent | None = None, *, now_s: float = 0.0) -> dict[str, Any]:
    made = state(fleet, recent or Recent(0.0), waiting=3, now_s=now_s, wall_s=1e9 + now_s)
    orjson.dumps(made)
    return made


def phases(replica: dict[str, Any]) -> tuple[int, int, int, int]:
    return tuple(replica[each] for each in ("queued", "fetching", "prefilling", "decoding"))


def test_requests_in_flight_are_counted_by_phase() -> None:
    fleet = make_fleet(1)
    on_disk = tokens(6400, start=50_000)
    snapshot(fleet, "r0", disk=chunks(on_disk))
    fetched = fleet.start(place(fleet, on_disk), 0.0)
    first, second = (fleet.start(place(fleet, tokens(1000)), 0.0) for _ in range(2))
    assert phases(shown(fleet)["replicas"][0]) == (1, 1, 1, 0)
    first.first_byte(0.5)
    assert phases(shown(fleet)["replicas"][0]) == (0, 1, 1, 1)
    fetched.sent(0.6)
    assert phases(shown(fleet)["replicas"][0]) == (1, 0, 1, 1)
    for each in (fetched, first, second):
        each.finish(1.0, ok=True)
    made = shown(fleet)
    assert phases(made["replicas"][0]) == (0, 0, 0, 0)
    assert (made["totals"]["in_flight"], made["totals"]["waiting"]) == (0, 3)


def test_a_fetch_that_is_given_up_is_over() -> None:
    fleet = make_fleet(1)
    prompt = tokens(6400)
    snapshot(fleet, "r0", disk=chunks(prompt))
    ticket = fleet.start(place(fleet, prompt), 0.0)
    assert phases(shown(fleet)["replicas"][0]) == (0, 1, 0, 0)
    ticket.finish(0.1, ok=False)
    assert phases(shown(fleet)["replicas"][0]) == (0, 0, 0, 0)


def test_a_tier_is_as_full_as_what_is_known_to_be_there() -> None:
    fleet, prompt = make_fleet(1), tokens(6400)
    in_cpu_ram(fleet, prompt)
    replica = fleet.replicas["r0"]
    block_tokens, chunk_tokens = _sizes(replica)
    stored(fleet, "r0", KvTier.GPU, blocks(prompt))
    fleet.set_kv_capacity("r0", 12_800)
    replica.capacity_bytes = {"cpu": int(25_600 * replica.kv_bytes_per_token)}
    told = shown(fleet)["replicas"][0]
    gpu, cpu, disk = (told["tiers"][tier] for tier in ("gpu", "cpu", "disk"))
    assert gpu == {
        "keys": 6400 // block_tokens,
        "tokens": 6400,
        "capacity_tokens": 12_800,
        "full": 0.5,
    }
    assert cpu["keys"] == 6400 // chunk_tokens
    assert cpu["full"] == pytest.approx(0.25, rel=0.01)
    assert disk == {"keys": 0, "tokens": 0, "capacity_tokens": None, "full": None}
    assert told["told_by"] == ["KV events", "agent"]


def _sizes(replica: Replica) -> tuple[int, int]:
    shape = replica.key_shape
    assert shape is not None
    return shape.block_tokens, shape.chunk_tokens


def test_an_agents_capacities_are_shown() -> None:
    fleet = make_fleet(1)
    tiers = {"cpu": TierInfo(capacity_bytes=10**9, used_bytes=0)}
    fleet.apply_info("r0", info("r0", tiers=tiers))
    replica = fleet.replicas["r0"]
    told = shown(fleet)["replicas"][0]["tiers"]["cpu"]
    assert told["capacity_tokens"] == int(10**9 / replica.kv_bytes_per_token)
    assert told["full"] == 0.0


def test_of_a_replica_that_tells_nothing_what_it_was_sent_is_shown() -> None:
    fleet = make_fleet(1, agents=False)
    fleet.start(place(fleet, text(5000)), 0.0)
    told = shown(fleet)["replicas"][0]
    assert told["believed_keys"] > 0
    assert told["tiers"]["gpu"]["full"] is None
    assert told["told_by"] == []


def test_homes_are_counted_by_replica() -> None:
    fleet = make_fleet(2)
    for name, replica in (("a", "r0"), ("b", "r1"), ("c", "r1")):
        fleet.sessions.note(name, fleet.replicas[replica].serial, 0.0)
    made = shown(fleet)
    assert [each["homes"] for each in made["replicas"]] == [1, 2]
    assert made["sessions"]["count"] == 3


def test_warmth_requests_and_spills_come_from_the_records() -> None:
    fleet, recent = make_fleet(2), Recent(0.0)
    recent.observe(
        ended(
            20.0,
            replica_id="r0",
            matched_tokens=matched(gpu=40, cpu=10),
            predicted_ttft_s=0.2,
            held_s=0.1,
        )
    )
    recent.observe(ended(25.0, replica_id="r1", home="r0", reason=Reason.SESSION_SPILL))
    made = shown(fleet, recent, now_s=30.0)
    assert [each["warmth"] for each in made["replicas"]] == [0.5, 0.0]
    newest, oldest = made["requests"]
    assert (newest["number"], newest["replica"], newest["home"]) == (2, "r1", "r0")
    assert oldest["matched_tokens"] == {"gpu": 40, "cpu": 10, "disk": 0, "remote": 0}
    assert oldest["predicted_s"] == pytest.approx(0.3)
    assert oldest["ended"] == 1e9 + 20.0
    assert made["sessions"]["spills"] == made["sessions"]["turns"] == 1
    assert made["sessions"]["last_spills"] == [{"ended": 1e9 + 25.0, "home": "r0", "replica": "r1"}]
    (slice_,) = made["ttft"]["slices"]
    assert slice_["began"] == 1e9 + 2 * SLICE_S
    assert (slice_["cold"]["count"], slice_["warm"]["count"]) == (1, 1)


def test_what_keeps_requests_from_a_replica_is_said() -> None:
    fleet = make_fleet(3)
    fleet.down("r1", "it does not answer")
    fail_at(fleet, "r2")
    notes = [each["note"] for each in shown(fleet)["replicas"]]
    assert notes[:2] == [None, "it does not answer"]
    assert "requests in a row failed; it is tried again in" in notes[2]
