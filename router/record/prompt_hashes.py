"""Hashes of the beginnings of a prompt, for a request log that can be replayed.

A hash stands for all tokens up to its place, so two prompts begin alike as far as their hashes are
equal. It is a part of the key by which replicas name their KV. No text can be read from it, but
somebody who has a text can find out whether it was sent.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Final

from router.index.prompt_keys import PromptKeys

_FINE_TOKENS: Final = 128
"""Distance of the hashes at the beginning of a prompt."""
_FINE_UNTIL_TOKENS: Final = 16_384
_COARSE_TOKENS: Final = 1_024
"""Their distance after that."""
_MOST_HASHES: Final = 1_024
"""Up to about 900,000 tokens."""
_HASH_BYTES: Final = 6
_MASK: Final = (1 << 8 * _HASH_BYTES) - 1


def places(block_tokens: int) -> Iterator[int]:
    """Yield how many tokens come before each hash, for blocks of this size.

    They depend on nothing else: equal beginnings have equal hashes at equal places.
    """
    end = 0
    while True:
        step = _FINE_TOKENS if end < _FINE_UNTIL_TOKENS else _COARSE_TOKENS
        end = -(-(end // step + 1) * step // block_tokens) * block_tokens
        yield end


def session_hash(session: str) -> str:
    """Return 16 hex digits that are the same for all requests of a session, in every router."""
    return hashlib.sha256(session.encode(errors="surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHashes:
    """The hashes of one prompt."""

    block_tokens: int
    hashes: tuple[int, ...]
    """One for each of the `ends`."""
    session: str | None = None
    """The session's name, by `session_hash`."""

    @classmethod
    def of(cls, keys: PromptKeys, session: str | None) -> "PromptHashes":
        """Return the hashes of a prompt with these keys."""
        block_tokens = keys.block_tokens
        whole = len(keys.keys) * block_tokens
        ends = takewhile(lambda end: end <= whole, islice(places(block_tokens), _MOST_HASHES))
        return cls(
            block_tokens=block_tokens,
            hashes=tuple(keys.keys[each // block_tokens - 1] & _MASK for each in ends),
            session=None if session is None else session_hash(session),
        )

    @property
    def ends(self) -> Sequence[int]:
        """How many tokens come before each hash."""
        return list(islice(places(self.block_tokens), len(self.hashes)))

    def to_json(self) -> dict[str, Any]:
        """Return what the log says: 8 characters for each hash."""
        packed = b"".join(each.to_bytes(_HASH_BYTES, "big") for each in self.hashes)
        return {
            "block_tokens": self.block_tokens,
            "hashes": base64.b64encode(packed).decode(),
            "session": self.session,
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "PromptHashes":
        """Return what `to_json` was made from; raise ValueError for anything else."""
        block_tokens, text, session = (
            told.get(each) for each in ("block_tokens", "hashes", "session")
        )
        if not isinstance(block_tokens, int) or block_tokens < 1:
            raise ValueError("block_tokens is not a number above 0")
        if not isinstance(text, str) or not isinstance(session, str | None):
            raise ValueError("hashes and session are not texts")
        try:
            packed = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"hashes is not base64 ({error})") from None
        if len(packed) % _HASH_BYTES:
            raise ValueError(f"hashes are not {_HASH_BYTES} bytes each")
        starts = range(0, len(packed), _HASH_BYTES)
        hashes = (int.from_bytes(packed[at : at + _HASH_BYTES], "big") for at in starts)
        return cls(block_tokens=block_tokens, hashes=tuple(hashes), session=session)
