"""Chains of keys, and those of chunks.

That they are vLLM's is shown in `tests/router/index/test_block_hashes_vllm.py`.
"""

import pytest

from warmroute_common.keys import HashScheme, chunk_keys, prompt_extra_keys

TOKENS = [(i * 7919) % 4096 for i in range(1000)]


def test_a_chain_continues_from_its_parent() -> None:
    scheme = HashScheme()
    whole = scheme.chain(TOKENS, 16)
    head = scheme.chain(TOKENS[:320], 16)
    assert head == whole[:20]
    assert head + scheme.chain(TOKENS[320:], 16, parent=head[-1]) == whole


def test_a_salt_does_not_reenter_a_continued_chain() -> None:
    scheme = HashScheme()
    extra, first = prompt_extra_keys(cache_salt="tenant")
    whole = scheme.chain(TOKENS, 16, extra_keys=extra, first_extra_keys=first)
    tail = scheme.chain(TOKENS[160:], 16, parent=whole[9], extra_keys=extra, first_extra_keys=first)
    assert tail == whole[10:]
    assert set(whole).isdisjoint(scheme.chain(TOKENS, 16))


def test_short_tail_has_no_key_and_chunks_take_every_nth() -> None:
    chain = HashScheme().chain(TOKENS, 128)
    assert len(chain) == 7
    assert chunk_keys(chain, 2) == [chain[1], chain[3], chain[5]]
    assert HashScheme().chain(TOKENS[:15], 16) == []


def test_unknown_algorithm_names_the_known() -> None:
    with pytest.raises(ValueError, match="unknown hash algorithm 'md5'; known are sha256"):
        HashScheme("md5")
