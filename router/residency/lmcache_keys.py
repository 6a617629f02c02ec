"""The keys of LMCache's chunks: a chain of hashes of its own, apart from vLLM's. Pure.

``h = blake3(h + uint32be(tokens))`` for each full chunk, from ``blake3(int64be(0) + uint32be(0))``.
Source: ``TokenHasher`` of lmcache 0.5.6 (``v1/multiprocess/token_hasher.py``) with its default
``--hash-algorithm``. Neither the model nor the cache salt is in the hash: LMCache's keys carry
them beside it.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Final

import xxhash
from blake3 import blake3

LMCACHE_HASH: Final = "blake3"
"""The only ``--hash-algorithm`` of LMCache's that is known here."""

_TOKEN_BYTES: Final = 4
_ROOT: Final = blake3(bytes(8 + _TOKEN_BYTES)).digest()


def lmcache_chain(token_ids: Sequence[int], chunk_tokens: int) -> list[bytes]:
    """Return the 32-byte keys of the full chunks of a prompt, first to last."""
    count = len(token_ids) // chunk_tokens
    try:
        packed = _packed(token_ids[: count * chunk_tokens])
    except OverflowError:
        return []  # below 0 or above 32 bits: no model has such tokens
    step = chunk_tokens * _TOKEN_BYTES
    previous, chain = _ROOT, []
    for start in range(0, len(packed), step):
        previous = blake3(previous + packed[start : start + step]).digest()
        chain.append(previous)
    return chain


def lmcache_key64(digest: bytes, cache_salt: str | None = None) -> int:
    """Return the key by which the index knows a chunk: another for each salt."""
    key = int.from_bytes(digest[-8:], "big")
    return key ^ xxhash.xxh3_64_intdigest(cache_salt.encode()) if cache_salt else key


def _packed(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()
