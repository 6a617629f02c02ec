"""Decoding vLLM's KV events, mapping their media, ordering them, finding the hash scheme."""

from typing import Any

import msgspec
import pytest

from router.index.kv_events import (
    BlocksRemoved,
    BlocksStored,
    FirstBlocks,
    GpuCleared,
    GroupChanged,
    KvEventFormatError,
    KvEventReader,
    explains,
    find_shape,
    tier_of,
)
from router.index.prompt_keys import KvTier, PromptKeyCache
from tests.router.feeds.kv_publisher import payload, removed, stored
from tests.router.fleet.helpers import make_fleet, place
from tests.router.prompt.prompts_given import GivenPrompt
from warmroute_common.keys import HashScheme, key64, prompt_extra_keys


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [
        ("GPU", None, KvTier.GPU),
        (None, None, KvTier.GPU),  # before vLLM named media there was only the GPU
        ("CPU", None, KvTier.CPU),
        ("cpu", None, KvTier.CPU),
        ("STORAGE", "LOCAL", KvTier.DISK),
        ("STORAGE", None, KvTier.DISK),
        ("STORAGE", "REMOTE", KvTier.REMOTE),
        ("CXL", None, KvTier.REMOTE),
        ("GPU2", "LOCAL", KvTier.REMOTE),
    ],
)
def test_every_medium_is_mapped_and_an_unknown_one_is_the_slowest(
    medium: str | None, locality: str | None, tier: KvTier
) -> None:
    assert tier_of(medium, locality) is tier


def test_maps_are_read() -> None:
    reader = KvEventReader()
    body = payload(
        5.0,
        stored([1, 2**64 - 1], range(32)),
        removed([1]),
        stored([3], medium="STORAGE", locality="REMOTE"),
        {"type": "AllBlocksCleared"},
    )
    batch = reader.read(7, body)
    assert (batch.seq, batch.ts) == (7, 5.0)
    assert batch.events == [
        FirstBlocks([1, 2**64 - 1], list(range(32)), 16),
        BlocksStored(KvTier.GPU, [1, 2**64 - 1]),
        BlocksRemoved(KvTier.GPU, [1]),
        BlocksStored(KvTier.REMOTE, [3]),
        GpuCleared(),
    ]


def test_arrays_of_earlier_versions_are_read() -> None:
    reader = KvEventReader()
    body = payload(
        5.0,
        ["BlockStored", [1, 2], None, list(range(32)), 16, None, "GPU"],
        ["BlockRemoved", [1]],
        ["AllBlocksCleared"],
    )
    assert reader.read(0, body).events == [
        FirstBlocks([1, 2], list(range(32)), 16),
        BlocksStored(KvTier.GPU, [1, 2]),
        BlocksRemoved(KvTier.GPU, [1]),
        GpuCleared(),
    ]


def test_whole_digests_are_cut_to_64_bits() -> None:
    digest = bytes(range(32))
    batch = KvEventReader().read(0, payload(0.0, removed([digest])))
    assert batch.events == [BlocksRemoved(KvTier.GPU, [key64(digest)])]


def test_events_of_unknown_types_are_left_out() -> None:
    body = payload(0.0, {"type": "BlockAdmired", "stars": 5}, removed([1]), ["Other", 1])
    assert KvEventReader().read(0, body).events == [BlocksRemoved(KvTier.GPU, [1])]


def test_evicted_blocks_that_follow_each_other_in_a_tier_are_one_event() -> None:
    """vLLM reports each by itself."""
    body = payload(
        0.0,
        *(removed([1]), removed([2, 3]), removed([4], group_idx=1), removed([5], medium="CPU")),
        *(removed([6], medium="CPU"), stored([7]), removed([8]), {"type": "Other"}, removed([9])),
    )
    reader = KvEventReader()
    reader.read(0, payload(0.0, stored([1])))
    assert reader.read(1, body).events == [
        BlocksRemoved(KvTier.GPU, [1, 2, 3]),
        BlocksRemoved(KvTier.CPU, [5, 6]),
        BlocksStored(KvTier.GPU, [7]),
        BlocksRemoved(KvTier.GPU, [8, 9]),
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 1}),
        payload(0.0, {"type": "BlockRemoved", "block_hashes": "none"}),
        payload(0.0, {"type": "BlockStored"}),
    ],
)
def test_what_is_not_vllms_format_is_refused(body: bytes) -> None:
    with pytest.raises(KvEventFormatError, match="message 3"):
        KvEventReader().read(3, body)


