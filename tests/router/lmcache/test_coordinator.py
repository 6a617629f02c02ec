"""The stand-in coordinator: what the fleet knows after registrations, events, gaps, restarts."""

from typing import Any

import pytest

from router.config.settings import RatesConfig, ReplicaConfig, RouterConfig
from router.fleet.fleet import Fleet
from router.index.kv_events import BlocksStored, FirstBlocks, KvBatch
from router.index.prompt_keys import KvTier
from router.lmcache.coordinator import MAX_SERVERS, Coordinator, LiveServer, RegisteredServers
from router.lmcache.coordinator_protocol import ServerRegistration
from tests.router.fleet.helpers import SCHEME, blocks, info, place, snapshot
from tests.router.lmcache.helpers import (
    CHUNK,
    batch,
    coordinator_of,
    key,
    make_fleet,
    register,
    transcript_batches,
    transcript_tokens,
)
from tests.router.prompt.prompts_given import GivenPrompt, tokens
from warmroute_common.api_errors import OverloadedError
from warmroute_common.keys import chunk_keys


def matched(fleet: Fleet, prompt: GivenPrompt | None = None) -> dict[str, dict[str, int]]:
    """Return what each replica is known to hold of a prompt, by tier."""
    fleet.index.check()
    decision = place(fleet, prompt or tokens(4 * CHUNK))
    return {
        each.replica_id: {str(tier): count for tier, count in each.matched_tokens.items()}
        for each in decision.candidates
    }


def two_tied() -> tuple[Fleet, Coordinator]:
    fleet = make_fleet()
    return fleet, coordinator_of(fleet, r0="mp0", r1="mp1")


def test_a_real_servers_events_lead_its_prompt_to_its_replica() -> None:
    fleet, coordinator = two_tied()
    answer = coordinator.apply(transcript_batches())
    assert answer == {"applied": 11, "duplicates": 0, "stale": 0}
    assert matched(fleet, GivenPrompt(transcript_tokens())) == {"r0": {"cpu": 512}, "r1": {}}
    assert fleet.replicas["r0"].kv_bytes_per_token == 8192


def test_tiers_are_distinguished_and_slow_chunks_are_prefetched() -> None:
    fleet, coordinator = two_tied()
    coordinator.apply([batch(1, keys=[key(0)]), batch(2, tier="l2", keys=[key(0), key(1), key(2)])])
    assert matched(fleet) == {"r0": {"cpu": 256, "disk": 512}, "r1": {}}
    decision = place(fleet, tokens(4 * CHUNK))
    assert decision.prefetch_keys == (key(1).chunk_hash, key(2).chunk_hash)
    coordinator.apply([batch(3, "delete", "l2", [key(1)])])
    assert matched(fleet)["r0"] == {"cpu": 256}


def test_gpu_blocks_come_before_lmcaches_chunks() -> None:
    fleet, coordinator = two_tied()
    prompt = tokens(4 * CHUNK)
    first = FirstBlocks(blocks(prompt)[:24], list(range(384)), 16)
    stored = BlocksStored(KvTier.GPU, blocks(prompt)[:24])
    lmcaches = BlocksStored(KvTier.CPU, [1, 2, 3])
    fleet.apply_kv("r0", KvBatch(0, 0.0, [first, stored, lmcaches]), 0.0)
    coordinator.apply([batch(1, keys=[key(0)]), batch(2, tier="l2", keys=[key(1), key(2)])])
    shape = fleet.replicas["r0"].key_shape
    assert shape is not None
    assert (shape.scheme, shape.block_tokens, shape.blocks_per_chunk) == (SCHEME, 16, 16)
    assert matched(fleet)["r0"] == {"gpu": 384, "disk": 384}
    assert fleet.index.held(fleet.replicas["r0"].slot)[KvTier.CPU] == 1, "KV events' are left out"


def test_two_replicas_may_share_a_server() -> None:
    fleet = make_fleet()
    coordinator = coordinator_of(fleet, r0="mp0", r1="mp0")
    coordinator.apply([batch(1, keys=[key(0)])])
    assert matched(fleet) == {"r0": {"cpu": 256}, "r1": {"cpu": 256}}


def test_a_shared_backend_counts_for_every_replica_whose_server_reaches_it() -> None:
    fleet = make_fleet(3)
    coordinator = coordinator_of(fleet, r0="mp0", r1="mp1", r2="mp2")
    shared: dict[str, Any] = {"backend": "s3", "shared": True}
    coordinator.apply(
        [
            batch(1, "config", "l2", **shared),
            batch(1, "config", "l2", instance_id="mp1", **shared),
            batch(2, tier="l2", keys=[key(0)], **shared),
        ]
    )
    assert matched(fleet) == {"r0": {"remote": 256}, "r1": {"remote": 256}, "r2": {}}
    coordinator.apply([batch(1, "config", "l2", instance_id="mp2", **shared)])
    assert matched(fleet)["r2"] == {"remote": 256}
    coordinator.apply([batch(2, "delete", "l2", [key(0)], instance_id="mp2", **shared)])
    assert matched(fleet) == {"r0": {}, "r1": {}, "r2": {}}


