"""What is where, from events; checked against a model after each of many random batches."""

import random

import pytest

from router.index.lmcache_keys import lmcache_chain, lmcache_key64
from router.index.prompt_keys import KvTier
from router.lmcache.coordinator_protocol import ObjectKey, kv_rank
from router.lmcache.key_directory import KeyDirectory, owner_of
from tests.router.lmcache.helpers import (
    CHUNK,
    MODEL,
    batch,
    key,
    transcript_batches,
    transcript_tokens,
)


def key64(key: ObjectKey) -> int:
    return lmcache_key64(key.chunk_hash, key.cache_salt)


def tiers(directory: KeyDirectory, owner: str = "mp0") -> dict[int, set[KvTier]]:
    directory.check()
    found: dict[int, set[KvTier]] = {}
    for change in directory.held_by(owner):
        assert (change.owner, change.stored, change.model) == (owner, True, MODEL)
        found.setdefault(change.key, set()).add(change.tier)
    return found


def test_a_real_servers_events_end_with_the_prompt_in_both_tiers() -> None:
    directory = KeyDirectory(100)
    for each in transcript_batches():
        directory.apply(each)
    found = tiers(directory)
    first, second = lmcache_chain(transcript_tokens()[:512], CHUNK)
    both = {KvTier.CPU, KvTier.DISK}
    assert found == {lmcache_key64(first): both, lmcache_key64(second): both}
    key = ObjectKey(first, MODEL, kv_rank(1, 0))
    in_both = [("mp0", "l1", "dram"), ("mp0", "l2", "fs_native")]
    assert directory.placements(key) == in_both
    assert directory.placements(key._replace(object_group_id=3)) == in_both
    assert directory.placements(key._replace(kv_rank=kv_rank(2, 0))) == []


def test_of_the_ranks_and_groups_of_a_chunk_one_is_kept() -> None:
    """With eight ranks an eighth of the chunks filled the directory."""
    directory = KeyDirectory(100)
    ranks = [key(0, rank=rank, world=8) for rank in range(8)]
    groups = [each._replace(object_group_id=1) for each in ranks]
    directory.apply(batch(1, keys=[*ranks, *groups]))
    directory.apply(batch(2, "delete", keys=ranks[1:]))
    assert (len(directory), tiers(directory)) == (1, {key64(key(0)): {KvTier.CPU}})
    assert directory.placements(ranks[7]) == [("mp0", "l1", "dram")]


def test_backends_that_a_server_invents_are_bounded() -> None:
    directory = KeyDirectory(100)
    for number in range(100):
        told = batch(number + 1, tier="l2", keys=[key(number)], backend=f"b{number}")
        directory.apply(told)
    assert len(tiers(directory)) == 16
    for number in range(100):
        directory.apply(batch(101 + number, "delete", "l2", [key(number)], backend=f"b{number}"))
    assert (tiers(directory), len(directory)) == ({}, 0)


def test_tiers_come_and_go() -> None:
    directory, one = KeyDirectory(100), key(0)
    stored = directory.apply(batch(1, keys=[one]))
    assert [(each.tier, each.stored) for each in stored] == [(KvTier.CPU, True)]
    directory.apply(batch(2, tier="l2", keys=[one]))
    assert tiers(directory) == {key64(one): {KvTier.CPU, KvTier.DISK}}
    gone = directory.apply(batch(3, "delete", keys=[one]))
    assert [(each.tier, each.stored) for each in gone] == [(KvTier.CPU, False)]
    assert tiers(directory) == {key64(one): {KvTier.DISK}}
    directory.apply(batch(4, "delete", "l2", [one]))
    assert (tiers(directory), len(directory)) == ({}, 0)


@pytest.mark.parametrize(
    ("backend", "shared", "tier"),
    [
        ("fs", False, KvTier.DISK),
        ("fs", True, KvTier.REMOTE),
        ("s3", False, KvTier.REMOTE),
        ("something-new", False, KvTier.REMOTE),
    ],
)
def test_every_backend_has_a_tier(backend: str, shared: bool, tier: KvTier) -> None:
    directory, told = KeyDirectory(100), batch(1, tier="l2", keys=[key(0)], backend=backend)
    told = batch(1, tier="l2", keys=[key(0)], backend=backend, shared=shared)
    directory.apply(told)
    assert tiers(directory, owner_of(told)) == {key64(key(0)): {tier}}


