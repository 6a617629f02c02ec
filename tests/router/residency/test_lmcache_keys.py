"""LMCache's keys, beside the keys of a real server's events, and matching by them."""

from cacheengine.keys import HashScheme
from router.residency.block_hashes import PromptKeyring
from router.residency.lmcache_keys import lmcache_chain, lmcache_key64
from router.residency.tiers import KeyShape
from tests.router.lmcache.told import told_batches, transcript_tokens
from tests.router.prompt.prompts_given import GivenPrompt


def test_the_keys_are_those_of_a_real_server() -> None:
    told = {entry.key.chunk_hash_hex for batch in told_batches() for entry in batch.entries}
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
    shape = KeyShape(scheme=HashScheme(), block_tokens=128, blocks_per_chunk=2, lmcache=True)
    keys = PromptKeyring(prompt).of(shape, {})
    digests = lmcache_chain(range(1000), 256)
    assert keys.chain == HashScheme().chain(range(1000), 128)
    assert keys.chunk_chain == digests
    assert keys.chunk_keys == [lmcache_key64(each, "tenant") for each in digests]
    assert (keys.token_ids, keys.cache_salt) == (range(1000), "tenant")


def test_where_vllm_tells_no_keys_chunks_stand_for_blocks() -> None:
    keys = PromptKeyring(GivenPrompt(range(1000))).of(
        KeyShape(scheme=None, block_tokens=256, lmcache=True), {}
    )
    assert keys.keys == keys.chunk_keys == [lmcache_key64(each) for each in keys.chain]
    assert keys.block_tokens == keys.chunk_tokens == 256