def test_a_shared_backend_is_one_holder_whatever_the_number_of_replicas() -> None:
    """Its keys were noted once for each replica: a fleet's index was full of one store's."""
    fleet = make_fleet(20)
    names = {f"r{number}": f"mp{number}" for number in range(20)}
    coordinator = coordinator_of(fleet, **names)
    shared: dict[str, Any] = {"backend": "s3", "shared": True}
    for name in list(names.values())[:10]:
        coordinator.apply([batch(1, "config", "l2", instance_id=name, **shared)])
    keys = [key(0), key(1), key(2)]
    coordinator.apply([batch(2, keys=keys[:1]), batch(3, tier="l2", keys=keys, **shared)])
    assert len(fleet.index) == 4

    def held_by(name: str) -> dict[str, int]:
        fleet.index.check()
        matched = place(fleet, tokens(4 * CHUNK), among=(name,)).matched_tokens
        return {str(tier): count for tier, count in matched.items()}

    assert held_by("r0") == {"cpu": 256, "remote": 512}
    assert held_by("r1") == held_by("r2") == held_by("r9") == {"remote": 768}
    assert held_by("r10") == {}
    coordinator.deregister("mp1")
    assert (held_by("r1"), held_by("r9")) == ({}, {"remote": 768})
    coordinator.replica_servers.left("r2")
    fleet.remove("r2")
    for now_s in (0.0, 1000.0):
        fleet.tick(now_s)
    assert fleet.add(ReplicaConfig(url="http://new:8000")).slot == 2
    fleet.replicas.check()
    assert held_by("new:8000") == {}


def test_a_shared_backends_models_are_distinguished() -> None:
    """Its keys do not say of which model a chunk is."""
    fleet = make_fleet()
    coordinator = coordinator_of(fleet, r0="mp0", r1="mp1")
    servers = coordinator.replica_servers
    shared: dict[str, Any] = {"backend": "s3", "shared": True}
    for name in ("mp0", "mp1"):
        coordinator.apply([batch(1, "config", "l2", instance_id=name, **shared)])
    coordinator.apply([batch(2, tier="l2", keys=[key(0, model="a"), key(1, model="a")], **shared)])
    coordinator.apply([batch(3, tier="l2", keys=[key(0, model="b")], **shared)])
    assert matched(fleet) == {"r0": {"remote": 512}, "r1": {"remote": 512}}, "models not known yet"
    for name, root in (("r0", "a"), ("r1", "b")):
        fleet.set_models(name, {"m": None}, [root])
        server = servers.server_of(name)
        servers.assign(name, server)
    assert matched(fleet) == {"r0": {"remote": 512}, "r1": {"remote": 256}}


def test_salts_models_ranks_and_groups_are_distinguished() -> None:
    fleet, coordinator = two_tied()
    fleet.set_models("r0", {}, ["models/small"])
    coordinator.apply(
        [
            batch(1, keys=[key(0, salt="tenant"), key(1, salt="tenant")]),
            batch(2, keys=[key(0, model="another")]),
            batch(3, keys=[key(0, rank=1, world=2), key(0)._replace(object_group_id=1)]),
        ]
    )
    assert matched(fleet) == {"r0": {}, "r1": {}}
    salted = GivenPrompt(range(4 * CHUNK), cache_salt="tenant")
    assert matched(fleet, salted) == {"r0": {"cpu": 512}, "r1": {}}


def test_a_model_that_a_replica_turns_out_to_have_counts_from_then_on() -> None:
    fleet, coordinator = two_tied()
    fleet.set_models("r0", {}, ["old"])
    coordinator.apply([batch(1, keys=[key(0)])])
    assert matched(fleet)["r0"] == {}
    fleet.set_models("r0", {}, ["models/small"])
    coordinator.replica_servers.assign("r0", coordinator.replica_servers.server_of("r0"))
    assert matched(fleet)["r0"] == {"cpu": 256}


def test_duplicate_and_stale_batches_change_nothing() -> None:
    fleet, coordinator = two_tied()
    coordinator.apply([batch(1, keys=[key(0)])])
    late = [batch(1, keys=[key(1)]), batch(7, keys=[key(1)], incarnation=99)]
    assert coordinator.apply(late) == {"applied": 0, "duplicates": 1, "stale": 1}
    assert matched(fleet)["r0"] == {"cpu": 256}
    assert coordinator.counts == {"applied": 1, "duplicates": 1, "stale": 1}


