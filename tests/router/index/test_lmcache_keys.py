"""LMCache's keys, compared with the keys in a real server's events, and matching by them."""

import pytest

from router.index.lmcache_keys import LmcacheKeys, lmcache_chain, lmcache_key64
from router.index.prompt_keys import KeyShape, PromptKeyCache
from tests.router.lmcache.helpers import transcript_batches, transcript_tokens
from tests.router.prompt.prompts_given import GivenPrompt
from warmroute_common.keys import HashScheme


def test_the_keys_are_those_of_a_real_server() -> None:
    told = {entry.key.chunk_hash_hex for batch in transcript_batches() for entry in batch.entries}
    assert {each.hex() for each in lmcache_chain(transcript_tokens(), 256)[:2]} == told


def test_a_key_stands_for_all_tokens_up_to_its_end() -> None:
    whole = lmcache_chain(range(1000), 256)
    assert len(whole) == 3, "a tail has no key"
    assert lmcache_chain(range(600), 256) == whole[:2]
    assert lmcache_chain([1, *range(1, 1000)], 256)[1] != whole[1]
    assert lmcache_chain([], 256) == lmcache_chain(range(255), 256) == []


def test_tokens_that_no_model_has_give_no_keys() -> None:
    assert lmcache_chain([-1] * 256, 256) == lmcache_chain([1 << 32] * 256, 256) == []


def test_a_salt_gives_other_index_keys() -> None:
    digest = lmcache_chain(range(256), 256)[0]
    keys = {lmcache_key64(digest, salt) for salt in (None, "one", "two")}
    assert len(keys) == 3
    assert lmcache_key64(digest, "") == lmcache_key64(digest)


def test_blocks_have_vllms_keys_and_chunks_lmcaches() -> None:
    prompt = GivenPrompt(range(1000), cache_salt="tenant")
    shape = KeyShape(
        scheme=HashScheme(),
        block_tokens=128,
        blocks_per_chunk=2,
        lmcache=LmcacheKeys(chunk_tokens=256),
    )
    keys = PromptKeyCache(prompt).of(shape, {})
    digests = lmcache_chain(range(1000), 256)
    assert keys.chain == HashScheme().chain(range(1000), 128)
    assert keys.chunk_chain == digests
    assert keys.chunk_keys == [lmcache_key64(each, "tenant") for each in digests]
    assert (keys.token_ids, keys.cache_salt) == (range(1000), "tenant")


def test_where_vllm_tells_no_keys_chunks_stand_for_blocks() -> None:
    keys = PromptKeyCache(GivenPrompt(range(1000))).of(
        KeyShape(scheme=None, block_tokens=256, lmcache=LmcacheKeys(chunk_tokens=256)), {}
    )
    assert keys.keys == keys.chunk_keys == [lmcache_key64(each) for each in keys.chain]
    assert keys.block_tokens == keys.chunk_tokens == 256


@pytest.mark.parametrize(
    ("algorithm", "seed", "keys"),
    [
        ("builtin", "0", (7970422559658606851, 7457580275484333644)),
        ("builtin", "42", (-2839234038166191771, 901523477871014124)),
        ("sha256", None, (16896651239437850140, 13583269533160715605)),
        ("sha256", "0", (18207058901348288960, 10295771267258095012)),
        ("sha256_cbor", None, (1929637065022821361, 2201949488118219114)),
        ("sha256_cbor_64bit", "42", (5761807897051187880, 5859887647413313835)),
        ("xxhash", "0", (4333974122780979004, 2592831889684230360)),
    ],
)
def test_the_keys_are_those_of_lmcache_inside_vllm(
    algorithm: str, seed: str | None, keys: tuple[int, int]
) -> None:
    """What ``ChunkedTokenDatabase`` of lmcache 0.5.6 gave inside vLLM 0.32, by PYTHONHASHSEED."""
    chain = LmcacheKeys.inside(16, algorithm, seed).chain(range(40))
    assert [lmcache_key64(each) for each in chain] == [each % 2**64 for each in keys]


@pytest.mark.parametrize(
    ("algorithm", "seed"), [("builtin", None), ("builtin", "random"), ("xxhash_cbor", None)]
)
def test_keys_of_a_seed_that_a_process_keeps_for_itself_are_refused(
    algorithm: str, seed: str | None
) -> None:
    with pytest.raises(ValueError, match="PYTHONHASHSEED"):
        LmcacheKeys.inside(256, algorithm, seed)
