"""The keys of cached KV: vLLM's chain of block hashes, computed outside vLLM.

A block's key is ``H((parent, tuple(token_ids), extra_keys))``, the first
parent being ``H(seed)``. Source: ``hash_block_tokens``, ``init_none_hash`` and
``generate_block_hash_extra_keys`` of vLLM 0.32 (``v1/core/kv_cache_utils.py``)
and ``utils/hashing.py``. KV events carry the low 64 bits of a key as an
integer. A chunk of n blocks has the key of its last block.

This module is shared with the router: standard library, cbor2 and xxhash only.
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import cbor2
import xxhash

TEXT_PIECE_CHARS: Final = 1024
"""Length in characters of the pieces that a prompt without tokens is matched by."""

DEFAULT_SEED: Final = "vllm-none-hash"
"""What vLLM hashes into the first parent when PYTHONHASHSEED is unset (SHA-256 variants)."""

KEY64_MASK: Final = (1 << 64) - 1

ExtraKeys = tuple[tuple[Any, ...], ...] | None
"""What else identifies a block: LoRA adapter, cache salt, ... or None."""


_ALGORITHMS: Final[dict[str, Callable[[object], bytes]]] = {
    "sha256": lambda value: hashlib.sha256(pickle.dumps(value, protocol=5)).digest(),
    "sha256_cbor": lambda value: hashlib.sha256(cbor2.dumps(value, canonical=True)).digest(),
    "xxhash": lambda value: xxhash.xxh3_128_digest(pickle.dumps(value, protocol=5)),
    "xxhash_cbor": lambda value: xxhash.xxh3_128_digest(cbor2.dumps(value, canonical=True)),
}

ALGORITHMS: Final = tuple(_ALGORITHMS)
"""The names of vLLM's ``--prefix-caching-hash-algo``."""

CRYPTOGRAPHIC: Final = ("sha256", "sha256_cbor")
"""Those of them with which nobody can make two prompts that have one key."""


@dataclass(frozen=True)
class HashScheme:
    """One replica's way from tokens to keys.

    ``seed`` is the replica's PYTHONHASHSEED, or `DEFAULT_SEED`. Two schemes
    are equal when they give equal keys for every prompt.
    """

    algorithm: str = "sha256"
    seed: str = DEFAULT_SEED

    def __post_init__(self) -> None:
        if self.algorithm not in _ALGORITHMS:
            raise ValueError(
                f"unknown hash algorithm {self.algorithm!r}; known are {', '.join(ALGORITHMS)}"
            )

    @cached_property
    def root(self) -> bytes:
        """The parent of a chain's first block."""
        return self.digest(self.seed)

    def digest(self, value: object) -> bytes:
        """Return the hash of a value of numbers, texts, bytes and tuples of these."""
        return _ALGORITHMS[self.algorithm](value)

    def chain(
        self,
        token_ids: Sequence[int],
        block_tokens: int,
        *,
        parent: bytes | None = None,
        extra_keys: ExtraKeys = None,
        first_extra_keys: ExtraKeys = None,
    ) -> list[bytes]:
        """Return the keys of the full blocks of ``token_ids``, first to last.

        A tail shorter than ``block_tokens`` has no key. ``parent`` is the key
        of the block before, when ``token_ids`` continues a chain.
        ``extra_keys`` go into every block; ``first_extra_keys``, if given,
        replace them in the first block of a chain that has no parent.
        """
        hash_ = _ALGORITHMS[self.algorithm]
        previous = self.root if parent is None else parent
        keys: list[bytes] = []
        extra = first_extra_keys if parent is None and first_extra_keys else extra_keys
        for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
            previous = hash_((previous, tuple(token_ids[start : start + block_tokens]), extra))
            keys.append(previous)
            extra = extra_keys
        return keys


def prompt_extra_keys(
    *, cache_salt: str | None = None, lora: tuple[str, str] | None = None
) -> tuple[ExtraKeys, ExtraKeys]:
    """Return ``(extra_keys, first_extra_keys)`` of a text prompt for `HashScheme.chain`.

    ``lora`` is (name, path). The salt enters the first block only, after the
    adapter, each value tagged with its source.
    """
    every: tuple[tuple[Any, ...], ...] = (("lora", *lora),) if lora else ()
    first = (*every, ("cache_salt", cache_salt)) if cache_salt else every
    return every or None, first or None


def key64(key: bytes) -> int:
    """Return the low 64 bits of a key, as vLLM's KV events carry it."""
    return int.from_bytes(key[-8:], "big")


def chunk_keys(block_keys: Sequence[bytes], blocks_per_chunk: int) -> list[bytes]:
    """Return the keys of the full chunks of a chain: every n-th block key."""
    return list(block_keys[blocks_per_chunk - 1 :: blocks_per_chunk])
