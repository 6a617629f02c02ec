"""CPython's ``hash`` of a text in another process, one that runs with a known PYTHONHASHSEED. Pure.

Sources: ``Python/pyhash.c`` (SipHash-1-3, the default since CPython 3.11) and
``Python/bootstrap_hash.c`` (how the key is made of the seed). Hashes of integers and tuples do
not depend on the seed, so this process's own ``hash`` gives those.
"""

from typing import Final

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
