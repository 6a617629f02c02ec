"""Keys of prompts, and the bytes that belong to a key. Pure."""

import hashlib
import random
from typing import Final

PAGE_BYTES: Final = 4096
_DIGEST_BYTES: Final = 64


def prefix_keys(conversation: int, chunks: int) -> list[bytes]:
    """Return the keys of a conversation's first chunks."""
    return [hashlib.sha256(b"%d/%d" % (conversation, n)).digest() for n in range(chunks)]


def a_prompt(rng: random.Random, conversations: int, longest_chunks: int) -> list[bytes]:
    """Return the keys of a prompt: half of the prompts are whole conversations.

    The lower its number, the more often a conversation is asked for.
    """
    chunks = longest_chunks if rng.random() < 0.5 else rng.randint(1, longest_chunks)
    return prefix_keys(int(conversations * rng.random() ** 2), chunks)


def content(key: bytes, size_bytes: int) -> bytes:
    """Return a chunk's bytes: each page is another's neither of this chunk nor of any other."""
    pages = range(-(-size_bytes // PAGE_BYTES))
    digests = (hashlib.blake2b(b"%d" % page, key=key).digest() for page in pages)
    return b"".join(digest * (PAGE_BYTES // _DIGEST_BYTES) for digest in digests)[:size_bytes]