def test_only_one_group_of_a_hybrid_model_is_followed() -> None:
    """Sliding-window layers drop blocks that a prefix hit still uses."""
    reader = KvEventReader()
    window: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    reader.shows_first = False
    batch = reader.read(
        0,
        payload(
            0.0,
            stored([1], **window),
            stored([1]),
            removed([1], group_idx=1),
            stored([2], **window),
        ),
    )
    assert batch.events == [
        BlocksStored(KvTier.GPU, [1]),
        GroupChanged(),
        BlocksStored(KvTier.GPU, [1]),
    ]
    assert reader.shows_first, "the other group's blocks have shown another scheme"


def _matched(*events: dict[str, Any]) -> tuple[dict[KvTier, int], dict[KvTier, int]]:
    """Apply a stock vLLM's events; return what is known of `TOKENS`, and all that is known."""
    fleet, reader = make_fleet(1, agents=False), KvEventReader()
    replica = fleet.replicas["r0"]
    for number, event in enumerate(events):
        fleet.apply_kv("r0", reader.read(number, payload(0.0, event)), 0.0)
        reader.shows_first = not replica.shape_checked
    matched = place(fleet, GivenPrompt(token_ids=TOKENS)).matched_tokens
    return dict(matched), {tier: n for tier, n in fleet.index.held(replica.slot).items() if n}


TOKENS = list(range(128))
KEYS = [key64(key) for key in HashScheme().chain(TOKENS, 16)]


def test_a_change_of_group_forgets_all_tiers_of_the_former_one() -> None:
    window: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    matched, held = _matched(
        stored(KEYS, TOKENS, **window),
        stored(KEYS, TOKENS, medium="CPU", **window),
        stored(KEYS[:4], TOKENS[:64], group_idx=1),
        removed(KEYS, medium="CPU", group_idx=0),
    )
    assert (matched, held) == ({KvTier.GPU: 64}, {KvTier.GPU: 4})


@pytest.mark.parametrize("kind", ["full_attention", "sliding_window"])
def test_a_placeholder_without_a_kind_decides_nothing(kind: str) -> None:
    """vLLM's OffloadingConnector publishes such ones for every group by default."""
    placeholder = stored([5], medium="CPU", group_idx=1) | {"kv_cache_spec_kind": None}
    matched, held = _matched(placeholder, stored(KEYS, TOKENS, kv_cache_spec_kind=kind))
    assert (matched, held) == ({KvTier.GPU: 128}, {KvTier.GPU: 8})


def test_placeholders_of_the_followed_group_are_noted() -> None:
    placeholder = stored(KEYS, medium="CPU") | {"kv_cache_spec_kind": None}
    _, held = _matched(placeholder, stored(KEYS[:4], TOKENS[:64]), placeholder)
    assert held == {KvTier.CPU: 8, KvTier.GPU: 4}


@pytest.mark.parametrize("is_reversed", [False, True])
def test_overlapping_chunks_that_are_announced_twice_are_counted(is_reversed: bool) -> None:
    """Chunks of vLLM's offloading overlap: a hash is gone when all of its chunks are."""
    chunks = [KEYS[0:4], KEYS[2:6]]
    first, second = reversed(chunks) if is_reversed else chunks
    announced = [stored(each, medium="CPU") for each in (first, second)]
    _, held = _matched(*announced, removed(first, medium="CPU"))
    assert held == {KvTier.CPU: 4}
    _, held = _matched(*announced, *(removed(each, medium="CPU") for each in chunks))
    assert held == {}


def test_a_part_of_a_block_does_not_show_the_blocks_size() -> None:
    """vLLM caches the end of a prompt under the key of its last whole hash."""
    part = stored(KEYS[:1], TOKENS[:16])
    whole = stored(KEYS[1::2], TOKENS)
    for events in ([part, whole], [whole, part], [part, whole, part]):
        matched, _ = _matched(*events)
        assert matched == {KvTier.GPU: 128}