def test_a_restarted_server_has_an_empty_l1_and_its_l2() -> None:
    fleet, coordinator = two_tied()
    coordinator.apply([batch(1, keys=[key(0)]), batch(2, tier="l2", keys=[key(0)])])
    coordinator.apply([batch(1, "config", incarnation=101)])
    assert matched(fleet)["r0"] == {"disk": 256}
    coordinator.apply([batch(2, "delete", "l2", [key(0)], incarnation=101)])
    assert matched(fleet)["r0"] == {}


def test_after_a_gap_l1_is_uncertain_until_an_event_or_an_answer_says_more() -> None:
    fleet, coordinator = two_tied()
    coordinator.apply([batch(1, keys=[key(0), key(1)])])
    coordinator.apply([batch(3, "access", keys=[key(0)], backend="")])
    assert matched(fleet)["r0"] == {"cpu": 256, "disk": 256}
    assert coordinator.counts["gaps"] == 1
    coordinator.refuted("r0", [key(1)])
    assert matched(fleet)["r0"] == {"cpu": 256}


def test_events_of_an_unknown_server_change_nothing() -> None:
    fleet, coordinator = two_tied()
    stray = batch(1, keys=[key(0)], instance_id="stranger")
    assert coordinator.apply([stray]) == {"applied": 0, "duplicates": 0, "stale": 0}
    assert (matched(fleet)["r0"], coordinator.counts) == ({}, {"unknown": 1})
    coordinator.expect("stranger")  # the server of a replica's that has yet to register here
    assert coordinator.apply([stray])["applied"] == 1


def test_a_server_that_leaves_or_falls_silent_loses_its_l1() -> None:
    fleet, coordinator = two_tied()
    coordinator.apply([batch(1, keys=[key(0)])])
    coordinator.expire(now_s=29.0)
    assert matched(fleet)["r0"] == {"cpu": 256}
    assert coordinator.servers.heartbeat("mp1", now_s=29.0)
    coordinator.expire(now_s=31.0)
    assert matched(fleet)["r0"] == {}
    assert not coordinator.servers.heartbeat("mp0", now_s=31.0), "it has to register anew"
    assert coordinator.counts["silent"] == 1
    register(coordinator)
    assert coordinator.apply([batch(9, keys=[key(0)])])["applied"] == 1


def test_a_replica_whose_server_does_not_answer_holds_nothing_until_it_does() -> None:
    fleet, coordinator = two_tied()
    coordinator.apply([batch(1, keys=[key(0)])])
    coordinator.replica_servers.assign("r0", None)
    assert matched(fleet)["r0"] == {}
    assert not fleet.replicas["r0"].can_prefetch
    coordinator.apply([batch(2, tier="l2", keys=[key(1)])])
    coordinator.replica_servers.assign(
        "r0", LiveServer(url="http://host0:8210", instance_id="mp0", chunk_tokens=CHUNK)
    )
    assert matched(fleet)["r0"] == {"cpu": 256, "disk": 256}


def test_the_number_of_servers_is_limited() -> None:
    servers, registration = RegisteredServers(), ServerRegistration(ip="a", http_port=1)
    for number in range(MAX_SERVERS):
        servers.register(f"mp{number}", registration, 0.0, 0.0)
    with pytest.raises(OverloadedError):
        servers.register("one-more", registration, 0.0, 0.0)
    assert servers.register("mp0", registration, 1.0, 0.0), "a known server may register again"
    assert "mp0" not in servers.silent(31.0)
    assert "mp1" in servers.silent(31.0)


def test_a_replica_that_leaves_loses_its_server_and_one_that_joins_is_indexed() -> None:
    fleet, coordinator = two_tied()
    coordinator.apply([batch(1, keys=[key(0)])])
    config = fleet.replicas["r0"].config
    coordinator.replica_servers.left("r0")
    fleet.remove("r0")
    coordinator.apply([batch(2, tier="l2", keys=[key(1)])])
    assert coordinator.replica_servers.server_of("r0") is None
    fleet.add(config)
    fleet.up("r0")
    assert not fleet.replicas["r0"].can_prefetch
    assert matched(fleet)["r0"] == {}
    coordinator.replica_servers.assign(
        "r0", LiveServer(url="http://host0:8210", instance_id="mp0", chunk_tokens=CHUNK)
    )
    assert matched(fleet)["r0"] == {"cpu": 256, "disk": 256}


