"""The keys of LMCache's chunks: hash chains of its own, different from vLLM's. Pure.

An LMCache server (``lmcache server``) computes ``h = blake3(h + uint32be(tokens))`` for each full
chunk, starting from ``blake3(int64be(0) + uint32be(0))``. Source: ``TokenHasher`` of lmcache 0.5.6
(``v1/multiprocess/token_hasher.py``) with its default ``--hash-algorithm``.

LMCache inside vLLM computes ``h = H((h, tuple(tokens), ()))``, starting from ``H(seed)``.
Each ``h`` is an integer: the first 8 bytes of a digest, or the result of Python's ``hash``. Source:
``ChunkedTokenDatabase`` of lmcache 0.5.6 (``v1/token_database.py``). ``H`` and the seed are vLLM's
(`HashScheme`). For Python's ``hash`` of a text in a process with a known PYTHONHASHSEED, see
``Python/pyhash.c`` (SipHash-1-3, the default since CPython 3.11) and ``Python/bootstrap_hash.c``
(how the key is made from the seed). Hashes of integers and tuples do not depend on the seed.

These hashes cover neither the model nor the cache salt.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash
from blake3 import blake3

from warmroute_common.keys import DEFAULT_SEED, KEY64_MASK, HashScheme

_MASK: Final = (1 << 64) - 1
_START: Final = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)


def hash_of_text(text: str, hash_seed: int) -> int:
    """Return ``hash(text)`` where ``PYTHONHASHSEED=hash_seed``; ``text`` is ASCII, not empty."""
    data, key = text.encode("ascii"), _key(hash_seed)
    v0, v1, v2, v3 = (start ^ key[number % 2] for number, start in enumerate(_START))
    whole = len(data) // 8 * 8
    words = [data[at : at + 8] for at in range(0, whole, 8)]
    last = int.from_bytes(data[whole:], "little") | (len(data) & 0xFF) << 56
    for word in [*(int.from_bytes(each, "little") for each in words), last]:
        v0, v1, v2, v3 = _round(v0, v1, v2, v3 ^ word)
        v0 ^= word
    v2 ^= 0xFF
    for _ in range(3):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    found = v0 ^ v1 ^ v2 ^ v3
    signed = found - (1 << 64) if found >> 63 else found
    return -2 if signed == -1 else signed


def _key(hash_seed: int) -> tuple[int, int]:
    """Return SipHash's key: zero for the seed 0, else from a linear congruential generator."""
    secret, state = bytearray(), hash_seed
    for _ in range(16):
        state = (state * 214013 + 2531011) & 0xFFFFFFFF
        secret.append(state >> 16 & 0xFF if hash_seed else 0)
    return int.from_bytes(secret[:8], "little"), int.from_bytes(secret[8:], "little")


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> 64 - bits) & _MASK


def _round(v0: int, v1: int, v2: int, v3: int) -> tuple[int, int, int, int]:
    v0, v2 = (v0 + v1) & _MASK, (v2 + v3) & _MASK
    v1, v3 = _rotated(v1, 13) ^ v0, _rotated(v3, 16) ^ v2
    v0 = _rotated(v0, 32)
    v2, v0 = (v2 + v1) & _MASK, (v0 + v3) & _MASK
    v1, v3 = _rotated(v1, 17) ^ v2, _rotated(v3, 21) ^ v0
    return v0, v1, _rotated(v2, 32), v3


LMCACHE_HASH: Final = "blake3"
"""The only ``--hash-algorithm`` of its servers' that is known here."""

_PYTHONS_OWN: Final = "builtin"
_ALIASES: Final = {"sha256_cbor_64bit": "sha256_cbor"}
_TOKEN_BYTES: Final = 4
_ROOT: Final = blake3(bytes(8 + _TOKEN_BYTES)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LmcacheKeys:
    """How an LMCache cuts prompts into chunks, and makes their keys."""

    chunk_tokens: int
    algorithm: str = LMCACHE_HASH
    """Inside vLLM: its ``pre_caching_hash_algorithm``."""
    root: int = 0
    """Inside vLLM: the parent of a chain's first chunk."""

    @classmethod
    def inside(cls, chunk_tokens: int, algorithm: str, hash_seed: str | None) -> "LmcacheKeys":
        """Return those of LMCache inside a vLLM whose PYTHONHASHSEED is ``hash_seed``.

        Raises ValueError where that process makes them of a seed that is its own.
        """
        algorithm = _ALIASES.get(algorithm, algorithm)
        seed = hash_seed
        if seed is None and algorithm.startswith("sha256"):
            seed = DEFAULT_SEED
        if seed is None or (algorithm == _PYTHONS_OWN and not seed.isdecimal()):
            raise ValueError(
                f"pre_caching_hash_algorithm '{algorithm}' makes other keys in every process: "
                "start it with PYTHONHASHSEED=0 and write hash_seed: '0' here, or use sha256_cbor"
            )
        if algorithm == _PYTHONS_OWN:
            root = hash_of_text(seed, int(seed))
        else:
            root = _first_bytes(HashScheme(algorithm, seed).root)
        return cls(chunk_tokens=chunk_tokens, algorithm=algorithm, root=root)

    @property
    def is_server(self) -> bool:
        """Whether it is a server, which can be told to prefetch; else it is inside vLLM."""
        return self.algorithm == LMCACHE_HASH

    def chain(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the keys of the full chunks of a prompt, first to last."""
        if self.is_server:
            return lmcache_chain(token_ids, self.chunk_tokens)
        step, previous, chain = self.chunk_tokens, self.root, []
        digest = _hash(self.algorithm)
        for start in range(0, len(token_ids) - step + 1, step):
            previous = digest((previous, tuple(token_ids[start : start + step]), ()))
            chain.append((previous & KEY64_MASK).to_bytes(8, "big"))
        return chain


def _hash(algorithm: str) -> Callable[[object], int]:
    if algorithm == _PYTHONS_OWN:
        return hash
    scheme = HashScheme(algorithm)
    return lambda value: _first_bytes(scheme.digest(value))


def _first_bytes(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


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