def test_a_model_of_sliding_windows_alone_is_followed() -> None:
    window: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    batch = KvEventReader().read(0, payload(0.0, stored([1], **window), removed([1])))
    assert batch.events == [BlocksStored(KvTier.GPU, [1]), BlocksRemoved(KvTier.GPU, [1])]


@pytest.mark.parametrize(
    "more",
    [
        {"parent_block_hash": 9},
        {"lora_name": "adapter"},
        {"lora_id": 1, "extra_keys": [["adapter"]]},
        {"lora_name": "adapter", "extra_keys": [["adapter", "salt"]]},
        {"extra_keys": [[["image", 3]]]},
        {"extra_keys": [[["image", 3], "salt"]]},
        {"extra_keys": [[b"embeddings"]]},
        {"extra_keys": [["salt", b"embeddings"]]},
        {"token_ids": []},
        {"block_size": 0},
    ],
)
def test_only_plain_beginnings_show_the_scheme(more: dict[str, object]) -> None:
    event = stored([1], range(16)) | more
    batch = KvEventReader().read(0, payload(0.0, event))
    assert [type(each) for each in batch.events] == [BlocksStored]


def test_a_medium_further_on_hides_the_scheme() -> None:
    event = stored([1, 2], range(32)) | {"extra_keys": [None, [["image", -4]]]}
    batch = KvEventReader().read(0, payload(0.0, event))
    assert [type(each) for each in batch.events] == [BlocksStored]


@pytest.mark.parametrize("salt", [None, "pepper"])
def test_a_salted_beginning_shows_the_scheme_too(salt: str | None) -> None:
    """Where every tenant has a salt, no other beginnings come."""
    token_ids = list(range(64))
    _, first_extra = prompt_extra_keys(cache_salt=salt)
    keys = HashScheme("xxhash", "0").chain(token_ids, 16, first_extra_keys=first_extra)
    extra = [[salt] if salt else None, None, None, None]
    event = stored([key64(key) for key in keys], token_ids) | {"extra_keys": extra}
    first = KvEventReader().read(0, payload(0.0, event)).events[0]
    assert isinstance(first, FirstBlocks)
    assert first.cache_salt == salt
    shape = find_shape(first, None)
    assert shape is not None
    assert shape.scheme == HashScheme("xxhash", "0")
    other = FirstBlocks(first.keys, first.token_ids, 16, "other")
    assert not explains(shape, other)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_the_scheme_is_found(algorithm: str) -> None:
    token_ids = list(range(64))
    scheme = HashScheme(algorithm, "my seed")
    first = FirstBlocks([key64(key) for key in scheme.chain(token_ids, 16)], token_ids, 16)
    shape = find_shape(first, "my seed")
    assert shape is not None
    assert (shape.scheme, shape.block_tokens) == (scheme, 16)
    assert find_shape(first, None) is None


@pytest.mark.parametrize("hash_tokens", [16, 32, 80, 160])
def test_blocks_of_several_hashes_show_the_scheme(hash_tokens: int) -> None:
    """With several cache groups vLLM hashes by their common divisor, or by `prefix_match_unit`."""
    token_ids = list(range(480))
    step = 160 // hash_tokens
    keys = [key64(key) for key in HashScheme().chain(token_ids, hash_tokens)][step - 1 :: step]
    shape = find_shape(FirstBlocks(keys, token_ids, 160), None)
    assert shape is not None
    assert (shape.block_tokens, shape.hashes_per_block) == (160, step)
    assert list(PromptKeyCache(GivenPrompt(token_ids)).of(shape, {}).keys) == keys


def test_one_wrong_block_refutes_a_scheme() -> None:
    token_ids = list(range(64))
    keys = [key64(key) for key in HashScheme().chain(token_ids, 16)]
    keys[-1] ^= 1
    assert find_shape(FirstBlocks(keys, token_ids, 16), None) is None


@pytest.mark.parametrize(("parent", "key"), [(None, None), (7, 7), (bytes(31) + b"\x05", 5)])
def test_the_block_before_the_first_one_is_told(
    parent: int | bytes | None, key: int | None
) -> None:
    event = {**stored([8], range(16)), "parent_block_hash": parent}
    *_, found = KvEventReader().read(0, payload(0.0, event)).events
    assert isinstance(found, BlocksStored)
    assert found.parent == key
