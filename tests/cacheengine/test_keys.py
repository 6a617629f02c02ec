"""Our keys are vLLM's keys."""

import os
import subprocess
import sys

import pytest

from cacheengine.keys import (
    ALGORITHMS,
    HashScheme,
    chunk_keys,
    prompt_extra_keys,
)

TOKENS = [(i * 7919) % 4096 for i in range(1000)]

# Runs in a process of its own, once for all algorithms: vLLM takes seconds to import
# and keeps its root hash in a module variable.
VLLM_CHAIN = """
import sys
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils as u
tokens = [(i * 7919) % 4096 for i in range(1000)]
extra = [
    (None, None),
    ((("cache_salt", "s"),), None),
    ((("lora", "a", "/p"), ("cache_salt", "s")), (("lora", "a", "/p"),)),
]
for algorithm in sys.argv[1:]:
    fn = get_hash_fn_by_name(algorithm)
    u.init_none_hash(fn)
    for first, rest in extra:
        parent = None
        for start in range(0, 1000 - 16 + 1, 16):
            keys = first if start == 0 else rest
            parent = u.hash_block_tokens(fn, parent, tokens[start:start + 16], keys)
            print("key of", algorithm, parent.hex())
"""


@pytest.fixture(scope="module")
def vllm_chains() -> dict[str, list[bytes]]:
    """vLLM's own keys by algorithm."""
    pytest.importorskip("vllm")
    result = subprocess.run(
        [sys.executable, "-c", VLLM_CHAIN, *ALGORITHMS],
        env={**os.environ, "PYTHONHASHSEED": "42"},
        check=True,
        capture_output=True,
        text=True,
    )
    chains: dict[str, list[bytes]] = {algorithm: [] for algorithm in ALGORITHMS}
    for line in result.stdout.splitlines():
        if line.startswith("key of "):
            _, _, algorithm, key = line.split()
            chains[algorithm].append(bytes.fromhex(key))
    return chains


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_chain_equals_vllm(vllm_chains: dict[str, list[bytes]], algorithm: str) -> None:
    scheme = HashScheme(algorithm, "42")
    ours: list[bytes] = []
    for salt, lora in [(None, None), ("s", None), ("s", ("a", "/p"))]:
        extra, first = prompt_extra_keys(cache_salt=salt, lora=lora)
        ours += scheme.chain(TOKENS, 16, extra_keys=extra, first_extra_keys=first)
    assert ours == vllm_chains[algorithm]


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