def test_a_key_stays_in_the_second_of_two_backends_of_one_tier() -> None:
    directory = KeyDirectory(100)
    for seq, backend in enumerate(("fs", "dax"), 1):
        directory.apply(batch(seq, tier="l2", keys=[key(0)], backend=backend))
    assert directory.apply(batch(3, "delete", "l2", [key(0)], backend="fs")) == []
    assert tiers(directory) == {key64(key(0)): {KvTier.DISK}}


def test_an_access_says_that_a_key_is_there() -> None:
    """After a restart of the router, most of what is used is learned so."""
    directory = KeyDirectory(100)
    directory.apply(batch(9, "access", keys=[key(0)], backend=""))
    directory.apply(batch(10, "access", "l2", keys=[key(1)]))
    assert tiers(directory) == {key64(key(0)): {KvTier.CPU}, key64(key(1)): {KvTier.DISK}}
    directory.apply(batch(11, "delete", keys=[key(0)]))
    assert tiers(directory) == {key64(key(1)): {KvTier.DISK}}


def test_a_server_that_ends_loses_its_l1_alone() -> None:
    directory = KeyDirectory(100)
    directory.apply(batch(1, keys=[key(0), key(1)]))
    directory.apply(batch(2, tier="l2", keys=[key(1)]))
    assert {each.key for each in directory.server_ended("mp0")} == {key64(key(0)), key64(key(1))}
    assert tiers(directory) == {key64(key(1)): {KvTier.DISK}}


def test_what_may_have_been_deleted_counts_as_disk_until_it_is_confirmed_or_refuted() -> None:
    directory = KeyDirectory(100)
    directory.apply(batch(1, keys=[key(0), key(1)]))
    directory.events_missed("mp0")
    assert tiers(directory) == {key64(key(0)): {KvTier.DISK}, key64(key(1)): {KvTier.DISK}}
    directory.apply(batch(3, "access", keys=[key(0)], backend=""))
    directory.refute("mp0", [key(0), key(1), key(2)])
    assert tiers(directory) == {key64(key(0)): {KvTier.CPU}}


def test_beyond_the_limit_the_keys_that_were_used_first_go() -> None:
    directory = KeyDirectory(2)
    directory.apply(batch(1, keys=[key(0), key(1)]))
    directory.apply(batch(2, "access", keys=[key(0)], backend=""))
    changes = directory.apply(batch(3, keys=[key(2)]))
    stored, gone = key64(key(2)), key64(key(1))
    assert [(each.key, each.stored) for each in changes] == [(stored, True), (gone, False)]
    assert set(tiers(directory)) == {key64(key(0)), stored}
    assert directory.evicted == 1


def test_the_beginning_of_a_prompt_is_evicted_last() -> None:
    """Without it the rest is useless."""
    directory, prompt = KeyDirectory(8), [key(number) for number in range(8)]
    directory.apply(batch(1, keys=prompt[:5]))
    directory.apply(batch(2, keys=prompt[5:]))
    directory.apply(batch(3, "access", keys=prompt, backend=""))
    assert list(tiers(directory)) == [key64(each) for each in prompt], "in their order"
    other = [key(0, salt="other"), key(1, salt="other")]
    directory.apply(batch(4, keys=other))
    assert set(tiers(directory)) == {key64(each) for each in [*prompt[:6], *other]}


def test_random_events_leave_what_a_plain_set_would() -> None:
    seed = random.randrange(1 << 32)
    chance, directory = random.Random(seed), KeyDirectory(1000)
    model: set[tuple[str, str, ObjectKey]] = set()
    keys = [key(number) for number in range(8)]
    for seq in range(1, 400):
        name, tier = chance.choice(["mp0", "mp1"]), chance.choice(["l1", "l2"])
        some = chance.sample(keys, 3)
        match chance.choice(["store", "store", "delete", "fence"]):
            case "fence":
                directory.server_ended(name)
                model = {each for each in model if each[:2] != (name, "l1")}
                continue
            case kind:
                directory.apply(batch(seq, kind, tier, some, instance_id=name))
                changed = {(name, tier, each) for each in some}
                model = model | changed if kind == "store" else model - changed
        for owner in ("mp0", "mp1"):
            expected: dict[int, set[KvTier]] = {}
            for who, where, one in model:
                if who == owner:
                    expected.setdefault(key64(one), set()).add(
                        {"l1": KvTier.CPU, "l2": KvTier.DISK}[where]
                    )
            assert tiers(directory, owner) == expected, f"seed {seed}"
