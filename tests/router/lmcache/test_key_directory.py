"""What is where, from events; checked against a model after each of many random batches."""

import random

import pytest

from router.index.prompt_keys import KvTier
from router.lmcache.coordinator_protocol import ObjectKey
from router.lmcache.key_directory import KeyDirectory, owner_of
from tests.router.lmcache.helpers import batch, key, transcript_batches, transcript_tokens


def tiers(directory: KeyDirectory, owner: str = "mp0") -> dict[ObjectKey, set[KvTier]]:
    directory.check()
    found: dict[ObjectKey, set[KvTier]] = {}
    for change in directory.held_by(owner):
        assert (change.owner, change.stored) == (owner, True)
        found.setdefault(change.key, set()).add(change.tier)
    return found


def test_a_real_servers_events_end_with_the_prompt_in_both_tiers() -> None:
    directory = KeyDirectory(100)
    for each in transcript_batches():
        directory.apply(each)
    found = tiers(directory)
    assert list(found.values()) == [{KvTier.CPU, KvTier.DISK}] * 2
    chunk = next(iter(found))
    first = directory.get(chunk)
    assert first.access_count == 8
    assert directory.token_ids(chunk.chunk_hash) == transcript_tokens()[:256]
    assert {at.backend: copy.size_bytes for at, copy in first.copies.items()} == {
        "dram": 2097152,
        "fs_native": 2097152,
    }


def test_tiers_come_and_go() -> None:
    directory, one = KeyDirectory(100), key(0)
    stored = directory.apply(batch(1, keys=[one]))
    assert [(each.tier, each.stored) for each in stored] == [(KvTier.CPU, True)]
    directory.apply(batch(2, tier="l2", keys=[one]))
    assert tiers(directory) == {one: {KvTier.CPU, KvTier.DISK}}
    gone = directory.apply(batch(3, "delete", keys=[one]))
    assert [(each.tier, each.stored) for each in gone] == [(KvTier.CPU, False)]
    assert tiers(directory) == {one: {KvTier.DISK}}
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
    assert tiers(directory, owner_of(told)) == {key(0): {tier}}


def test_a_key_stays_in_the_second_of_two_backends_of_one_tier() -> None:
    directory = KeyDirectory(100)
    for seq, backend in enumerate(("fs", "dax"), 1):
        directory.apply(batch(seq, tier="l2", keys=[key(0)], backend=backend))
    assert directory.apply(batch(3, "delete", "l2", [key(0)], backend="fs")) == []
    assert tiers(directory) == {key(0): {KvTier.DISK}}


def test_an_access_says_that_a_key_is_there() -> None:
    """After a restart of the router, most of what is used is learned so."""
    directory = KeyDirectory(100)
    directory.apply(batch(9, "access", keys=[key(0)], backend=""))
    directory.apply(batch(10, "access", "l2", keys=[key(1)]))
    assert tiers(directory) == {key(0): {KvTier.CPU}, key(1): {KvTier.DISK}}
    directory.apply(batch(11, "delete", keys=[key(0)]))
    assert tiers(directory) == {key(1): {KvTier.DISK}}


def test_a_server_that_ends_loses_its_l1_alone() -> None:
    directory = KeyDirectory(100)
    directory.apply(batch(1, keys=[key(0), key(1)]))
    directory.apply(batch(2, tier="l2", keys=[key(1)]))
    assert {each.key for each in directory.server_ended("mp0")} == {key(0), key(1)}
    assert tiers(directory) == {key(1): {KvTier.DISK}}


def test_what_may_have_been_deleted_counts_as_disk_until_it_is_confirmed_or_refuted() -> None:
    directory = KeyDirectory(100)
    directory.apply(batch(1, keys=[key(0), key(1)]))
    directory.events_missed("mp0")
    assert tiers(directory) == {key(0): {KvTier.DISK}, key(1): {KvTier.DISK}}
    directory.apply(batch(3, "access", keys=[key(0)], backend=""))
    directory.refute("mp0", [key(0), key(1), key(2)])
    assert tiers(directory) == {key(0): {KvTier.CPU}}


def test_beyond_the_limit_the_keys_that_were_used_first_go() -> None:
    directory = KeyDirectory(2)
    directory.apply(batch(1, keys=[key(0), key(1)]))
    directory.apply(batch(2, "access", keys=[key(0)], backend=""))
    changes = directory.apply(batch(3, keys=[key(2)]))
    assert [(each.key, each.stored) for each in changes] == [(key(2), True), (key(1), False)]
    assert list(tiers(directory)) == [key(0), key(2)]


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
            expected: dict[ObjectKey, set[KvTier]] = {}
            for who, where, one in model:
                if who == owner:
                    expected.setdefault(one, set()).add(
                        {"l1": KvTier.CPU, "l2": KvTier.DISK}[where]
                    )
            assert tiers(directory, owner) == expected, f"seed {seed}"