@pytest.mark.parametrize("name", ["mp0", "r0"])
def test_a_replica_is_known_by_its_name_whatever_its_server_is_called(name: str) -> None:
    fleet = make_fleet()
    coordinator = coordinator_of(fleet, r0=name)
    coordinator.apply([batch(1, keys=[key(0)], instance_id=name)])
    assert coordinator.replica_servers.model_of("r0") == ("models/small", 1)
    assert coordinator.replica_servers.model_of("r1") is None


def test_a_server_that_is_killed_and_comes_back_has_its_l2() -> None:
    fleet, coordinator = two_tied()
    coordinator.apply([batch(1, keys=[key(0)]), batch(2, tier="l2", keys=[key(0)])])
    coordinator.replica_servers.assign("r0", None)
    coordinator.lost("mp0")
    assert matched(fleet)["r0"] == {}
    coordinator.replica_servers.assign(
        "r0", LiveServer(url="http://host0:8210", instance_id="mp0", chunk_tokens=CHUNK)
    )
    assert matched(fleet)["r0"] == {"disk": 256}, "before its first event tells that its L1 is gone"
    coordinator.expire(now_s=31.0)
    register(coordinator)
    coordinator.apply([batch(1, "config", incarnation=101)])
    assert matched(fleet)["r0"] == {"disk": 256}


def test_one_decision_over_our_engine_lmcache_and_neither() -> None:
    """Chunks of 512 tokens in ours, of 256 in LMCache's; the third tells nothing."""
    urls: dict[str, dict[str, Any]] = {
        "r0": {"agent_url": "http://host0:9"},
        "r1": {"lmcache": "http://host1:9"},
        "r2": {},
    }
    config = RouterConfig(
        replicas=tuple(
            ReplicaConfig(url=f"http://{name}:8000", instance_id=name, **more)
            for name, more in urls.items()
        ),
        rates=RatesConfig(prefill_tokens_per_s=1000.0, kv_bytes_per_token=1000.0),
    )
    fleet, prompt = Fleet(config), tokens(8 * CHUNK)
    for name in urls:
        fleet.up(name)
    fleet.apply_info("r0", info("r0", chunk_tokens=512, chunk_bytes=512_000))
    coordinator = coordinator_of(fleet, r1="mp0")

    def best() -> tuple[str, dict[KvTier, int]]:
        decision = place(fleet, prompt)
        return decision.replica_id, dict(decision.matched_tokens)

    snapshot(fleet, "r0", cpu=chunk_keys(prompt.chain(SCHEME, 16), 32)[:1])
    coordinator.apply([batch(1, keys=[key(0), key(1), key(2)])])
    assert best() == ("r1", {KvTier.CPU: 768})
    snapshot(fleet, "r0", cpu=chunk_keys(prompt.chain(SCHEME, 16), 32)[:2])
    assert best() == ("r0", {KvTier.CPU: 1024})
    coordinator.apply([batch(2, tier="l2", keys=[key(n) for n in range(8)])])
    assert best() == ("r1", {KvTier.CPU: 768, KvTier.DISK: 1280})
    fleet.down("r1")
    assert best()[0] == "r0"
    fleet.down("r0")
    assert best()[0] == "r2"


def test_names_that_servers_invent_are_bounded() -> None:
    fleet, coordinator = two_tied()
    for seq in range(1, 200):
        shared: dict[str, Any] = {"backend": f"b{seq}", "shared": True}
        coordinator.apply([batch(seq, "config", "l2", **shared)])
        coordinator.apply([batch(seq, "store", "l2", [key(0)], instance_id="mp1", **shared)])
    assert matched(fleet) == {"r0": {"remote": 256}, "r1": {"remote": 256}}
    assert len(coordinator.replica_servers._mounts) == 64
    models = [key(0, model=f"m{number}") for number in range(1000)]
    coordinator.apply([batch(200, "store", "l2", models, backend="b1", shared=True)])
    assert fleet.replicas.take_slot() == 2 + 256, "stores take no more slots than that"


def test_only_l2_of_servers_that_have_left_is_kept() -> None:
    _, coordinator = two_tied()
    shared: dict[str, Any] = {"backend": "s3", "shared": True}
    for number in range(3):
        name = f"mp-{number}"
        coordinator.expect(name)
        coordinator.apply([batch(1, keys=[key(0)], instance_id=name)])
        coordinator.apply([batch(2, tier="l2", keys=[key(0)], instance_id=name, **shared)])
        coordinator.deregister(name)
    assert coordinator.apply([batch(3, instance_id="mp-0")])["applied"] == 0
    assert coordinator.replica_servers._mounts == {}
    assert len(coordinator.directory) == 1
    coordinator.directory.check()
