"""The prompt of one request: its tokens or text, and the keys that it is matched by."""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from router.prompt.token_cache import Memo, Piece
from warmroute_common.keys import TEXT_PIECE_CHARS, HashScheme, prompt_extra_keys

CHARS_PER_TOKEN: Final = 4
"""How many characters a token has, where that is not known."""

_JOINED_TOKENS: Final = 8192
_AFFINITY_TOKENS: Final = 256
_AFFINITY_CHARS: Final = 1024


@dataclass(kw_only=True, eq=False)
class Prompt:
    """The prompt of one request.

    ``model``, ``cache_salt`` and ``media_settings`` are part of every key, so that
    equal texts of two tenants have no key in common.
    """

    token_ids: Sequence[int] | None = None
    """The tokens, or None where they are not known; with media, those before the first.

    Mostly an array: of a long prompt only the new tokens are looked at one by one.
    """
    doubt: str | None = None
    """Why `exact` is false, or None."""
    model: str | None = None
    """The name that the request gives."""
    cache_salt: str | None = None
    media_settings: str = ""
    """How the request wants its media processed."""
    part_types: frozenset[str] = frozenset()
    """What can make a replica use an adapter (`lora`) without being asked to."""
    memo: Memo
    pieces: Sequence[Piece] = ()
    """What ``token_ids`` are put together from; empty where they are not."""
    first_medium: str = ""
    """What tells its first medium from others; empty where there is none."""
    rest_chars: int = 0
    """How much of the text comes after ``token_ids``."""
    rendered: str | None = None
    """The text; None where only tokens are given."""
    _chains: dict[object, list[bytes]] = field(default_factory=dict, init=False)

    @property
    def exact(self) -> bool:
        """Whether ``token_ids`` are certainly what the replica will see."""
        return self.token_ids is not None and self.doubt is None

    @property
    def text(self) -> str:
        """The rendered prompt; something that stands for it where it is not text."""
        if self.rendered is None:
            ids = self.token_ids or ()
            # In parts, between which other threads may run.
            parts = (ids[at : at + _JOINED_TOKENS] for at in range(0, len(ids), _JOINED_TOKENS))
            self.rendered = " ".join(" ".join(map(str, part)) for part in parts)
        return self.rendered

    @property
    def token_count(self) -> int:
        """The number of tokens; without a tokenizer, or with media, an estimate."""
        if self.token_ids is None:
            return -(-len(self.text) // CHARS_PER_TOKEN)
        return len(self.token_ids) - (-self.rest_chars // CHARS_PER_TOKEN)

    @property
    def affinity(self) -> bytes:
        """What prompts that begin alike, and may share KV, have in common."""
        if self.token_ids and not self.first_medium:
            beginning = array("q", self.token_ids[:_AFFINITY_TOKENS]).tobytes()
        else:
            beginning = self.text[:_AFFINITY_CHARS].encode(errors="surrogatepass")
        return self._apart() + beginning + self.first_medium.encode()

    def lora(self, adapters: Mapping[str, str]) -> tuple[str, str] | None:
        """Return (name, path) of the adapter that a replica which has ``adapters`` will use.

        ``adapters`` gives paths by name; they are the replica's own, and part of its
        keys. As vLLM 0.32 decides (``_maybe_get_adapters``): the model that is asked
        for, else the only one that has the name of a kind of content.
        """
        if self.model is not None and self.model in adapters:
            return self.model, adapters[self.model]
        active = self.part_types & adapters.keys()
        return next(((name, adapters[name]) for name in active), None) if len(active) == 1 else None

    def chain(
        self,
        scheme: HashScheme,
        block_tokens: int,
        *,
        lora: tuple[str, str] | None = None,
    ) -> list[bytes]:
        """Return the keys of the prompt's full blocks; none where tokens are not known.

        With media, of the blocks wholly before the first one. ``lora`` is the
        replica's: see `lora`. What has been hashed for this or another prompt before is not hashed
        again. The list is shared between calls: do not change it.
        """
        if self.token_ids is None:
            return []
        name = (scheme, block_tokens, lora)
        keys = self._chains.get(name)
        if keys is None:
            every, first = prompt_extra_keys(cache_salt=self.cache_salt, lora=lora)
            keys = self.memo.chain(
                self.pieces,
                self.token_ids,
                scheme,
                block_tokens,
                extra_keys=every,
                first_extra_keys=first,
            )
            self._chains[name] = keys
        return keys

    def text_chain(self) -> list[int]:
        """Return a chain of 64-bit keys, one for each full `TEXT_PIECE_CHARS` of the text.

        Each stands for all of the text up to its end, the model and the salt. The
        model is the name in the request, an adapter's or not: two names of one model
        share nothing here.
        """
        previous = xxhash.xxh3_64_digest(self._apart())
        keys: list[int] = []
        text = self.text
        for end in range(TEXT_PIECE_CHARS, len(text) + 1, TEXT_PIECE_CHARS):
            piece = text[end - TEXT_PIECE_CHARS : end].encode(errors="surrogatepass")
            previous = xxhash.xxh3_64_digest(previous + piece)
            keys.append(int.from_bytes(previous, "big"))
        return keys

    def _apart(self) -> bytes:
        return json.dumps([self.model, self.cache_salt, self.media_settings]).encode()

    def __repr__(self) -> str:
        kind = "exact" if self.exact else f"not exact: {self.doubt}"
        return f"Prompt({self.token_count} tokens, {kind})"
